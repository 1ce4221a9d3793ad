"""What all workers do together in steps: one that is interrupted and begins again is named to the others at once."""

from __future__ import annotations

from typing import Any

import pytest
from core_support import outcome, together
from interrupted_tasks import all_of_it, interrupt, interrupted, repeated, task

from multiverso.runtime import Session
from multiverso.runtime.collective.agreement import all_gather

PLACES = ["action", "before the barrier", "after the barrier"]


def test_one_that_begins_again_is_named_to_the_others_and_all_repeat_it() -> None:
    for_others, for_it = together(lambda session: [repeated(session, where) for where in PLACES], 2)
    for (error, result), (_, own) in zip(for_others, for_it, strict=True):
        assert error.startswith("worker 1 began again")
        assert result == own == all_of_it(2)


def test_those_who_are_all_interrupted_begin_again_together() -> None:
    """Ctrl-C reaches all, each in another place."""

    def work(session: Session) -> Any:
        interrupted(session, PLACES[session.worker_id])
        return task(session)

    assert together(work, 3) == [all_of_it(3)] * 3


def test_different_tasks_are_told_apart_at_once() -> None:
    def work(session: Session) -> Any:
        return str(outcome(lambda: task(session, ["save", "load"][session.worker_id])))

    errors = together(work, 2)
    assert errors[0].startswith("worker 1 came to a load instead")
    assert errors[1].startswith("worker 0 came to a save instead")


def test_what_was_told_when_an_interrupt_came_stays_told() -> None:
    """Others may have read it already."""

    def work(session: Session) -> Any:
        if session.worker_id:
            return [all_gather(session, f"1 {i}") for i in range(3)]
        with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(session, "barrier", interrupt)
            all_gather(session, "0 interrupted")
        return [all_gather(session, f"0 {i}") for i in range(2)]

    ours, theirs = together(work, 2)
    assert theirs == [{0: "0 interrupted", 1: "1 0"}, *ours]
    assert ours == [{0: f"0 {i}", 1: f"1 {i + 1}"} for i in range(2)]
