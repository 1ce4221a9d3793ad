"""Hands the batches of an epoch out on demand: a slow worker gets fewer, and holds none of the others up.

The rules are in `multiverso.hosts.control.dealing`. On several hosts a worker asks the coordinator, which gives it
several at a time. On one it does what the coordinator would: the deal lies in shared memory, under a lock, twice; who
has changed it writes the other one, and then which of the two counts. A death at any point leaves the one before, with
the batch yet to be dealt, or the one after, in which it stands with its dead worker, from which the next one takes it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from multiverso.checks import whole
from multiverso.deadline import Deadline
from multiverso.errors import NotInThisJobError, StartupError, TableMismatchError, WorkerLostError
from multiverso.hosts.control.dealing import Batches, Deal, Finished
from multiverso.hosts.control.messages import Line
from multiverso.layout import words as at
from multiverso.layout.records import Record
from multiverso.layout.worker_index import bits_of
from multiverso.memory.words import load32, wait_for_change
from multiverso.runtime.collective.job_lock import held, prepare
from multiverso.runtime.job.control import Control
from multiverso.runtime.job.wait_graph import names
from multiverso.runtime.session.session import Session
from multiverso.runtime.session.waiting import Patience

Words = npt.NDArray[np.int64]
What = tuple[int, int, int, int]
"""What the workers compare: samples, size, seed, epoch."""
_POSITIVE = (1 << 63) - 1
MOST_AHEAD = 56


HEAD = Record(128)
HEAD.mutex("lock")
HEAD.int64("which")  # of the two counts
_ROOM = 1 << 17  # for each: a size, and a deal as MessagePack, which has less than 100,000 bytes


class SharedDeal:
    """The deal that workers of one host share, in memory. Owner: one worker's `Dealer`."""

    def __init__(self, session: Session) -> None:
        self._process = session.control.worker(session.worker_id).owner
        self._memory = session.shared_memory("multiverso-batches", HEAD.size + 2 * _ROOM, prepare)
        self._head = self._memory.array[: HEAD.size].view(HEAD.dtype)[0]
        self._rooms = [part.data for part in self._memory.array[HEAD.size :].reshape(2, _ROOM)]

    @contextmanager
    def _deal(self, session: Session, deadline: Deadline, what: str) -> Iterator[Deal]:
        """Yields the deal, under the lock, and stores what becomes of it."""
        with held(session, self._memory, deadline, what):
            which = int(self._head["which"])
            room, other = self._rooms[which], self._rooms[1 - which]
            size = int.from_bytes(room[:8], "little")
            deal = msgspec.msgpack.decode(room[8 : 8 + size], type=Deal) if size else Deal()
            yield deal
            data = msgspec.msgpack.encode(deal)
            other[: 8 + len(data)] = len(data).to_bytes(8, "little") + data
            self._head["which"] = 1 - which

    def ask(
        self, session: Session, asked: Batches, deadline: Deadline, what: str, waits: Callable[[list[int]], None]
    ) -> dict[str, Any]:
        """Returns the answer to a question for a batch; ``waits`` is called with those for whom it waits."""
        control, me = session.control, session.worker_id
        patience: Patience | None = None
        while True:
            seen = load32(control.address + at.EVENT)
            with self._deal(session, deadline, what) as deal:
                if not deal.is_plain(me, self._process, asked):
                    deal.note(_line_of(control, i) for i in range(control.capacity))
                answer = deal.answer(me, asked, 1)
                at_the_end = deal.following >= deal.batches
            if isinstance(answer, dict):
                if at_the_end:
                    control.notify()  # others may wait for what this worker has just finished
                return answer
            waits(answer)
            patience = patience or Patience(session, deadline, what)
            patience.raise_if_over()
            wait_for_change(control.address + at.EVENT, seen, deadline.slice_left())

    def say(self, session: Session, said: Finished) -> None:
        """This worker is done with batches, or leaves its loop."""
        with self._deal(session, session.start_deadline(), "the epoch's batches") as deal:
            deal.finish(session.worker_id, said)
        session.control.notify()


def _line_of(control: Control, worker_id: int) -> Line:
    worker = control.worker(worker_id)
    return Line(worker_id, worker.owner, worker.liveness, worker.participation)


