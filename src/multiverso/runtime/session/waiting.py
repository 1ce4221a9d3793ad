"""Waits in slices of half a second: what a worker looks at between two, and which of its threads wait.

At each look: is anyone lost, is it time to give up?
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from multiverso import kernels
from multiverso.deadline import SLICE_SECONDS, Deadline
from multiverso.errors import (
    ClosedError,
    DeadlockError,
    MultiversoError,
    ShapeMismatchError,
    WaitTimeoutError,
    WorkerLostError,
)
from multiverso.layout import words as at
from multiverso.memory.words import load32, store32, wait_for_change
from multiverso.runtime.job.control import WorkerState
from multiverso.runtime.job.wait_graph import COLLECTIVE, WaitGraph, names
from multiverso.runtime.session.node_link import NodeLink
from multiverso.runtime.session.view import SessionView
from multiverso.saying import say
from multiverso.wire.messages import Message
from multiverso.wire.requests import Request

_WARN_SECONDS = 10.0
_STOPPED_SECONDS = 1.0
_STILL_SECONDS = 1.5
_ADVICE = ". To continue without lost workers: init(on_lost='continue'), or `multiverso run --on-failure continue`"

_READ_EQUALLY = (
    "With sync=True and staleness= every worker has to read the same tables equally often "
    "(multiverso.shard(equal=True) helps), or to leave by shutdown()"
)
_REDUCE_EQUALLY = "A reduction needs all workers: each has to call it equally often"
_TO_DO = {
    at.FOR_TABLE: COLLECTIVE[0].upper() + COLLECTIVE[1:],
    at.FOR_ROUND: _READ_EQUALLY,
    at.FOR_CLOCK: _READ_EQUALLY,
    at.FOR_REDUCTION: _REDUCE_EQUALLY,
    at.FOR_OTHER_HOSTS: _REDUCE_EQUALLY,
    at.FOR_BATCHES: (
        "An epoch of multiverso.batches ends for all workers together: nothing in its loop may wait for others"
    ),
    at.FOR_BARRIER: (
        "A barrier needs all workers: each has to come to every one (what all load or save together has some), or to "
        "leave by shutdown()"
    ),
    at.FOR_LOCK: "Nothing that waits for other workers may be called while a lock is held",
}
_REPLACED = (
    "A worker in the place of one that died begins at the program's first line, and takes part in the others' next "
    "round. So a loop that counts its own turns, or has a barrier() in each, cannot continue: end loops by "
    "table.version or by a value, with barriers outside of them, and make tables in the order in which the loop reads "
    "them; or have the whole job started again (--max-restarts with multiverso.checkpoint) instead of --replace"
)


class Patience:
    """One wait of one session. Owner: the waiting thread.

    Args:
        session: whose wait it is.
        deadline: from then on `raise_if_over` raises.
        what: what is waited for, in words.
        link: the connection to the node, where it is the node's answer.
    """

    def __init__(self, session: SessionView, deadline: Deadline, what: str, link: NodeLink | None = None) -> None:
        self._session = session
        self._began = time.monotonic()
        self.deadline = deadline
        self._what = what
        self._link = link
        self._warned = False
        self._still: tuple[tuple[int, int], ...] = ()
        self._still_since = self._began
        self._deadlocked: WaitGraph | None = None

    def ask(self, link: NodeLink, request: Request) -> Message:
        """Asks the node, for as long as the wait may last; returns its (first) answer."""
        return link.ask(request, self.deadline.at, self._what, self.raise_if_over)[0]

    def more(self, link: NodeLink) -> Message:
        """Returns the node's next answer to the last request."""
        return link.more(self.deadline.at, self._what, self.raise_if_over)[0]

    def raise_if_hopeless(self, code: int) -> None:
        """Returns when the wait may continue after a kernel has stopped with ``code``; raises when it may not."""
        if code == kernels.NOT_RECOVERABLE:
            raise MultiversoError(
                f"{self._what}: a lock cannot be recovered (its owner died, and the first to find out did not "
                "repair it); restart the job"
            )
        if code == kernels.LOST_SOMEONE:
            raise self._lost()
        if code == kernels.MISMATCH:
            raise ShapeMismatchError(f"the workers do not call all_reduce with the same things; this one: {self._what}")
        if code not in (kernels.EINTR, kernels.TIMED_OUT):
            raise MultiversoError(f"{self._what}: unexpected code {code} from the operating system")
        self.raise_if_over()

    def raise_if_over(self) -> None:
        """Raises when waiting any longer is pointless: closed, node lost, deadline, deadlock. Warns once."""
        session = self._session
        if session.closed is not None:
            raise ClosedError(session.closed)
        wait = session.control.worker(session.worker_id).wait
        for_lock = wait is not None and wait.is_for_lock  # which does not need the node
        if session.node_lost and not for_lock:
            raise session.node_error()
        if session.node_lost and wait is not None and wait.kind == at.FOR_WORD:
            session.control.settle_without_node(wait.stage)  # or no worker would ever take the word over
        now = time.monotonic()
        waited = now - self._began
        if now >= self.deadline.at:
            raise WaitTimeoutError(
                f"gave up after {waited:.1f} s (of {self.deadline}) waiting for {self._what}: {self._whom()}. "
                f"{self._everyone()}. A longer deadline: timeout_seconds=, or MULTIVERSO_TIMEOUT_SECONDS"
            )
        if not self._warned and (waited >= _WARN_SECONDS or (waited >= _STOPPED_SECONDS and self._stopped())):
            self._warned = True
            say(f"worker {session.worker_id} has waited {waited:.0f} s for {self._what}: {self._whom()}")
        self._look_for_deadlock()
        session.control.look_at(session.worker_id, self.deadline)

    def _stopped(self) -> str | None:
        return self._link.said_if_stopped() if self._link is not None else None

    def _whom(self) -> str:
        if stopped := self._stopped():
            return stopped
        graph = self._session.wait_graph()
        me = graph.workers.get(self._session.worker_id)
        wait = me.wait if me is not None else None
        if wait is not None and wait.is_for_lock:
            if not wait.holder:
                return "the lock was free a moment ago"
            return f"process {wait.holder} holds the lock (stopped, or being debugged?)"
        missing = graph.missing(wait) if wait is not None else []
        if not missing and wait is not None and wait.kind == at.FOR_TABLE:
            return "no worker is missing, it is being made"
        return f"missing {names(missing)}" if missing else "it is not known who is missing"

    def _everyone(self) -> str:
        return "; ".join(self._session.wait_graph().describe(time.monotonic_ns()))

    def _lost(self) -> WorkerLostError:
        control = self._session.control
        workers = [w for w in control.workers() if w.liveness == at.LOST]
        how = "died, or exited without shutdown(),"
        if not workers:  # a reduction needs everybody, whom the others have not lost
            workers = [w for w in control.workers() if w.has_left]
            how = "left in order"
        lost = [w.worker_id for w in workers]
        who = f"{names(lost)} ({_processes(workers)})" if lost else "a worker whose place is taken again"
        advice = "" if control.continues or how == "left in order" else _ADVICE
        return WorkerLostError(f"{who} {how} while this worker waited for {self._what}{advice}", lost)

    def _look_for_deadlock(self) -> None:
        """Every worker waits for one that waits, and nothing has moved for a while."""
        self._session.note_threads()  # one of them may have ended meanwhile
        me = self._session.worker_id
        graph = self._session.wait_graph()
        if me in graph.workers and graph.given_up(me):
            raise self._deadlock(self._deadlocked or graph)  # who gave up first waits no longer
        if not graph.deadlocked():
            self._still, self._deadlocked = (), None
            return
        self._deadlocked = graph
        now = time.monotonic()
        waits = tuple((w.worker_id, w.wait.sequence) for w in graph.workers.values() if w.wait is not None)
        if waits != self._still:
            self._still, self._still_since = waits, now
        elif now - self._still_since >= _STILL_SECONDS:
            error = self._deadlock(graph)
            self._session.control.give_up(me, time.monotonic_ns())
            raise error

    def _deadlock(self, graph: WaitGraph) -> DeadlockError:
        live = [worker for worker in graph.workers.values() if worker.is_live]
        kinds = {worker.wait.kind for worker in live if worker.wait is not None}
        in_rounds = self._session.consistency.in_rounds
        advice = [words for kind, words in _TO_DO.items() if kind in kinds]
        if in_rounds and any(worker.incarnation for worker in live):
            advice = [_REPLACED]
        return DeadlockError(
            "all workers wait for different things, so none can continue: "
            f"{'; '.join(graph.describe(time.monotonic_ns()))}. {'. '.join(dict.fromkeys(advice))}"
        )


