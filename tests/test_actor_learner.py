"""Actors that are no workers: the bound on their samples' age holds, and a run that is repeated is the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("lag", [0, 3])
def test_no_sample_is_older_than_the_bound_and_a_rerun_accepts_the_same(lag: int) -> None:
    """It asserts both itself, and says what it has accepted."""
    command = [sys.executable, "examples/actor_learner/cartpole.py", "--versions", "20", "--lag", str(lag)]
    ended = subprocess.run(
        command, cwd=ROOT, env=os.environ, stdout=subprocess.PIPE, text=True, timeout=250, check=True
    )
    told = json.loads(ended.stdout)
    assert told["accepted"] == 20 <= told["offered"]
    assert told["oldest"] <= lag
