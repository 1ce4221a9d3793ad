"""Hands the batches of an epoch out on demand: a slow worker gets fewer, and holds none of the others up.

All that the workers share lies behind one lock, in words that only its holder writes: ``HEAD``, a ``LINE`` for each
worker, and one more line, of batches of workers whose numbers were given to other processes.

A counter alone would not do: a worker that is killed between its `fetch_add` and its note of the result takes a batch
with it. Here the note comes first. A death at any point leaves either a note of a batch that is not yet taken, which
the worker that takes it strikes out, or a batch that stands with its dead worker, from which the next one takes it, or
with two dead ones, whose notes of it go at once.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import EllipsisType

import numpy as np

from multiverso.checks import whole
from multiverso.deadline import Deadline
from multiverso.errors import NotInThisJobError, StartupError
from multiverso.layout import words as at
from multiverso.layout.records import Record
from multiverso.memory.words import load32, wait_for_change
from multiverso.runtime.collective.job_lock import held, prepare
from multiverso.runtime.session.patience import Patience
from multiverso.runtime.session.session import Session
from multiverso.tables.asked_batches import AskedBatches, Epoch, Words, bits_of, lost_in_batch, other_epoch

HEAD = Record(128)
HEAD.mutex("lock")
HEAD.int64("number")  # of the deal, from 1
HEAD.int64("next")  # the next batch
HEAD.int64("what", 4)  # samples, size, seed, epoch

LINE = Record(512)  # of a worker, or (the last line) of none
LINE.int64("owner")  # which session of that number, see `WorkerState.owner`
LINE.int64("begun")  # the last deal that it began
LINE.int64("done")  # the last deal that it is done with
LINE.int64("taken", 61)  # 1 + number of each batch that it has been given and has not finished, from the left

_NOBODY = at.MAX_WORKERS
MOST_AHEAD = 56


class SharedBatches:
    """What workers of one host take from: memory that they share. Owner: one worker's `Dealer`."""

    def __init__(self, session: Session) -> None:
        self._control, self._me = session.control, session.worker_id
        size = HEAD.size + LINE.size * (at.MAX_WORKERS + 1)
        self._memory = session.shared_memory("multiverso-batches", size, prepare)
        self._head = self._memory.array[: HEAD.size].view(HEAD.dtype)[0]
        self._lines = self._memory.array[HEAD.size :].view(LINE.dtype)
        self._deals = 0
        with held(session, self._memory, session.start_deadline(), "the batches"):
            self._give_up_inheritance()

    # -- steps, under the lock ---------------------------------------------------------------------------------

    def _give_up_inheritance(self) -> None:
        """What the last worker of this number did not finish is free now."""
        mine, nobody, number = self._lines[self._me], self._lines[_NOBODY], self._head["number"]
        taken, left = mine["taken"], nobody["taken"]
        if taken.any() and mine["begun"] == number:
            if nobody["begun"] != number:
                left[:] = 0
                nobody["begun"] = number
            kept = [*left[left > 0], *taken[taken > 0]][: left.size]
            left[: len(kept)] = kept
        taken[:] = 0
        mine["owner"] = 0

    def begin(self, session: Session, dealt: Epoch, deadline: Deadline) -> int:
        """Begins the next deal, or joins it; waits for workers still in the one before. Returns its number."""
        number = self._deals + 1
        head, line = self._head, self._lines[self._me]

        def step() -> list[int]:
            if head["number"] < number:
                behind = [i for i in self._members() if self._lines[i]["done"] < number - 1]
                if behind:
                    return behind
                self._lines["taken"] = 0
                head["what"] = dealt.words
                head["next"] = 0
                head["number"] = number
            elif head["number"] == number and tuple(head["what"]) != dealt.words:
                raise other_epoch(number, head["what"], dealt)
            line["done"] = number - 1
            line["begun"] = number
            line["owner"] = self._control.worker(self._me).owner
            return []

        self._until_nobody(session, step, deadline, "the others' last epoch to end")
        self._deals = number
        return number

    def take(self, session: Session, number: int, dealt: Epoch, ahead: int, deadline: Deadline) -> int | None:
        """Returns the next batch for this worker, or None when the epoch is over."""
        head, mine = self._head, self._lines[self._me]["taken"]
        found: int | None = None

        def step() -> list[int]:
            nonlocal found
            if head["number"] != number:  # it came late: the others have continued
                return []
            self._finish(mine, ahead)
            if head["next"] < dealt.batches:
                found = int(head["next"])
                self._forget(found, ...)  # a worker that died before it had taken it may have noted it
                mine[np.count_nonzero(mine)] = found + 1
                head["next"] = found + 1
                return []
            found = self._orphan(number)
            if found is not None:
                mine[np.count_nonzero(mine)] = found + 1
                self._forget(found, [i for i in range(_NOBODY + 1) if i != self._me])
                return []
            if ahead:
                return []  # its own last ones are yet to be worked on
            return [i for i in self._members() if i != self._me and self._works(i, number)]

        self._until_nobody(session, step, deadline, "the epoch's last batches")
        if head["next"] >= dealt.batches:
            self._control.notify()  # others may wait for what this worker has just finished
        return found

    @staticmethod
    def _finish(mine: Words, ahead: int) -> None:
        """A worker that asks has done what it was given, but for the last `ahead` ones."""
        held_now = np.count_nonzero(mine)
        kept = mine[max(0, held_now - ahead) : held_now].copy()
        mine[: kept.size] = kept
        mine[kept.size :] = 0

    def _members(self) -> list[int]:
        """Returns the live workers that have ever begun a deal."""
        workers = (worker for worker in self._control.workers() if worker.is_live)
        return [w.worker_id for w in workers if self._lines[w.worker_id]["owner"] == w.owner]

    def _works(self, worker_id: int, number: int) -> bool:
        line = self._lines[worker_id]
        return bool(line["begun"] == number and line["done"] < number and line["taken"].any())

    def _orphan(self, number: int) -> int | None:
        """Returns a batch whose worker is gone."""
        control = self._control
        for worker_id in (*range(control.capacity), _NOBODY):
            line = self._lines[worker_id]
            if worker_id == self._me or line["begun"] != number or not line["taken"].any():
                continue
            if worker_id != _NOBODY:
                worker = control.worker(worker_id)
                if worker.is_live and worker.owner == line["owner"]:
                    continue
                if line["done"] >= number and worker.liveness != at.LOST:
                    continue  # what it had taken ahead it has worked on before it left
                if worker.liveness == at.LOST and not control.continues:
                    raise lost_in_batch(worker)
            notes = line["taken"]
            return int(notes[notes > 0][0]) - 1
        return None

    def _forget(self, batch: int, whose: list[int] | EllipsisType) -> None:
        """Strikes a batch from the notes of some, or of all."""
        taken = self._lines["taken"]
        notes = taken[whose]
        notes[notes == batch + 1] = 0
        taken[whose] = notes

    # -- around the lock ---------------------------------------------------------------------------------------

    def _until_nobody(self, session: Session, step: Callable[[], list[int]], deadline: Deadline, what: str) -> None:
        """Takes a step under the lock, repeatedly until it no longer returns workers to wait for."""
        control = self._control
        patience: Patience | None = None
        said = 0
        with ExitStack() as wait:
            while True:
                seen = load32(control.address + at.EVENT)
                with held(session, self._memory, deadline, what):
                    whom = step()
                if not whom:
                    return
                mask = bits_of(whom)
                if mask != said or control.worker(self._me).wait is None:
                    said = mask
                    wait.close()
                    wait.enter_context(session.waiting(at.FOR_BATCHES, 0, mask))
                patience = patience or Patience(session, deadline, what)
                patience.raise_if_over()
                wait_for_change(control.address + at.EVENT, seen, deadline.slice_left())

    def leave(self, session: Session, unfinished: bool) -> None:
        """The loop is over, and with it what this worker was given; ``unfinished``: but for what it took ahead."""
        if session.closed is not None:
            return
        line = self._lines[self._me]
        if not unfinished:
            line["taken"] = 0
        line["done"] = self._deals
        self._control.notify()


