"""A worker's messages to its host's node, and through it to the other hosts'; tables have their own calls."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager

from multiverso.deadline import Deadline
from multiverso.errors import MultiversoError
from multiverso.runtime.session.node_link import NodeLink
from multiverso.runtime.session.patience import Patience
from multiverso.runtime.session.view import SessionView
from multiverso.wire.messages import Message
from multiverso.wire.requests import AllGather, Arrived, Ask, Gather, Notify, Request


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
                answer, _ = self._link.ask(request, patience.deadline.at, what, patience.raise_if_over)
            except BaseException:
                self._link.give_up()
                raise
        return answer

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
            question: see ``multiverso.hosts.control.answers``.
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
                reply, _ = self._link.ask(Ask(question), deadline.at, what, patience.raise_if_over)
                while "wait" in reply["answer"]:
                    if waits is not None:
                        waits([int(worker) for worker in reply["answer"]["wait"]])
                    reply, _ = self._link.more(deadline.at, what, patience.raise_if_over)
            except BaseException:
                self._link.give_up()
                raise
        answer: Message = reply["answer"]
        if "error" in answer:
            raise MultiversoError(f"{what}: {answer['error']}")
        return answer

    def say_to_hosts(self, saying: Message) -> None:
        """Sends the first host's node a message without an answer, see ``multiverso.hosts.control.answers``."""
        self.tell(Notify(saying))
