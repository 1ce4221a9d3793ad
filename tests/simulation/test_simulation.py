"""Sums are exact in every simulated schedule tried here; `make simulate` tries others for as long as it is let."""

from __future__ import annotations

import numpy as np
import pytest
from simulated import rounds, statistics
from simulated.world import Memory, run

from multiverso.hosts.rounds import Rounds

SCHEDULES = 100
ROUNDS = 40


@pytest.mark.parametrize("part", range(4))
def test_sums_are_exact_whatever_the_network_does(part: int) -> None:
    faults, memory = 0, Memory()
    for seed in range(part * SCHEDULES // 4, (part + 1) * SCHEDULES // 4):
        try:
            faults += run(seed, memory).faults
        except Exception as error:
            raise AssertionError(f"make simulate SEED={seed} ARGS=--replay: {error}") from error
    assert faults, "these schedules had no fault in them"


def test_rounds_have_the_same_bits_whatever_the_network_does() -> None:
    faults = lost = 0
    for seed in range(ROUNDS):
        try:
            world = rounds.run(seed)
        except Exception as error:
            raise AssertionError(f"make simulate SEED={seed} ARGS='--rounds --replay': {error}") from error
        faults, lost = faults + world.faults, lost + world.lost
    assert faults > lost > 0, "these schedules had no fault in them"


def test_statistics_stay_between_those_of_the_hosts_whatever_the_network_does() -> None:
    faults, memory = 0, Memory()
    for seed in range(ROUNDS):
        try:
            faults += statistics.run(seed, memory).faults
        except Exception as error:
            raise AssertionError(
                f"make simulate SEED={seed} ARGS='--statistics --replay': {error}"
            ) from error
    assert faults, "these schedules had no fault in them"


def test_a_seed_makes_the_same_schedule_again() -> None:
    lines: list[list[str]] = [[], []]
    for kept in lines:
        run(7, Memory(), kept.append)
    assert lines[0] == lines[1]


def test_a_table_that_ends_while_it_is_looked_at_is_touched_no_more() -> None:
    class Ending(rounds.Staged):
        ended = False

        def members(self, number: int) -> int | None:
            if self.ready:
                host.detach(rounds.TABLE)
                self.ended = True
            return None

        def wanted(self, number: int) -> bool:
            assert not self.ended, "its memory may be another table's"
            return False

    host = Rounds(0, [0], lambda peer: None)
    staged = Ending(4, 4, np.zeros(4, np.float32), [])
    host.attach(rounds.TABLE, staged)
    host.begin(rounds.TABLE)
    host.look(0.0)
    staged.ready = 1
    host.look(0.0)
    assert staged.ended
