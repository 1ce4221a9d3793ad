"""Random programs, in short; `make programs` runs many."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import comparing
import pytest

from warm import Warm


@pytest.mark.parametrize("seed", [1, 2])
def test_a_program_that_is_killed_and_resumed_ends_with_the_same_bits(seed: int, warm: Warm) -> None:
    def run(folder: str, *command: str) -> subprocess.CompletedProcess[str]:
        return warm.run(*command, cwd=Path(folder), env=os.environ, timeout=2 * comparing.SECONDS)

    comparing.compare(seed, run)
