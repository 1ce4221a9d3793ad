"""Every store, wake, swap and check of rounds, waits, reductions and locks is needed: spoilt, some schedule notices.

The schedule that does stands in ``mutants.json``. After a change of a kernel it may be another, so others are tried
when it does not; ``make mutants`` looks for longer, and writes the table anew.
"""

from __future__ import annotations

import functools
import time

import interleavings.mutants
import pytest
from interleavings.laws import LAWS
from interleavings.mutants import LAWS_OF, Mutant, catches, kept, mutants, search
from interleavings.source import Source, compiled
from interleavings.tolerated import TOLERATED
from interleavings.world import MEMORY

MORE = 100  # schedules of each law that are tried beside the one in the table


@functools.cache
def everything() -> dict[str, Mutant]:
    """All mutants, by name: made when a test needs them, as that takes seconds."""
    return {mutant.name: mutant for mutant in mutants()}


@pytest.mark.parametrize("module", LAWS_OF)
def test_each_spoilt_line_is_noticed(module: str) -> None:
    table = kept()
    missed = [
        mutant.name
        for mutant in spoilt(module)
        if mutant.name not in TOLERATED and not search(mutant, table.get(mutant.name), range(MORE))
    ]
    assert not missed, (
        "no schedule notices these, so that nothing tests these lines, or they are not needed; look for longer with "
        f"make mutants ARGS='--only NAME', or take the line out: {missed}"
    )


def test_what_the_tables_name_is_still_there() -> None:
    there = {*everything()}
    gone = {*TOLERATED, *kept()} - there
    assert not gone, f"no line makes these any more (`make mutants` leaves them out of mutants.json): {gone}"


def spoilt(module: str) -> list[Mutant]:
    """The mutants of one module."""
    return [mutant for mutant in everything().values() if mutant.module.endswith(f".{module}")]


@pytest.mark.parametrize("takes_steps", [True, False])
def test_only_a_schedule_that_takes_no_step_any_more_has_no_end(
    takes_steps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that only takes long, on a busy machine say, catches nothing."""

    def law(source: Source, seed: int) -> None:
        looks = 0
        while looks < 100 or not takes_steps:
            began = time.process_time()
            while time.process_time() < began + 0.001:  # the timer counts whole ticks of the system's clock
                pass
            MEMORY.scheduler.steps += takes_steps
            looks += 1

    monkeypatch.setattr(interleavings.mutants, "LOOK_SECONDS", 0.02)
    monkeypatch.setitem(LAWS, "long", law)
    mutant = Mutant("long", "multiverso.kernels.waits", lambda: compiled("multiverso.kernels.waits"))
    assert catches(mutant, Source(MEMORY), "long", 0) is not takes_steps
