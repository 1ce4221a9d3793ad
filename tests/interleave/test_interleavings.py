"""The kernels' laws hold in every schedule tried here; `make interleave` tries others for as long as it is let."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from interleavings.laws import LAWS
from interleavings.source import Source
from interleavings.world import MEMORY

SCHEDULES = {
    "rounds": 400,
    "latecomers": 400,
    "joining": 500,
    "stopped": 300,
    "corners": 800,
    "alone": 500,
    "quorum": 300,
    "quorum_joining": 250,
    "quorum_stopped": 200,
    "quorum_replayed": 150,
    "barriers": 400,
    "gates": 300,
    "clocks": 400,
    "locks": 300,
    "rows": 500,
    "reduce_small": 400,
    "reduce_in_chunks": 250,
    "publications": 500,
}


@pytest.fixture(scope="module")
def source() -> Source:
    """The kernels' source, executed once."""
    return Source(MEMORY)


@pytest.mark.parametrize("law", LAWS)
def test_a_law_holds_in_random_schedules(source: Source, law: str) -> None:
    for seed in range(SCHEDULES[law]):
        hold(source, law, seed)


def hold(source: Source, law: str, seed: int) -> None:
    """Fails with the words that replay the schedule."""
    try:
        LAWS[law](source, seed)
    except AssertionError as error:
        again = f"make interleave ARGS='--replay --trace --law {law} --seed {seed}'"
        raise AssertionError(f"{error}\nto see this schedule step by step: {again}") from error


def test_the_program_runs_where_nothing_else_has_imported_what_it_executes() -> None:
    """Its first dataclass ended it: here, in a process that has imported everything, none does."""
    folders = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-m", "interleavings", "--seconds", "0.1", "--law", "rows"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(folders)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "broken by none" in done.stdout
