"""What all tests of real daemons have in common. They are run by `make engines`, which says what is missing."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
