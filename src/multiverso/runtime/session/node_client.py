"""A worker's messages to its host's node, and through it to the other hosts'; tables have their own calls.

The first is for a place in the job, which may be given back before the start.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress

import msgspec

from multiverso.deadline import Deadline
from multiverso.errors import MultiversoError, WaitTimeoutError
from multiverso.layout import words as at
from multiverso.runtime.job.control import Control
from multiverso.runtime.session.node_link import NodeLink
from multiverso.runtime.session.view import SessionView
from multiverso.runtime.session.waiting import Patience
from multiverso.wire.messages import Message
from multiverso.wire.requests import AllGather, Arrived, Ask, Attach, Gather, Leaving, Notify, Request, Withdraw

_FAREWELL_SECONDS = 2.0
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
    while True:
        answer, descriptors = link.ask(request, deadline.at, what)
        if not answer.get("later"):
            return msgspec.convert(answer, Place), descriptors
        if deadline.passed:  # the end of the one before has not had all its effects yet
            raise WaitTimeoutError(
                f"the node had no place for this worker within {deadline}: the process that had it before is over, "
                "and what it has left in the job is not settled yet, or its host is still taking in the tables"
            )
        time.sleep(_LATER_SECONDS)


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
    with suppress(MultiversoError, OSError, ValueError):
        link.ask(Withdraw(), time.monotonic() + _WITHDRAW_SECONDS, "leave to call init again")
        return True
    return False


class NodeClient:
    """Owner: the session; any thread may call it.

    Args:
        session: whose it is.
        link: its connection to the node.
        lock: held while the connection is used.
    """

    def __init__(self, session: SessionView, link: NodeLink, lock: AbstractContextManager[object]) -> None:
        self._session: SessionView = weakref.proxy(session)  # no cycle: its memory goes when it goes
        self._link, self._lock = link, lock
        self._gatherings = 0  # what `gather` has asked for, by this worker

    def tell(self, message: Request) -> None:
        """Sends the node a message without an answer."""
        with self._lock:
            self._link.tell(message)

    def arrive(self, barrier: int) -> None:
        """Before a barrier of a job on several hosts: notifies the node, which sends what was added before it."""
        if self._session.control.places:
            self._session.control.reach(self._session.worker_id, barrier)  # first: the node looks when it hears of it
            self.tell(Arrived(barrier))

    def gather(self) -> int:
        """Asks for what other hosts have added and not sent yet. Does not wait.

        Returns:
            a number: all of it is in this host's tables once ``control.gathered`` is as high.
        """
        with self._lock:
            self._gatherings = max(self._gatherings, self._session.control.gathered) + 1
            self._link.tell(Gather(self._gatherings))
            return self._gatherings

    def ask(self, request: Request, what: str) -> Message:
        """Asks this host's node.

        Args:
            request: what is asked.
            what: what is waited for, in words.

        Raises:
            MultiversoError: the node refuses it, or there was no answer.
        """
        with self._lock:
            patience = Patience(self._session, self._session.start_deadline(), what, self._link)
            try:
                return patience.ask(self._link, request)
            except BaseException:
                self._link.give_up()
                raise

    def farewell(self) -> list[str]:
        """Returns what this host's last worker says in the place of a node that nobody hears, if it is still there."""
        with self._lock, suppress(MultiversoError):
            deadline = time.monotonic() + _FAREWELL_SECONDS
            answer, _ = self._link.ask(Leaving(), deadline, "the node's last words")
            return [str(line) for line in answer["lines"]]
        return []

    def all_gather(self, note: str) -> dict[int, str | None]:
        """Sends a short note to the workers of all hosts, through the nodes; see `agreement`.

        Returns:
            each worker's note; None of one that has continued to the next barrier without one.
        """
        self._session.check_may_wait()
        answer = self.ask(AllGather(self._session.barriers, note), "what the other workers have to tell")
        return {int(w): None if text is None else str(text) for w, text in answer["notes"].items()}

    def ask_hosts(
        self, question: Message, deadline: Deadline, what: str, waits: Callable[[list[int]], None] | None = None
    ) -> Message:
        """Asks the first host's node, through this host's: what the workers of all hosts have to agree on.

        Args:
            question: see ``multiverso.hosts.control.dealing``.
            deadline: until when.
            what: what is waited for, in words.
            waits: called with the workers for whom the answer waits, whenever these have changed.

        Raises:
            NodeLostError, DeadlockError, WaitTimeoutError: there was no answer. The question may be asked again.
            MultiversoError: it makes no sense.
        """
        self._session.check_may_wait()
        with self._lock:
            patience = Patience(self._session, deadline, what)
            try:
                reply = patience.ask(self._link, Ask(question))
                while "wait" in reply["answer"]:
                    if waits is not None:
                        waits([int(worker) for worker in reply["answer"]["wait"]])
                    reply = patience.more(self._link)
            except BaseException:
                self._link.give_up()
                raise
        answer: Message = reply["answer"]
        if "error" in answer:
            raise MultiversoError(f"{what}: {answer['error']}")
        return answer

    def say_to_hosts(self, saying: Message) -> None:
        """Sends the first host's node a message without an answer, see ``multiverso.hosts.control.dealing``."""
        self.tell(Notify(saying))
