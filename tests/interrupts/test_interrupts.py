"""A call that an exception has interrupted is finished by calling it again, and nothing is done twice or lost.

`make interrupts` sends 10,000 signals into each operation and mode, and tries each point; here each mode has a third.
"""

from __future__ import annotations

import os

import pytest
from interrupting import At, Storm
from operations import CASES, MODES, pair

WHOLE = "MULTIVERSO_TEST_WHOLE" in os.environ
IDS = [f"{kind}-{mode}" for kind, mode in CASES]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind, mode", CASES, ids=IDS)
def test_at_every_point_at_which_a_handler_can_run(kind: str, mode: str) -> None:
    with pair(kind, mode) as both:
        points, stride = (0, 1) if WHOLE else (list(MODES).index(mode), 3)
        while both.step(At(points, points * 7 % 5)):
            points += stride
        assert points > 20


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind, mode", CASES, ids=IDS)
def test_in_a_storm_of_signals(kind: str, mode: str) -> None:
    with pair(kind, mode) as both, Storm(1) as storm:
        for _ in range(60):
            both.step(storm)
