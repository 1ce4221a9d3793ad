"""A worker's handle of a table: opens and closes it, and begins every call."""

from __future__ import annotations

import hashlib
import os
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Generic

import numpy as np
import numpy.typing as npt

from multiverso.compiling.on_demand import compile_update
from multiverso.consistency.asynchronous import Asynchronous
from multiverso.consistency.bounded import Bounded
from multiverso.consistency.protocol import Consistency, TableAccess
from multiverso.consistency.quorum import QuorumRounds
from multiverso.consistency.synchronous import Synchronous
from multiverso.deadline import Deadline
from multiverso.errors import NotInThisJobError, SnapshotError
from multiverso.hosts.options import refuse_under_rule
from multiverso.kernels.plain_arrays import is_plain
from multiverso.layout import words as at
from multiverso.memory.words import load64
from multiverso.runtime.collective.agreement import all_gather
from multiverso.runtime.job.options import check_table
from multiverso.runtime.session.session import Session, table_key
from multiverso.shards.shard import Shard
from multiverso.spec.table import TableSpec
from multiverso.tables import initial_values, saving
from multiverso.tables.convert import Array
from multiverso.tables.operations import Operations, Posted
from multiverso.tables.output import Output, fresh, into
from multiverso.tables.pending import Queue
from multiverso.tables.table import Closed, Table
from multiverso.tables.typed import Scalar
from multiverso.updaters import Updater, loop_of


def check_all(session: Session, what: str, arrays: Iterable[Array]) -> None:
    """Waits until all workers load the same: each host has states of its own to be overwritten.

    Raises:
        SnapshotError: they do not; nothing was changed.
        WaitTimeoutError, DeadlockError, WorkerLostError: not all workers came.
    """
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(array.tobytes())
    digests = all_gather(session, digest.hexdigest())
    others = sorted(worker for worker, theirs in digests.items() if theirs != digest.hexdigest())
    if others:
        raise SnapshotError(
            f"{what} is loaded by all workers of all hosts, and workers {', '.join(map(str, others))} load something "
            "else; nothing was changed"
        )


# A new one is a file of `consistency/`, a mode in `spec/modes.py` and a line here.
OF_MODE: dict[int, Callable[[TableAccess], Consistency]] = {
    at.ASYNCHRONOUS: Asynchronous,
    at.BOUNDED: Bounded,
    at.SYNCHRONOUS: Synchronous,
    at.QUORUM: QuorumRounds,
}


