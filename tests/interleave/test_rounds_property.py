"""Rounds with workers that leave, die and join in any order: hypothesis draws them, and makes small what fails."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from interleavings.laws.rounds import OPERATIONS, Plan, run
from interleavings.scheduler import Scheduler
from interleavings.source import Source
from interleavings.world import MEMORY

SOURCE = Source(MEMORY)


@st.composite
def plans(draw: Any) -> Plan:
    """Draws who is there, what each does, and who dies and comes when."""
    workers, late = draw(st.integers(1, 4)), draw(st.integers(0, 2))
    everyone, steps = workers + late, st.integers(1, 600)
    event = st.tuples(steps, st.integers(0, workers - 1))
    operations = st.lists(st.sampled_from(sorted(set(OPERATIONS))), max_size=4).map(tuple)
    return Plan(
        operations=tuple(draw(operations) for _ in range(everyone)),
        leaves_an_add=tuple(draw(st.booleans()) for _ in range(everyone)),
        workers=workers,
        chunks=draw(st.integers(1, 3)),
        length=16 * draw(st.integers(1, everyone)),
        short=draw(st.integers(0, 15)),
        continues=draw(st.booleans()),
        deaths=tuple(draw(st.lists(event, max_size=3))),
        signals=tuple(draw(st.lists(event, max_size=3))),
        latecomers=tuple((draw(steps), draw(st.integers(0, everyone - 1))) for _ in range(late)),
    )


@settings(max_examples=200, derandomize=True)
@given(
    plan=plans(),
    turns=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 120)), max_size=20),
    seed=st.integers(0, 1000),
)
def test_whoever_comes_and_goes_all_who_finish_a_round_read_the_same(
    plan: Plan, turns: list[tuple[int, int]], seed: int
) -> None:
    """The turns are who goes on for how many steps; after them everyone goes on until he sleeps or ends."""
    script = [(f"worker {worker}", steps) for worker, steps in turns]
    run(SOURCE, plan, Scheduler(seed, "script", script=script))