def _processes(workers: list[WorkerState]) -> str:
    """Returns "pid 12, 13", or "pid 12 on a, pid 7 on b"."""
    if any(worker.host for worker in workers):
        return ", ".join(worker.process for worker in workers)
    return f"pid {', '.join(str(worker.pid) for worker in workers)}"


# A worker that changes the table wakes us, but not if it was killed just before; and other hosts' changes come by the
# node, without a wake.
_NAP_SECONDS, _HOSTS_NAP_SECONDS = 0.05, 0.005


def await_version(
    session: SessionView, base: int, reached: Callable[[], bool], what: str, timeout_seconds: float | None
) -> None:
    """Sleeps until a table has come so far, a deadline passes, or it cannot come any more.

    Args:
        session: whose wait it is.
        base: address of the table.
        reached: whether the table has come so far.
        what: what is waited for, in words.
        timeout_seconds: deadline, instead of the session's.

    Raises:
        WorkerLostError, NodeLostError, WaitTimeoutError: the wait failed.
    """
    session.check_may_wait()
    patience = Patience(session, session.start_deadline(timeout_seconds), what)
    longest, looked = _HOSTS_NAP_SECONDS if session.hosts else _NAP_SECONDS, time.monotonic()
    while not reached():
        event = load32(base + at.CHANGED)
        store32(base + at.WATCHED, 1)
        if reached():
            return
        if patience.deadline.passed or time.monotonic() - looked > SLICE_SECONDS:
            looked = time.monotonic()
            lost = any(worker.liveness == at.LOST for worker in session.control.workers())
            patience.raise_if_hopeless(
                kernels.LOST_SOMEONE if lost and not session.control.continues else kernels.TIMED_OUT
            )
        wait_for_change(base + at.CHANGED, event, patience.deadline.left(longest))


