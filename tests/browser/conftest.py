"""Lets these tests import what those of the page over HTTP use, and gives it what its jobs are forked from."""

import runpy
import sys
from pathlib import Path

PAGE = Path(__file__).parent.parent / "page"
sys.path.insert(0, str(PAGE))
interpreter = runpy.run_path(str(PAGE / "conftest.py"))["interpreter"]
