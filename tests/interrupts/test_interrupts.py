"""A call that an exception has interrupted is finished by calling it again, and nothing is done twice or lost.

`make interrupts` sends 10,000 signals into each operation and mode.
"""

from __future__ import annotations

import pytest
from interrupting import At, Storm
from operations import CASES, pair

IDS = [f"{kind}-{mode}" for kind, mode in CASES]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind, mode", CASES, ids=IDS)
def test_at_every_point_at_which_a_handler_can_run(kind: str, mode: str) -> None:
    with pair(kind, mode) as both:
        points = 0
        while both.step(At(points, points * 7 % 5)):
            points += 1
        assert points > 20


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind, mode", CASES, ids=IDS)
def test_in_a_storm_of_signals(kind: str, mode: str) -> None:
    with pair(kind, mode) as both, Storm(1) as storm:
        for _ in range(60):
            both.step(storm)