class Threads:
    """The threads of one worker that have waited for others. Any thread.

    A thread of the user's may continue as long as it lives. One of ours that does things in the background (a table's
    queue, a checkpoint's writer) does so only while it is in the middle of one.
    """

    def __init__(self) -> None:
        self._first = threading.current_thread()
        self._others: dict[int, threading.Thread] = {}
        self._background: dict[int, bool] = {}  # of ours, and whether it is in the middle of something
        self._blocked: set[int] = set()  # that wait for one of ours, however long it takes

    @property
    def several(self) -> bool:
        """Whether there is more than the thread that has made the session."""
        return bool(self._others or self._background)

    @contextmanager
    def in_background(self) -> Iterator[None]:
        """Around what a thread of ours does beside the user's."""
        me = threading.get_ident()
        self._background[me] = True
        try:
            yield
        finally:
            self._background[me] = False

    @contextmanager
    def blocked(self) -> Iterator[None]:
        """Around a thread's wait without a deadline for what one of ours does."""
        me = threading.get_ident()
        self._blocked.add(me)
        try:
            yield
        finally:
            self._blocked.discard(me)

    def note(self, word: ctypes.c_int32) -> None:
        """Before and while a thread waits: writes for the other workers whether another thread may continue."""
        me = threading.get_ident()
        if me != self._first.ident and me not in self._background:
            self._others[me] = threading.current_thread()
        self._others = {ident: thread for ident, thread in self._others.items() if thread.is_alive()}
        users = [one for one in (self._first, *self._others.values()) if one.ident not in self._blocked]
        moving = any(moves for ident, moves in self._background.items() if ident != me)
        word.value = int(moving or any(thread.ident != me and thread.is_alive() for thread in users))
