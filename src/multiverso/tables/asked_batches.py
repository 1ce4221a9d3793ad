"""This worker's hand in the deals of a job on several hosts: it asks the coordinator, several batches at a time.

The rules are in `multiverso.hosts.control.answers`. On one host they stand in shared memory:
`multiverso.tables.batches`.
"""

from __future__ import annotations

import weakref
from contextlib import ExitStack
from typing import Any

from multiverso.deadline import Deadline
from multiverso.errors import TableMismatchError, WorkerLostError
from multiverso.layout import words as at
from multiverso.runtime.job.wait_graph import names
from multiverso.runtime.session.session import Session
from multiverso.tables.epochs import Epoch


class AskedBatches:
    """Owner: one worker's `Dealer`."""

    def __init__(self, session: Session) -> None:
        self._reference = weakref.ref(session)
        self._deals = self._asked = self._turn = 0
        self._hand: list[int] = []  # batches that it was given and has not begun
        self._given = self._finished = 0

    @property
    def _session(self) -> Session:
        session = self._reference()
        assert session is not None
        return session

    def begin(self, dealt: Epoch, deadline: Deadline) -> int:
        """Asks for the first batches of the next deal; waits for whoever is still in the one before."""
        number = self._asked = self._deals + 1
        self._given = self._finished = 0
        self._hand = self._ask(number, dealt, 0, deadline, "the others' last epoch to end")
        self._deals = number
        return number

    def take(self, number: int, dealt: Epoch, ahead: int, deadline: Deadline) -> int | None:
        """Returns the next batch for this worker, or None when the epoch is over."""
        begun = self._given - len(self._hand)
        if begun - ahead > self._finished:
            self._finished = begun - ahead  # whoever asks has done what it was given, but for the last ones
            if self._hand:
                self._say(number, {})
        if not self._hand:
            self._hand = self._ask(number, dealt, ahead, deadline, "the epoch's last batches")
        return self._hand.pop(0) if self._hand else None

    def leave(self, unfinished: bool) -> None:
        """The loop is over: what it has not begun is for others."""
        session = self._reference()
        if session is None or session.closed is not None or session.node_lost:
            return
        begun = self._given - len(self._hand)
        if not unfinished:
            self._finished = begun
        self._say(self._asked, {"begun": begun, "left": self._deals, "kept": unfinished})
        self._hand, self._given = [], begun

    def _say(self, number: int, more: dict[str, Any]) -> None:
        said = {"about": "batches", "deal": number, "finished": self._finished, **more}
        self._session.node.say_to_hosts(said)

    def _ask(self, number: int, dealt: Epoch, ahead: int, deadline: Deadline, what: str) -> list[int]:
        session = self._session
        question = {
            "about": "batches",
            "deal": number,
            "what": list(dealt.words),
            "ahead": ahead,
            "finished": self._finished,
            "turn": self._turn + 1,
            "continues": bool(session.control.continues),
        }
        with ExitStack() as wait:

            def waits(whom: list[int]) -> None:
                mask = sum(1 << worker for worker in whom)
                wait.close()
                wait.enter_context(session.waiting(at.FOR_BATCHES, 0, mask - (1 << 64) if mask >> 63 else mask))

            answer = session.node.ask_hosts(question, deadline, what, waits)
        if "differs" in answer:
            raise TableMismatchError(
                f"mv.batches, call {number}: the others asked for (n, size, seed, epoch) = "
                f"{tuple(answer['differs'])}, this worker asks for {dealt.words}; all workers have to call "
                "it with the same arguments in the same order"
            )
        if "lost" in answer:
            lost = session.control.worker(int(answer["lost"]))
            raise WorkerLostError(
                f"{names([lost.worker_id])} ({lost.process}) died, or exited without shutdown(), in the middle "
                "of a batch. To have it dealt again: init(on_lost='continue'), or "
                "`multiverso run --on-failure continue`",
                [lost.worker_id],
            )
        self._turn += 1
        batches = [int(batch) for batch in answer.get("batches", ())]
        self._given += len(batches)
        return batches