class Dealer:
    """One worker's loops over what is dealt. Owner: one thread at a time.

    It lives as long as its session, so neither it nor its source keeps that: each call is handed it.
    """

    def __init__(self, session: Session) -> None:
        if session.consistency.reads_wait:
            raise NotInThisJobError(
                "mv.batches gives a slow worker fewer batches than the others, but in "
                f"{session.consistency.name} mode all have to read equally often: use mv.shard(n, epoch=...), or "
                "init() without sync and staleness"
            )
        self.source = AskedBatches() if session.hosts else SharedBatches(session)
        self._inside = False
        self._next_epoch: dict[tuple[int, int, int], int] = {}

    def deal(
        self, session: Session, key: tuple[int, int, int], epoch: int | None, ahead: int, timeout_seconds: float | None
    ) -> Iterator[Words]:
        """Yields the batches that this worker is given; see the function `deal`.

        Args:
            session, epoch, ahead, timeout_seconds: as there.
            key: how many samples, the size of a batch, and the seed: epochs of the same are counted.
        """
        session.check_may_wait()
        if self._inside:
            raise StartupError(
                "this worker is still in its last loop over mv.batches: leave that one first (by its end, or by "
                "break); such loops cannot be nested"
            )
        dealt = Epoch(*key, self._next_epoch.get(key, 0) if epoch is None else epoch)
        self._inside = True
        try:
            number = self.source.begin(session, dealt, session.start_deadline(timeout_seconds))
            self._next_epoch[key] = dealt.epoch + 1
            order = dealt.order()
            while True:
                batch = self.source.take(session, number, dealt, ahead, session.start_deadline(timeout_seconds))
                if batch is None:
                    return
                yield order[batch * dealt.size : (batch + 1) * dealt.size].copy()
        finally:
            self._inside = False
            self.source.leave(session, unfinished=ahead > 0)


_dealers: weakref.WeakKeyDictionary[Session, Dealer] = weakref.WeakKeyDictionary()


def deal(
    session: Session,
    n: int,
    size: int,
    seed: int = 0,
    epoch: int | None = None,
    *,
    ahead: int = 0,
    timeout_seconds: float | None = None,
) -> Iterator[Words]:
    """Returns what `multiverso.batches` does.

    Args:
        session, n, size, seed, epoch, timeout_seconds: as there.
        ahead: how many batches this worker asks for before it works on the first; as many of its last do not count as
            finished when it asks for the next, and the loop's end does not wait for other workers.
    """
    given = {"n": (n, 0), "size": (size, 1), "seed": (seed, 0), "epoch": (0 if epoch is None else epoch, 0)}
    n, size, seed, number = (whole(value, name, least) for name, (value, least) in given.items())
    ahead = whole(ahead, "ahead", 0, MOST_AHEAD)
    if session not in _dealers:
        _dealers[session] = Dealer(session)
    return _dealers[session].deal(session, (n, size, seed), None if epoch is None else number, ahead, timeout_seconds)
