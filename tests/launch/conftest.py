"""Lets the tests of this folder import its `launch_support`, whose `multiverso` has its imports behind it."""

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import launch_support


@pytest.fixture(scope="session", autouse=True)
def _warm_launcher(warm: Any) -> None:
    launch_support.warm.append(warm)
