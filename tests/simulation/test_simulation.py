"""Sums are exact in every simulated schedule tried here; `make simulate` tries others for as long as it is let."""

from __future__ import annotations

import pytest
from simulated.world import Memory, run

SCHEDULES = 120


@pytest.mark.parametrize("part", range(4))
def test_sums_are_exact_whatever_the_network_does(part: int) -> None:
    faults, memory = 0, Memory()
    for seed in range(part * SCHEDULES // 4, (part + 1) * SCHEDULES // 4):
        try:
            faults += run(seed, memory).faults
        except Exception as error:
            raise AssertionError(f"make simulate SEED={seed} ARGS=--replay: {error}") from error
    assert faults, "these schedules had no fault in them"


def test_a_seed_makes_the_same_schedule_again() -> None:
    lines: list[list[str]] = [[], []]
    for kept in lines:
        run(7, Memory(), kept.append)
    assert lines[0] == lines[1]
