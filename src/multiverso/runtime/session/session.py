"""A worker's session: attaches to the node, maps the tables, and waits, always with a deadline.

A session is a value: a process may hold several. It belongs to the process that made it; in a forked child it
refuses to be used. Its public methods may be called from any thread.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from multiverso.deadline import SLICE_SECONDS, Deadline, checked_seconds
from multiverso.errors import ClosedError, NodeLostError, StartupError
from multiverso.hosts.options import ExchangeOptions, refuse_across_hosts
from multiverso.in_process import InProcess, close_in_children
from multiverso.kernels import waits
from multiverso.layout import words as at
from multiverso.memory.segment import SharedMemory
from multiverso.runtime.job.control import Control
from multiverso.runtime.job.options import check_exchange
from multiverso.runtime.job.wait_graph import WaitGraph, read_wait_graph
from multiverso.runtime.session.holdings import Handle, Handles, Holdings
from multiverso.runtime.session.liveness import Liveness
from multiverso.runtime.session.node_client import NodeClient, ask_for_place, raise_if_late, withdraw
from multiverso.runtime.session.node_link import NodeLink
from multiverso.runtime.session.waiting import Patience, Threads
from multiverso.saying import say
from multiverso.shards.shard import Shard
from multiverso.signal_safety import holds, new_lock
from multiverso.spec.modes import Grace, Quorum, chosen_mode
from multiverso.spec.table import MemorySpec, TableSpec, checked_count
from multiverso.wire.messages import PROTOCOL
from multiverso.wire.requests import Attach, Consistency, OnLost, Ready

START_SECONDS = 120.0
WAIT_SECONDS = 1800.0  # a master may validate for long
_MOST_WAIT = 30.0


def table_key(number: int) -> str:
    """Returns what a session's handles call a table that has a number."""
    return f"table {number}"


