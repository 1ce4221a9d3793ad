"""The kernels' laws hold in every schedule tried here; `make interleave` tries others for as long as it is let."""

from __future__ import annotations

import pytest
from interleavings.laws import LAWS
from interleavings.source import Source
from interleavings.world import MEMORY

SCHEDULES = {
    "rounds": 900,
    "latecomers": 900,
    "barriers": 900,
    "clocks": 900,
    "locks": 700,
    "reduce_small": 900,
    "reduce_in_chunks": 500,
}
# Found a defect once, and are kept whatever they are good for today. (The defects themselves are kept as mutants.)
KEPT = [
    ("reduce_small", 28),  # who came and left in order between two looks was taken for lost
    (
        "rounds",
        4412,
    ),  # who folded, went on and left between two looks had its part folded with the next round's slot
    ("barriers", 434),  # who came and died between two looks was taken for one that had not come
    (
        "latecomers",
        89,
    ),  # a finished round was made an empty one by a latecomer, its last reader having just left
    (
        "latecomers",
        186,
    ),  # a latecomer's add was in a round's later chunks, and a latecomer that left had its add lost
]


@pytest.fixture(scope="module")
def source() -> Source:
    """The kernels' source, executed once."""
    return Source(MEMORY)


@pytest.mark.parametrize("law", LAWS)
def test_a_law_holds_in_random_schedules(source: Source, law: str) -> None:
    for seed in range(SCHEDULES[law]):
        hold(source, law, seed)


@pytest.mark.parametrize("law, seed", KEPT)
def test_a_law_holds_in_the_schedules_that_broke_it(source: Source, law: str, seed: int) -> None:
    hold(source, law, seed)


def hold(source: Source, law: str, seed: int) -> None:
    """Fails with the words that replay the schedule."""
    try:
        LAWS[law](source, seed)
    except AssertionError as error:
        again = f"make interleave ARGS='--replay --trace --law {law} --seed {seed}'"
        raise AssertionError(f"{error}\nto see this schedule step by step: {again}") from error
