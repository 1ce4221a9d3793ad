"""A little of the fuzzing with every run of the tests; `make fuzz` does it for as long as it is told."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from fuzz_platoon import fuzz


def test_platoons_ports_bear_nonsense() -> None:
    assert fuzz(2.0, seed=20_25) > 10