class Session(InProcess):
    """One worker's part in a job.

    Args:
        address: the node's abstract socket name (``Node.address``).
        worker_id: this worker's number; None takes a free one.
        workers_num: how many workers this one expects, to be checked; None accepts the node's number.
        sync: synchronous rounds.
        staleness: bounded staleness, in ticks; excludes ``sync``.
        quorum, grace_seconds, record, replay: see `multiverso.init`.
        on_lost: ``"stop"`` or ``"continue"``; None takes the node's.
        exchange: how tables travel between hosts; without meaning on one; in synchronous mode its format alone.
        timeout_seconds: deadline of barriers, rounds and clocks (default 30 minutes).
        start_timeout_seconds: deadline of starting and of attaching to tables (default 120 s).
        ends_with_node: end this process when the node is gone (our launcher asks for it).
        secret: the node's, for where users cannot be told apart; this user's own by default.
        node_is_silent: whether nobody reads the node's standard error, so that a worker prints its last warnings.
        on_close: called once the session is over.

    Raises:
        StartupError: no such job, or the options differ from the other workers'.
        WorkerLostError: another worker died while the job was starting.
        WaitTimeoutError: the others did not come in time.
    """

    def __init__(
        self,
        address: str,
        worker_id: int | None = None,
        *,
        workers_num: int | None = None,
        sync: bool = False,
        staleness: int | None = None,
        quorum: float | None = None,
        grace_seconds: Grace | None = None,
        record: str | os.PathLike[str] | None = None,
        replay: str | os.PathLike[str] | None = None,
        on_lost: OnLost | None = None,
        exchange: ExchangeOptions | None = None,
        timeout_seconds: float | None = None,
        start_timeout_seconds: float | None = None,
        ends_with_node: bool = False,
        secret: str | None = None,
        node_is_silent: bool = False,
        on_close: Callable[[], None] | None = None,
    ) -> None:
        self.address = address
        self.quorum = None if quorum is None else Quorum.of_options(quorum, grace_seconds, replay is not None)
        if self.quorum is None and (grace_seconds, record, replay) != (None, None, None):
            raise StartupError("grace_seconds=, record= and replay= are for rounds with a quorum: give quorum=, too")
        self.record, self.replay = (None if path is None else Path(path) for path in (record, replay))
        self.consistency, self.staleness = chosen_mode(sync, staleness, self.quorum)
        self.exchange = exchange or ExchangeOptions()
        check_exchange(self.consistency, self.exchange)
        self.timeout_seconds = WAIT_SECONDS if timeout_seconds is None else checked_seconds(timeout_seconds)
        self.start_timeout_seconds = (
            START_SECONDS if start_timeout_seconds is None else checked_seconds(start_timeout_seconds)
        )
        # how many processes had this worker's number before, and died: 0 but where those are replaced
        self.incarnation = 0
        self.job = address  # what the job is called, the same in all of its workers
        self.closed: str | None = None  # why it cannot be used any more
        self._node_is_silent = node_is_silent
        self._lock = threading.RLock()
        self._ending = threading.RLock()
        self._flushed = self._over = False
        self.made_by = threading.get_ident()
        self.threads = Threads()
        self.handles = Handles()
        self.reducers: dict[int, Any] = {}  # by the number of workers that reduce together
        self.reducing = new_lock()
        # what `shutdown` calls while everything still works
        self.before_end: dict[str, Callable[[], None]] = {}
        self.after_end = [] if on_close is None else [on_close]
        waits.barrier.compiled()  # now, and not while others wait for this worker
        self.barriers = 0  # the number of the last one that this worker has passed, the same in all that have
        self._raised = 0  # the number of one that raised: the next call is its repetition
        self._link = NodeLink()
        self.node = NodeClient(self, self._link, self._lock)
        self._holdings = Holdings(self, self._link)
        self._liveness = Liveness(ends_with_node)
        self._attaching = self._attached = self._takes_part = False
        self._pid = os.getpid()
        try:
            # what an exception finds here, wherever it arrives, is ended by `_finish_end`
            _open.add(self)
            close_in_children(self, Session.note_forked)
            deadline = Deadline.after(self.start_timeout_seconds)
            self._link.connect(address, deadline.at, secret)
            self._attach(worker_id, workers_num, on_lost, deadline)
        except BaseException:
            self.closed = "the session has never begun: an exception came while it was starting"
            self.after_end.clear()  # its owner gets the exception
            try:
                if self._attaching and withdraw(self._link):
                    self._takes_part = False
            finally:
                self._finish_end()
            raise

    def _attach(self, wish: int | None, number: int | None, on_lost: OnLost | None, deadline: Deadline) -> None:
        self._attaching = True
        consistency = Consistency(self.consistency.name, self.staleness, str(self.quorum or ""))
        request = Attach(PROTOCOL, consistency, wish, number, on_lost, self.exchange.as_message())
        place, descriptors = ask_for_place(self._link, request, deadline)
        self._holdings.begin(descriptors)
        self.control = Control(self._holdings.map(0, place.control), place.places, place.here)
        self.worker_id = place.worker_id
        self.index = self.control.index.of(place.worker_id)
        if (
            self.quorum is not None
            and not self.quorum.of
            and self.quorum.needed > (place.workers_num or at.MAX_WORKERS)
        ):
            raise StartupError(
                f"quorum={self.quorum.needed} is more than the {place.workers_num} workers of this job, who would all "
                "have to come: give a smaller number, or leave quorum= out"
            )
        self.fixed_num = place.workers_num
        self._attached = True
        self.incarnation = place.incarnation
        self.job = place.job or self.address
        # A worker of a job that workers join at will can simply leave. In one where all start together, leaving before
        # the start would let the others begin without this worker: it is lost instead, or withdraws.
        self._takes_part = self.fixed_num is None
        self._liveness.begin(self.control, self.worker_id, self._link.connection)
        # before anyone may continue, or the first could pass a barrier that the last does not know of yet
        self.control.activate(self.worker_id, self.fixed_num is None, self.incarnation)
        self.barriers = self.control.worker(self.worker_id).barrier
        what = "the other workers to start"
        self._link.ask(Ready(), deadline.at, what, lambda: raise_if_late(self.control, place.workers_num, deadline))
        self._takes_part = True

    # -- the job ---------------------------------------------------------------------------------------------

    @property
    def workers_num(self) -> int:
        """How many workers the job has (in a job that workers join and leave at will: has now)."""
        return self.fixed_num if self.fixed_num is not None else len(self.live_workers())

    def live_workers(self) -> list[int]:
        """Returns the workers that take part now."""
        return self.control.live()

    @property
    def hosts(self) -> tuple[str, ...]:
        """The names of the hosts of a job on several, in their order; nothing for a job on one."""
        return tuple(dict.fromkeys(self.control.places))

    def barrier(self, timeout_seconds: float | None = None) -> None:
        """Waits until every live worker has reached this barrier. Flushes this worker's pending operations first.

        A call that raised has not returned: the next one is the same barrier, and returns at once where all have
        reached it meanwhile.

        Raises:
            WorkerLostError, NodeLostError, DeadlockError, WaitTimeoutError: see ``multiverso.errors``.
            OutOfMemoryError: another host has no memory for rows of a keyed table that workers of this one have added
                to: all have come to this barrier, and what could not be taken is kept. The same call again looks again.
        """
        self.check_may_wait()
        deadline, target = self.start_deadline(timeout_seconds), 0
        try:
            self.flush_until(deadline)
            with self._lock:
                target = self._raised or self.barriers + 1
                arrive = functools.partial(waits.barrier.compiled(), self.control.address, self.index, target)
                self.node.arrive(target)
                code = arrive()
                if code:
                    self.resume(code, arrive, deadline, f"barrier {target}")
                for handle in self.handles:  # where another host does not take what this one's workers have added
                    handle._raise_if_unsent()
                self.barriers = max(self.barriers, target)
        except BaseException:
            self._raised = target or self._raised
            raise
        self._raised = 0

    def count_barriers(self, number: int) -> None:
        """Counts this worker as past so many barriers, where it continues from a place behind them.

        All see it: it comes to none of these, so that no worker waits for it there.
        """
        if number > self.barriers:
            self.node.arrive(number)
            self.control.pass_to(self.worker_id, number)
            self.barriers = number

    def flush(self, timeout_seconds: float | None = None) -> None:
        """Waits until this worker's pending asynchronous operations on all tables are done.

        Raises:
            WaitTimeoutError: they were not, ``timeout_seconds`` after the call.
        """
        self.flush_until(self.start_deadline(timeout_seconds))

    def flush_until(self, deadline: Deadline) -> None:
        """Like `flush`, for callers that already have a deadline."""
        for handle in self.handles:
            handle._flush_until(deadline)

    # -- tables ----------------------------------------------------------------------------------------------

    def makes_together(self, name: str | None) -> bool:
        """Returns whether all workers make a table together, with this name or none.

        Where reads wait for others they do so with a name, too: they have to know of each other from the first on.
        """
        return name is None or (self.consistency.reads_wait and self.fixed_num is not None)

    def open_table(
        self,
        spec: TableSpec,
        fill: Callable[[Shard, bool, int], None],
        *,
        master: bool = False,
        timeout_seconds: float | None = None,
    ) -> tuple[int, Shard]:
        """Creates a table with the others, or attaches to it by its name.

        Args:
            spec: the table; has to be equal in every worker.
            fill: writes this worker's initial value when its turn has come; called with the shard, whether
                this is the last turn, and how many workers contribute.
            master: this worker's initial value counts, instead of the lowest worker's.
            timeout_seconds: deadline, instead of the session's.

        Returns:
            The table's number and its memory. It is open with ``adopt``, until which a repeated call opens the same
            one, so that an interruption between the two loses nothing.

        Raises:
            TableMismatchError: the others asked for another table. The order does not advance.
        """
        self.check_may_wait()
        deadline = self.start_deadline(timeout_seconds)
        with self._lock:
            return self._holdings.open_table(spec, fill, master, deadline)

    def shared_memory(
        self,
        name: str,
        nbytes: int,
        initialise: Callable[[SharedMemory], None] | None = None,
        *,
        sparse: bool = False,
        once: bool = False,
        on_this_host: bool = False,
        timeout_seconds: float | None = None,
    ) -> SharedMemory:
        """Returns memory that all workers of the job on this host share under a name.

        The first worker that asks creates it, all zero; the others attach to it. It has no clocks, and ``save``,
        ``stats`` and ``multiverso top`` do not show it. It lasts as long as
        the job, or until all that have it have called `close_memory`.

        Args:
            name: what the workers call it; tables have names of their own.
            nbytes: its size, 1 or more; has to be equal in every worker.
            initialise: called with it in the worker that creates it, before any other worker gets it. If that
                worker dies meanwhile, the next one begins again with zeros.
            sparse: a page takes memory once it is written, and none is set aside: it may be larger than the machine's
                memory, but a writer has to make sure that some is left.
            once: the name is not given again after `close_memory` by all that had it: a worker that asks then is
                refused, instead of getting memory that none of them will ever come to.
            on_this_host: the workers of one host are enough, in a job on several; otherwise that is refused.
            timeout_seconds: deadline, instead of the session's.

        Raises:
            TableMismatchError: other workers asked for another size.
            OutOfMemoryError: there is no room for it.
            WaitTimeoutError: the creator did not finish in time.

        Examples:
            >>> from multiverso.runtime import Node, Session
            >>> with Node(1) as node, Session(node.address) as session:
            ...     memory = session.shared_memory("flags", 64)
            ...     memory.array[0] = 1
            ...     int(memory.view("int64")[0])
            1
        """
        self.check_may_wait()
        if not on_this_host:
            refuse_across_hosts(self.hosts, "memory that workers share directly", "start all of them on one host")
        spec = MemorySpec(name, checked_count(nbytes, "nbytes"), bool(sparse), bool(once))
        deadline = self.start_deadline(timeout_seconds)
        with self._lock:
            return self._holdings.share(spec, initialise, deadline)

    def wait_graph(self) -> WaitGraph:
        """Returns who is there, how far each is, and what each waits for."""
        return read_wait_graph(self.control, self.tables(), self._holdings.memories())

    def tables(self) -> dict[int, Shard]:
        """Returns this worker's tables by number."""
        return dict(self._holdings.tables)

    def adopt(self, handle: Handle, number: int, shard: Shard) -> None:
        """Takes in a table's handler, to flush it at barriers and to end it at the end; the table is open now."""
        with self._lock:
            self._holdings.keep(number, shard, self.handles.list_of(table_key(number)), handle)

    def dismiss(self, handle: Handle, number: int) -> None:
        """Forgets a handler that is closed; with its table's last one this worker's part in the table ends.

        The handler refers to the table's memory no longer. An interrupted call can be repeated.
        """
        table = table_key(number)
        # else this is a signal's handler, or a finalizer, in the middle of a call of this thread that asks the node
        may_ask = not holds(self._lock)
        with self._lock:
            if all(other is handle for other in self.handles.of(table)):
                self._holdings.close_table(number, may_ask)
            self.handles.remove(table, handle)
            self.handles.forget(table)

    def close_memory(self, memory: SharedMemory) -> None:
        """Ends this worker's part in what `shared_memory` has returned, whose array shows zeros from here on.

        When all workers that had it have closed it or left, it is freed, and its name is another's. An interrupted
        call can be repeated; a second one does nothing.
        """
        may_ask = not holds(self._lock)  # as in `dismiss`
        with self._lock:
            self._holdings.close_memory(memory.number, may_ask)

    # -- waiting ---------------------------------------------------------------------------------------------

    def resume(self, code: int, again: Callable[[], int], deadline: Deadline | None, what: str) -> None:
        """Takes an unfinished kernel call up again until it is done, a deadline passes, or it cannot be.

        Args:
            code: what the first call returned.
            again: makes the call again.
            deadline: until when; None for the session's own time from now on.
            what: what is waited for, in words.
        """
        patience = Patience(self, self.start_deadline() if deadline is None else deadline, what)
        try:
            while code:
                patience.raise_if_hopeless(code & 0xFFFF)
                code = again()
        finally:
            waits.finish_wait.compiled()(self.control.address, self.index)

    def start_deadline(self, timeout_seconds: float | None = None) -> Deadline:
        """Begins the time of a call that may wait; returns its deadline.

        One that is shorter than a slice of waiting is noted in shared memory, where this worker's kernels look at it.

        Args:
            timeout_seconds: from now; None for the session's own time.
        """
        deadline = Deadline.after(self.timeout_seconds if timeout_seconds is None else timeout_seconds)
        if deadline.seconds < SLICE_SECONDS:
            self.control.look_at(self.worker_id, deadline)
        return deadline

    @contextmanager
    def waiting(self, kind: int, memory: int, target: int, stage: int = 0) -> Iterator[None]:
        """Publishes what this worker waits for, for as long as the block lasts.

        Args:
            kind: one of the ``FOR_...`` of ``layout/words.py`` (WAIT_KIND).
            memory: number of the table, or of the shared memory.
            target: what of it; of a lock, its offset.
            stage: see there (WAIT_STAGE).
        """
        waits.begin_wait.compiled()(self.control.address, self.index, kind, memory, stage, target)
        try:
            yield
        finally:
            waits.finish_wait.compiled()(self.control.address, self.index)

    def check(self) -> None:
        """Raises ClosedError when the session is over."""
        if self.closed is not None:
            raise ClosedError(self.closed)

    def check_may_wait(self) -> None:
        """Before anything that may wait for others: checks, and notes which threads do so.

        While another thread may continue, one thread's waiting does not mean that the worker waits. Without the node
        no death would be noticed, so a wait is refused also when the others are still there.
        """
        self.check()
        if self.node_lost:
            raise self.node_error()
        if self.threads.several or threading.get_ident() != self.made_by:
            self.note_threads()

    def note_threads(self) -> None:
        """Tells the other workers whether another thread of this one may continue while this thread waits."""
        self.threads.note(ctypes.c_int32.from_address(self.control.block(self.worker_id) + at.THREADED))

    @property
    def node_lost(self) -> bool:
        """Whether the node is gone."""
        return self._liveness.node_lost.is_set()

    def node_error(self) -> NodeLostError:
        """Returns the error for a wait after the node is gone."""
        return NodeLostError(
            "the node of this job (the process that holds its tables: the launcher, or a child of the first "
            "worker) is gone, so nobody can be waited for; the values are still readable with table.snapshot()"
        )

    # -- the end ---------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Flushes and leaves the job, without waiting for other workers. A second call does nothing.

        An exception that arrives meanwhile (Ctrl-C) ends the flushing only: the worker has left when it is raised.
        """
        with self._ending:
            if self._over:
                return
            try:
                self._flush_once()
                self._finish_end()
            except BaseException:
                self._finish_end()
                raise

    def _flush_once(self) -> None:
        if not self._flushed:
            self._flushed = True
            for finish in list(self.before_end.values()):
                finish()
            self.flush(_MOST_WAIT)
            if self._node_is_silent and not holds(self._lock):  # else this is a handler, as in `dismiss`
                self._close()  # or this would wait for the lock as long as another thread of ours waits for others
                for line in self.node.farewell():
                    say(line)

    def _close(self) -> None:
        """From now on calls are refused, and waits of other threads end."""
        if self.closed is None:
            self.closed = (
                "the session is over: shutdown() was called; call init() again to begin a new one "
                "(tables of the old one cannot be used any more)"
            )

    def _finish_end(self) -> None:
        """Ends what has begun. It can be called again after an exception anywhere in it."""
        self._close()
        for handle in self.handles:
            handle._leave()
        if self._takes_part:
            self.control.leave(self.worker_id)
        self._liveness.release()
        self._link.close()
        self._holdings.leave()
        self.handles.clear()
        self.reducers.clear()
        _open.discard(self)
        for end in self.after_end:
            end()
        # a table that the program keeps would keep a node here, and all of the job's memory
        self.after_end.clear()
        self._over = True

    def note_forked(self) -> None:
        """In a forked child: the memory is there, but locks and liveness belong to the parent."""
        if self._over:
            return
        self.closed = (
            f"this session belongs to process {self._pid}, and this is a forked child of it; "
            "use multiverso in the parent only, or start workers with `multiverso run`"
        )
        self._over = True
        _open.discard(self)
        self._link.close()
        self._liveness.abandon()
        self._holdings.abandon()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()

    def __repr__(self) -> str:
        if not self._attached:
            return f"<Session that has not begun{', closed' if self.closed else ''}>"
        return f"<Session of worker {self.worker_id} of {self.workers_num}{', closed' if self.closed else ''}>"

    def statistics(self) -> dict[str, Any]:
        """Returns what this worker has done: per array and matrix operations, bytes, seconds waited, staleness."""
        self.check()
        return {
            "worker_id": self.worker_id,
            "workers_num": self.workers_num,
            "waited_seconds": self.control.waited_seconds(self.worker_id),
            "tables": {
                shard.spec.name or number: shard.statistics(self.worker_id)
                for number, shard in self.tables().items()
                if shard.spec.part_of is None
            },
        }


_open: set[Session] = set()


def open_sessions() -> set[Session]:
    """Returns this process's sessions that are not over."""
    return set(_open)


def abandoned_by(before: set[Session]) -> list[Session]:
    """Returns the sessions that this thread has made since ``before``; see `open_sessions`."""
    return [s for s in open_sessions() - before if s.made_by == threading.get_ident()]