class Dealer:
    """One worker's loops over what is dealt. Owner: one thread at a time.

    It lives as long as its session, so it does not keep that: each call is handed it.
    """

    def __init__(self, session: Session) -> None:
        if session.consistency.reads_wait:
            raise NotInThisJobError(
                "mv.batches gives a slow worker fewer batches than the others, but in "
                f"{session.consistency.name} mode all have to read equally often: use mv.shard(n, epoch=...), or "
                "init() without sync and staleness"
            )
        self._shared = None if session.hosts else SharedDeal(session)
        self._inside = False
        self._next_epoch: dict[tuple[int, int, int], int] = {}
        self._deals = self._asked = self._turn = 0
        self._hand: list[int] = []  # batches that it was given and has not begun
        self._given = self._finished = 0  # in the deal that it has asked for last

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
        n, size, seed = key
        epoch = self._next_epoch.get(key, 0) if epoch is None else epoch
        what = n, size, seed & _POSITIVE, epoch & _POSITIVE
        self._inside = True
        try:
            self._asked = self._deals + 1
            self._given = self._finished = 0
            deadline = session.start_deadline(timeout_seconds)
            self._hand = self._ask(session, what, 0, deadline, "the others' last epoch to end")
            self._deals, self._next_epoch[key] = self._asked, epoch + 1
            order = np.random.default_rng([seed, epoch]).permutation(n).astype(np.int64, copy=False)
            while True:
                batch = self._take(session, what, ahead, session.start_deadline(timeout_seconds))
                if batch is None:
                    return
                yield order[batch * size : (batch + 1) * size].copy()
        finally:
            self._inside = False
            self._leave(session, unfinished=ahead > 0)

    def _take(self, session: Session, what: What, ahead: int, deadline: Deadline) -> int | None:
        """Returns the next batch for this worker, or None when the epoch is over."""
        begun = self._given - len(self._hand)
        if begun - ahead > self._finished:
            self._finished = begun - ahead  # a worker that asks has done what it was given, but for the last ones
            if self._hand:
                self._say(session)
        if not self._hand:
            self._hand = self._ask(session, what, ahead, deadline, "the epoch's last batches")
        return self._hand.pop(0) if self._hand else None

    def _leave(self, session: Session, unfinished: bool) -> None:
        """The loop is over: what it has not begun is for others; ``unfinished``: what it took ahead is in work yet."""
        if session.closed is not None or (session.hosts and session.node_lost):
            return
        begun = self._given - len(self._hand)
        if not unfinished:
            self._finished = begun
        self._say(session, begun=begun, left=self._deals, kept=unfinished)
        self._hand, self._given = [], begun

    def _say(self, session: Session, **more: Any) -> None:
        said = Finished(self._asked, self._finished, **more)
        if self._shared is not None:
            self._shared.say(session, said)
        else:
            session.node.say_to_hosts(msgspec.to_builtins(said))

    def _ask(self, session: Session, what: What, ahead: int, deadline: Deadline, awaited: str) -> list[int]:
        """Returns the batches that it is given now, which it has not begun; none: the epoch is over."""
        continues = bool(session.control.continues)
        asked = Batches(self._asked, what, ahead, self._finished, self._turn + 1, continues)
        said = 0, 0
        with ExitStack() as wait:

            def waits(whom: list[int]) -> None:
                nonlocal said
                bits = bits_of(whom)
                if bits != said or session.control.worker(session.worker_id).wait is None:
                    said = bits
                    wait.close()
                    wait.enter_context(session.waiting(at.FOR_BATCHES, 0, *bits))

            if self._shared is not None:
                answer = self._shared.ask(session, asked, deadline, awaited, waits)
            else:
                answer = session.node.ask_hosts(msgspec.to_builtins(asked), deadline, awaited, waits)
        if "differs" in answer:
            raise TableMismatchError(
                f"mv.batches, call {self._asked}: the others asked for (n, size, seed, epoch) = "
                f"{tuple(answer['differs'])}, this worker asks for {what}; all workers have to call it with the same "
                "arguments in the same order"
            )
        if "lost" in answer:
            worker = session.control.worker(int(answer["lost"]))
            raise WorkerLostError(
                f"{names([worker.worker_id])} ({worker.process}) died, or exited without shutdown(), in the middle of "
                "a batch. To hand it out again: init(on_lost='continue'), or `multiverso run --on-failure continue`",
                [worker.worker_id],
            )
        self._turn += 1
        batches = [int(batch) for batch in answer.get("batches", ())]
        self._given += len(batches)
        return batches


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
