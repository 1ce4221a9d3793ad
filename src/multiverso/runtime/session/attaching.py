"""How a session gets its place in a job: it asks its node for a number, and may withdraw before the start."""

from __future__ import annotations

import contextlib
import time

import msgspec

from multiverso.deadline import Deadline
from multiverso.errors import MultiversoError, WaitTimeoutError
from multiverso.layout import words as at
from multiverso.runtime.job.control import Control
from multiverso.runtime.session.node_link import NodeLink
from multiverso.wire.requests import Attach, Withdraw

_WITHDRAW_SECONDS = 1.0
_LATER_SECONDS = 0.02


class Place(msgspec.Struct, frozen=True):
    """A worker's place, as the node gives it.

    Attributes:
        worker_id: its number.
        workers_num: how many workers the job has; None where they come and go.
        incarnation: how many processes had this number before, and died.
        control: the size of the control segment, which begins the job's memory.
        job: what the job is called on all hosts; nothing on one.
        places: the host of each worker, by number; empty on one host.
        here: the name of this host; empty on one host.
    """

    worker_id: int
    workers_num: int | None
    incarnation: int
    control: int
    job: str = ""
    places: tuple[str, ...] = ()
    here: str = ""


def ask_for_place(link: NodeLink, request: Attach, deadline: Deadline) -> tuple[Place, list[int]]:
    """Asks the node for a place until it gives one.

    Args:
        link: the connection to it.
        request: has the arguments of ``init``.
        deadline: until when.

    Returns:
        The place, and the descriptors that came beside it, which belong to the link until they are taken out of the
        list.

    Raises:
        StartupError: the job has none for this worker, or the options differ from the other workers'.
        WaitTimeoutError: there was none in time.
    """
    what = "a place in the job"
    answer, descriptors = link.ask(request, deadline.at, what)
    while answer.get("later"):  # the end of the one before has not had all its effects yet
        if deadline.passed:
            raise WaitTimeoutError(
                f"the node had no place for this worker within {deadline}: the process that had it before is over, "
                "and what it has left in the job is not settled yet, or its host is still taking in the tables"
            )
        time.sleep(_LATER_SECONDS)
        answer, descriptors = link.ask(request, deadline.at, what)
    return msgspec.convert(answer, Place), descriptors


def raise_if_late(control: Control, workers_num: int | None, deadline: Deadline) -> None:
    """While the others are waited for: raises once the time is over.

    Raises:
        WaitTimeoutError: it names those who have not come.
    """
    if not deadline.passed:
        return
    here = {worker.worker_id: worker for worker in control.workers() if worker.liveness == at.ALIVE}
    missing = [worker for worker in range(workers_num or 0) if worker not in here]
    said = [
        f"worker {worker}{f' on {control.places[worker]}' if control.places else ''} has not come: it is still "
        "importing, its init() is compiling kernels, or it was never started"
        for worker in missing
    ]
    said += [
        f"worker {worker} ({state.process}) is joining"
        for worker, state in here.items()
        if state.participation != at.ACTIVE
    ]
    there = ", ".join(str(worker) for worker, state in here.items() if state.participation == at.ACTIVE)
    raise WaitTimeoutError(
        f"gave up after {deadline} waiting for the other workers to start: "
        f"{'; '.join(said) or 'the node let no worker begin'}; there are workers {there} of {workers_num}. "
        "A longer deadline: init(start_timeout_seconds=)"
    )


def withdraw(link: NodeLink) -> bool:
    """Gives a place back before the start: this worker is not lost, and may call `init` again.

    Returns:
        Whether the node agrees; otherwise the worker has left, or is lost.
    """
    with contextlib.suppress(MultiversoError, OSError, ValueError):
        link.ask(Withdraw(), time.monotonic() + _WITHDRAW_SECONDS, "leave to call init again")
        return True
    return False
