"""A task of all workers in steps, which one of them is interrupted in and begins again."""

from __future__ import annotations

from typing import Any, NoReturn

import pytest
from core_support import outcome

from multiverso.errors import MultiversoError
from multiverso.runtime import Session
from multiverso.runtime.collective.agreement import Together

STEPS, INTERRUPTED = 3, 1  # how many, and the one in which somebody is interrupted


def task(session: Session, what: str = "load", interrupt: bool = False) -> list[dict[int, str]]:
    """Goes through all steps, if it is not interrupted in the one."""
    whole = Together(session, what, MultiversoError)

    def part(step: int) -> str:
        if interrupt and step == INTERRUPTED:
            raise KeyboardInterrupt
        return str(step)

    return [whole.step(lambda step=step: part(step)) for step in range(STEPS)]  # type: ignore[misc]


def all_of_it(workers: int) -> list[dict[int, str]]:
    """What the task returns."""
    return [{worker: str(step) for worker in range(workers)} for step in range(STEPS)]


def interrupted(session: Session, where: str) -> None:
    """Begins the task, and ends it as Ctrl-C does: in the action, or before or after what it waits for."""
    calls, what = 0, "all_gather" if "tell" in where else "barrier"
    owner = session.node if "tell" in where else session
    call = getattr(owner, what)

    def cut(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > INTERRUPTED and where.startswith("before"):
            interrupt()
        result = call(*arguments)
        return interrupt() if calls > INTERRUPTED else result

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        if where != "action":
            patch.setattr(owner, what, cut)
        task(session, interrupt=where == "action")


def interrupt() -> NoReturn:
    raise KeyboardInterrupt


def repeated(session: Session, where: str) -> Any:
    """Worker 1 is interrupted there and begins again, and the others once they have been told: error and result."""
    if session.worker_id == 1:
        interrupted(session, where)
        return None, task(session)
    error = outcome(lambda: task(session))
    return str(error), task(session)
