"""What an epoch deals, and this worker's hand in the deals of a job on several hosts.

There it asks the coordinator, several batches at a time. The rules are in `multiverso.hosts.control.answers`. On one
host they stand in shared memory: `multiverso.tables.batches`.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from multiverso.deadline import Deadline
from multiverso.errors import TableMismatchError, WorkerLostError
from multiverso.layout import words as at
from multiverso.runtime.job.control import WorkerState
from multiverso.runtime.job.wait_graph import names
from multiverso.runtime.session.session import Session

Words = npt.NDArray[np.int64]
_POSITIVE = (1 << 63) - 1


@dataclass(frozen=True)
class Epoch:
    """What is dealt: `n` samples, shuffled, in batches of at most `size`."""

    n: int
    size: int
    seed: int
    epoch: int

    @property
    def batches(self) -> int:
        """How many batches there are."""
        return -(-self.n // self.size)

    @property
    def words(self) -> tuple[int, int, int, int]:
        """What the workers compare."""
        return self.n, self.size, self.seed & _POSITIVE, self.epoch & _POSITIVE

    def order(self) -> Words:
        """Returns the samples in the order in which they are dealt."""
        shuffled = np.random.default_rng([self.seed, self.epoch]).permutation(self.n)
        return shuffled.astype(np.int64, copy=False)


def other_epoch(number: int, theirs: Iterable[int], mine: Epoch) -> TableMismatchError:
    """Returns the error for a deal of which the others have said something else."""
    return TableMismatchError(
        f"mv.batches, call {number}: the others asked for (n, size, seed, epoch) = {tuple(map(int, theirs))}, this "
        f"worker asks for {mine.words}; all workers have to call it with the same arguments in the same order"
    )


def lost_in_batch(worker: WorkerState) -> WorkerLostError:
    """Returns the error for a worker whose batch must not be taken over."""
    return WorkerLostError(
        f"{names([worker.worker_id])} ({worker.process}) died, or exited without shutdown(), in the middle of a batch. "
        "To hand it out again: init(on_lost='continue'), or `multiverso run --on-failure continue`",
        [worker.worker_id],
    )


def bits_of(workers: Iterable[int]) -> int:
    """Returns workers as a set of bits in 64 with a sign, as a wait publishes whom it is for."""
    mask = sum(1 << worker for worker in workers)
    return mask - (1 << 64) if mask >> 63 else mask


class AskedBatches:
    """Owner: one worker's `Dealer`."""

    def __init__(self) -> None:
        self._deals = self._asked = self._turn = 0
        self._hand: list[int] = []  # batches that it was given and has not begun
        self._given = self._finished = 0

    def begin(self, session: Session, dealt: Epoch, deadline: Deadline) -> int:
        """Asks for the first batches of the next deal; waits for workers that are still in the one before."""
        number = self._asked = self._deals + 1
        self._given = self._finished = 0
        self._hand = self._ask(session, number, dealt, 0, deadline, "the others' last epoch to end")
        self._deals = number
        return number

    def take(self, session: Session, number: int, dealt: Epoch, ahead: int, deadline: Deadline) -> int | None:
        """Returns the next batch for this worker, or None when the epoch is over."""
        begun = self._given - len(self._hand)
        if begun - ahead > self._finished:
            self._finished = begun - ahead  # a worker that asks has done what it was given, but for the last ones
            if self._hand:
                self._say(session, number, {})
        if not self._hand:
            self._hand = self._ask(session, number, dealt, ahead, deadline, "the epoch's last batches")
        return self._hand.pop(0) if self._hand else None

    def leave(self, session: Session, unfinished: bool) -> None:
        """The loop is over: what it has not begun is for others."""
        if session.closed is not None or session.node_lost:
            return
        begun = self._given - len(self._hand)
        if not unfinished:
            self._finished = begun
        self._say(session, self._asked, {"begun": begun, "left": self._deals, "kept": unfinished})
        self._hand, self._given = [], begun

    def _say(self, session: Session, number: int, more: dict[str, Any]) -> None:
        said = {"about": "finished", "deal": number, "finished": self._finished, **more}
        session.node.say_to_hosts(said)

    def _ask(self, session: Session, number: int, dealt: Epoch, ahead: int, deadline: Deadline, what: str) -> list[int]:
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
                wait.close()
                wait.enter_context(session.waiting(at.FOR_BATCHES, 0, bits_of(whom)))

            answer = session.node.ask_hosts(question, deadline, what, waits)
        if "differs" in answer:
            raise other_epoch(number, answer["differs"], dealt)
        if "lost" in answer:
            raise lost_in_batch(session.control.worker(int(answer["lost"])))
        self._turn += 1
        batches = [int(batch) for batch in answer.get("batches", ())]
        self._given += len(batches)
        return batches