class HeldTable(Table[TableSpec], Generic[Scalar]):
    """One worker's hold of a table, without its operations; see `TableHandler`."""

    _operations: Operations

    def __init__(self, session: Session, spec: TableSpec, updater: Updater, init_value: Any, master: bool) -> None:
        check_table(session.consistency, spec)
        _refuse_unknown(session, updater, spec)
        value = initial_values.checked_value(init_value, spec)
        super().__init__(session, spec, updater)
        self._closed = False
        self._loaded_at: int | None = None  # the barrier at which this worker was the one to load
        self._size = spec.elements
        # (array): whether a kernel can take it as it is, for the whole table
        self._is_plain = partial(is_plain.compiled(), id(np.ndarray), id(self._dtype), self._size)
        update = 0 if updater.name == "add" else compile_update(updater.apply, spec.dtype)
        name = self._name = f"table {spec.name!r}" if spec.name else f"the {spec}"
        self._queue = Queue(spec.name or spec.kind, session.threads.in_background)
        self._unheard: dict[Posted, None] = {}  # calls that hand something to the queue and have not returned
        self._users: weakref.WeakSet[Any] = weakref.WeakSet()  # the rules that move it; see `Ruled`

        with session.handles.making:
            self._number, self._shard = session.open_table(spec, partial(initial_values.fill, value), master=master)
            twin = next(iter(session.handles.of(table_key(self._number))), None)
            if isinstance(twin, HeldTable):
                # the same named table again: one slot, one round, one order of pending operations
                self._operations, self._queue = twin._operations, twin._queue
            else:
                access = access_to(session, self._shard, update, name)
                self._operations = Operations(OF_MODE[self._shard.mode](access), name)
            session.adopt(self, self._number, self._shard)

    # -- what it is ------------------------------------------------------------------------------------------

    @property
    def shape(self) -> tuple[int, ...]:
        """(size,) of an array, (num_row, num_col) of a matrix."""
        return self._spec.shape

    @property
    def size(self) -> int:
        """Numbers in the table."""
        return self._spec.elements

    @property
    def number(self) -> int:
        """Its number in the job, from 1: the same in every worker."""
        return self._number

    @property
    def version(self) -> int:
        """Adds and exchanges done by all workers so far; in synchronous mode, rounds finished."""
        self._session.check()
        return self._how.version()

    def _hyper(self, index: int) -> Array:
        return self._shard.segment.array(at.HYPER + index * self._dtype.itemsize, 1, self._dtype)

    def _steps(self) -> int:
        return self.version

    # -- before and after a call -----------------------------------------------------------------------------

    @property
    def _how(self) -> Consistency:
        """The consistency, which reads and adds go through."""
        return self._operations.how

    def _ready(self, timeout_seconds: float | None) -> Deadline | None:
        """Before every operation: the session is open and nothing is pending; returns the operation's deadline.

        None is the session's own time from when the operation first has to wait: most never do, and are quick.
        """
        session = self._session
        if session.closed is not None:
            session.check()
        if timeout_seconds is None and not self._queue.used:
            return None
        deadline = session.start_deadline(timeout_seconds)
        self._queue.flush(deadline)
        return deadline

    def flush(self, timeout_seconds: float | None = None) -> None:
        """Waits for this worker's pending operations on the table; raises what one of them raised."""
        self._flush(self._session.start_deadline(timeout_seconds))

    def _flush_until(self, deadline: Deadline) -> None:
        """Like `flush`, for the session, which still has a table whose ``close`` raised half done."""
        if not self._closed:
            self._flush(deadline)

    def _flush(self, deadline: Deadline) -> None:
        self._queue.flush(deadline)
        self._operations.settle(deadline)

    # -- the end ---------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Ends this worker's part in the table; waits for this worker's own pending operations and the node's answer.

        Once every worker that has the table has closed it or left the job, its memory is free for the next
        table. Until then the others continue without this worker: rounds and clocks no longer wait for it. Every
        later call raises ClosedError; views keep what they show now. A name can be used for a new table then.
        Where a worker has opened a named table twice, each handler is closed for itself.

        A second call does nothing; one that was interrupted is finished by calling it again.

        Raises:
            InterruptedRoundError: in synchronous mode, this worker's adds since its last read would be lost, or
                a read was interrupted: ``get`` first. Nothing was changed.
        """
        if self._session.closed is not None:
            return
        if not self._closed:
            self._ready(None)
            if all(other is self for other in self._session.handles.of(table_key(self._number))):
                self._operations.settle(None)
                self._how.refuse_unfinished()
                self._queue.close()
            gone: Any = Closed(f"{self!r} was closed: close() was called on it")
            self._operations = self._shard = gone
            self._closed = True
        self._session.dismiss(self, self._number)

    def _raise_if_unsent(self) -> None:
        """Nothing is kept from other hosts."""

    def _leave(self) -> None:
        """Ends this worker's part in the table, at the session's end (which calls it)."""
        self._queue.close()
        if not self._closed:
            self._how.leave()

    # -- what a load overwrites, also of all tables together -----------------------------------------------------

    @property
    def _steps_of_load(self) -> int:
        """How many barriers all workers pass where they load together: each host has states to be overwritten."""
        return int(bool(self._session.hosts and self._states()))

    def _check_others(self, values: Array, states: list[Array]) -> None:
        """Before a load: where each host has something of its own to be overwritten, all workers load the same."""
        if self._steps_of_load:
            check_all(self._session, self._name, [values, *states])

    def _read(self, path: str | os.PathLike[str]) -> tuple[Array, list[Array]]:
        """Returns the values and updater state that `save` wrote, if they fit this table."""
        return saving.load(path, self._spec)

    def _replace(self, values: Array, states: list[Array]) -> None:
        """Overwrites values and updater state (flat, of the table's dtype and size)."""
        self._ready(None)
        refuse_under_rule(self._session.hosts, self._session.exchange, "load", self._dtype)
        self._operations.settle(None)
        if self._writes():
            self._how.put(values)
        if self._spec.step_count is not None:
            *states, count = states
            self._shard.set_steps(int(count[0]))
        for state, saved in zip(self._shard.states(), states, strict=True):
            state[:] = saved

    def _states(self) -> list[Array]:
        """Returns what the updater keeps, in the order of its states: arrays, and a count of steps."""
        arrays = self._shard.states()
        return arrays if self._spec.step_count is None else [*arrays, np.array([self._shard.steps])]

    def _writes(self) -> bool:
        """Whether this worker overwrites the values, of all that load the table between two barriers.

        Of several hosts one does, as differences add up.
        """
        session = self._session
        if not session.hosts or self._how.in_rounds or self._loaded_at == session.barriers:
            return True
        what = f"load of table {self._number} at barrier {session.barriers}"
        question = {"about": "count", "name": what, "amount": 1}
        if session.node.ask_hosts(question, session.start_deadline(), f"the {what}").get("before") != 0:
            return False
        self._loaded_at = session.barriers
        return True

    # -- arrays in and out -----------------------------------------------------------------------------------

    def _output(self, out: Any, dtype: npt.DTypeLike | None, shape: tuple[int, ...]) -> Output:
        if out is None:
            return fresh(shape, self._dtype, dtype)
        return into(out, shape, self._dtype, not self._spec.is_matrix)


def _refuse_unknown(session: Session, updater: Updater, spec: TableSpec) -> None:
    """Refuses an updater that a node could not run, where it has to."""
    if (
        session.hosts
        and session.consistency.by_quorum
        and updater.apply is not loop_of(spec.updater, bool(spec.step_count))
    ):
        raise NotInThisJobError(
            f"the updater {updater.name} is not one of multiverso's own, which are those that rounds with a quorum can "
            "have on several hosts, where their nodes run it: use one of those, or leave quorum= out of init"
        )


def access_to(session: Session, shard: Shard, update: int, name: str) -> TableAccess:
    """Returns this worker's way to a table's memory; ``update`` is the address of its updater's code, or 0."""
    return TableAccess(
        control=session.control.address,
        base=shard.base,
        worker_id=session.worker_id,
        index=session.control.index,
        update=update,
        spec=shard.spec,
        name=name,
        staleness=session.staleness,
        first_round=shard.first_round(session.worker_id),
        slot=lambda: shard.slot(session.worker_id),
        check_may_wait=session.check_may_wait,
        resume=session.resume,
        is_awaited=_awaits(session, shard) if session.incarnation else None,
        quorum=session.quorum,
        record=session.record,
        replay=session.replay,
    )


def _awaits(session: Session, shard: Shard) -> Callable[[int], bool]:
    me, number = session.worker_id, int(shard.header["table_id"])
    clocks = [shard.line(i) + at.CLOCK for i in range(shard.workers) if i != me]

    def is_awaited(clock: int) -> bool:
        # at most reads no worker is behind, and the wait need not be looked up
        return any(load64(word) < clock for word in clocks) and session.wait_graph().is_awaited(me, number, clock)

    return is_awaited
