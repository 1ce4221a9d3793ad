"""What all tables have in common."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any, Self, overload

import numpy as np
import numpy.typing as npt

from multiverso import layout as at
from multiverso.consistency.modes import OF_MODE
from multiverso.consistency.port import Consistency, Port
from multiverso.deadline import Deadline
from multiverso.errors import MultiversoError, ShapeMismatchError
from multiverso.kernels.compiling import compile_update
from multiverso.memory import words
from multiverso.runtime.session import Session
from multiverso.runtime.watching import await_version
from multiverso.shards.shard import Shard
from multiverso.spec import TableSpec
from multiverso.tables import loading, saving
from multiverso.tables.closed import Closed
from multiverso.tables.convert import Array, Out, as_data, as_numpy, check_size, writable
from multiverso.tables.initial import fill, initial_value
from multiverso.tables.operations import Operations
from multiverso.tables.output import Output, fresh, into
from multiverso.tables.pending import Pending, Queue
from multiverso.updaters import Updater
from multiverso.updaters.checks import positive


class TableHandler:
    """A table that all workers of the job share.

    Do not make one yourself: make an ``ArrayTableHandler`` or a ``MatrixTableHandler``. Every method may be
    called from any thread; in synchronous mode one thread at a time gets in.

    A table lasts until all workers have closed it (:meth:`close`, or the end of a ``with``) or have left: its
    memory is the job's, so a handler that is merely forgotten keeps it.

    A call that raised has not returned (a deadline, Ctrl-C, an alarm's handler): call it again with the same arguments,
    and it is finished; what it had done is not done again. See ``docs/decisions/0045-a-call-that-raised.md``.

    Owner: its session. After ``shutdown`` only ``view()``s taken before are still readable.
    """

    def __init__(
        self, session: Session, spec: TableSpec, updater: Updater, init_value: Any, master: bool
    ) -> None:
        value = initial_value(init_value, spec)
        self._session = session
        self._closed = False
        self._loaded_at: int | None = None  # the barrier at which this worker was the one to load
        self._spec = spec
        self._dtype = np.dtype(spec.dtype)
        self._size = spec.elements
        self._rate_index = updater.rate_index
        self._clip = updater.clip
        self._schedule = updater.schedule if session.worker_id == session.control.first_here else None
        update = 0 if updater.name == "add" else compile_update(updater.apply, spec.dtype)
        name = self._name = f"table {spec.name!r}" if spec.name else f"the {spec}"
        self._queue = Queue(spec.name or spec.kind)
        self._unheard: tuple[tuple[str, Any], Pending] | None = (
            None  # queued, but its caller got an exception
        )
        self._users: weakref.WeakSet[Any] = weakref.WeakSet()  # the rules that move it; see `Ruled`

        def take_turn(shard: Shard, last: bool, number: int) -> None:
            fill(shard, value, last, number)

        with session.making:
            self._number, self._shard = session.open_table(spec, take_turn, master=master, keep=False)
            same = session.handlers() if spec.name else []  # by order each table is made once
            twin = next((h for h in same if h.number == self._number), None)
            if twin is None:
                self._operations = Operations(_consistency_of(session, self._shard, update, name), name)
            else:  # the same named table again: one slot, one round, one order of pending operations
                self._operations, self._queue = twin._operations, twin._queue
            session.adopt(self, self._number, self._shard)

    # -- what it is ------------------------------------------------------------------------------------------

    @property
    def spec(self) -> TableSpec:
        """Everything that the workers have agreed on."""
        return self._spec

    @property
    def shape(self) -> tuple[int, ...]:
        """(size,) of an array, (num_row, num_col) of a matrix."""
        return self._spec.shape

    @property
    def size(self) -> int:
        """Numbers in the table."""
        return self._spec.elements

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the values in the shared memory."""
        return self._dtype

    @property
    def name(self) -> str | None:
        """Its name, or None for one that was created by order."""
        return self._spec.name

    @property
    def number(self) -> int:
        """Its number in the job, from 1: the same in every worker."""
        return self._number

    @property
    def version(self) -> int:
        """Adds and exchanges done by all workers so far; in synchronous mode, rounds finished."""
        self._session.check()
        return self._how.version()

    @property
    def learning_rate(self) -> float:
        """The updater's learning rate, as it is now for all workers. Set it in one worker, at any time.

        Whoever adds after that has it: no worker that has seen a later rate comes back to an earlier one. An add
        that is on its way may take either. In synchronous mode set it between two barriers, so that no round is on its
        way. Workers that make or open the table still give the updater that it was made with, and so does a saved one.

        Raises:
            MultiversoError: the updater has no learning rate.
            ValueError: not a finite number above 0.
        """
        self._session.check()
        return float(self._rate()[0])

    @learning_rate.setter
    def learning_rate(self, rate: float) -> None:
        self._session.check()
        self._rate()[0] = positive(rate, "learning rate")

    def _rate(self) -> Array:
        """Returns the number in the table's header itself: it is read anew by every operation."""
        if self._rate_index is None:
            raise MultiversoError(
                f"the updater {self._spec.updater!r} of {self._name} has no learning rate; adagrad, adam, ftrl, "
                "momentum, nesterov and rmsprop have one"
            )
        place = at.HYPER + self._rate_index * self._dtype.itemsize
        return self._shard.segment.array(place, 1, self._dtype)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._spec}>"

    # -- reading and adding ----------------------------------------------------------------------------------

    @overload
    def get(
        self,
        out: None = None,
        sync: bool = True,
        *,
        dtype: npt.DTypeLike | None = None,
        timeout_seconds: float | None = None,
    ) -> Array: ...
    @overload
    def get(
        self,
        out: Out,
        sync: bool = True,
        *,
        dtype: npt.DTypeLike | None = None,
        timeout_seconds: float | None = None,
    ) -> Out: ...
    def get(
        self,
        out: Any = None,
        sync: bool = True,
        *,
        dtype: npt.DTypeLike | None = None,
        timeout_seconds: float | None = None,
    ) -> Any:
        """Returns the table's values, in the table's shape.

        In synchronous mode this ends a round: it waits until every live worker reads, and all get the same
        bits. With bounded staleness it waits for workers that are too far behind. Otherwise it never waits.

        Args:
            out: written to and returned: a NumPy array of the table's size and dtype (or float16), or a torch
                tensor; no copy is made between where dtype and memory allow.
            sync: accepted for older programs; a read always comes after this worker's own adds.
            dtype: of the result, where ``out`` is not given: the table's, ``"float16"`` or ``"bfloat16"``.
            timeout_seconds: deadline of the wait, instead of the session's.

        Raises:
            ShapeMismatchError, DtypeMismatchError: ``out`` does not fit.
            WorkerLostError, NodeLostError, DeadlockError, WaitTimeoutError: the wait could not end well.
            InterruptedRoundError: another read raised in the middle of a round, and has to be finished first.
        """
        deadline = self._ready(timeout_seconds)
        if self._is_plain(out):
            self._operations.get(out, deadline)
            return out
        output = self._output(out, dtype, self.shape)
        return self._operations.get(output.flat, deadline, output.give)

    def add(self, data: Any, sync: bool = False) -> None:
        """Adds to the whole table, through its updater.

        Args:
            data: ``size`` numbers in any shape (a matrix: (num_row, num_col) or flat); any sequence, array or
                tensor. It is not modified. Same-kind numbers are rounded to the table's dtype.
            sync: True returns when the add is applied; as applying at once is fastest, it always is.

        Raises:
            ShapeMismatchError, DtypeMismatchError: the data do not fit; nothing was changed.
            WaitTimeoutError: a stopped process holds a part of the table. With equal data the next ``add`` goes on
                where this one stopped; any other call on the table does first what is left of it.
        """
        self._ready(None)
        delta = data if self._is_plain(data) else self._delta(data)
        self._operations.add(self._transformed(delta))

    def exchange(self, local: Any, last: Any, *, timeout_seconds: float | None = None) -> None:
        """Pushes ``local - last`` and pulls the result into both, in one pass over the memory.

        The push-pull of a training loop: ``local`` are the worker's parameters, ``last`` what they were after
        the last exchange.

        Args:
            local: ``size`` numbers of the table's dtype, C-contiguous and writable; overwritten.
            last: the same; overwritten.
            timeout_seconds: deadline of the wait, instead of the session's.

        Raises:
            WorkerLostError, NodeLostError, DeadlockError, WaitTimeoutError: the wait could not end well. Called
                again with the same two arrays it goes on where it stopped.
        """
        deadline = self._ready(timeout_seconds)
        a, b = self._pair(local, last)
        self._operations.exchange(a, b, deadline)

    def _transformed(self, delta: Array, rows: int = 1) -> Array:
        """Returns what is to be added, within its bounds, once the learning rate is what the schedule says."""
        if self._schedule is not None:
            self.learning_rate = self._schedule(self.version)
        return delta if self._clip is None else self._clip(delta, rows)

    def _refuse_clipped(self) -> None:
        if self._clip is not None:
            raise MultiversoError(
                f"{self._name} clips what is added ({self._clip}), and an exchange does not: use add() and get()"
            )

    def _pair(self, local: Any, last: Any) -> tuple[Array, Array]:
        self._refuse_clipped()
        a = local if self._is_plain(local) else writable(local, self._size, self._dtype, "local")
        b = last if self._is_plain(last) else writable(last, self._size, self._dtype, "last")
        # two arrays that own their memory cannot share it, and asking takes as long as the check of both
        if a is b or ((a.base is not None or b.base is not None) and np.may_share_memory(a, b)):
            raise ShapeMismatchError(
                "local and last share memory; they must be two arrays (last = local.copy())"
            )
        return a, b

    # -- in the background -----------------------------------------------------------------------------------

    def add_async(self, data: Any) -> Pending:
        """Like :meth:`add`, in the background. The data are copied first, so they may change at once.

        Operations of one worker on one table are done in the order of the calls, and later synchronous calls
        wait for them. At most 16 are pending; the next call then blocks.
        """
        self._session.check()
        delta = np.array(self._transformed(self._delta(data)))
        return self._later(lambda: self._operations.add(delta), "an add", delta.tobytes)

    def get_async(self, out: Any = None) -> Pending:
        """Like :meth:`get`, in the background; ``wait()`` returns the values."""
        self._session.check()
        output = self._output(out, None, self.shape)

        def get() -> Any:
            return self._operations.get(output.flat, None, output.give)

        return self._later(get, "a get", lambda: id(out))

    def exchange_async(self, local: Any, last: Any) -> Pending:
        """Like :meth:`exchange`, in the background. Leave both arrays alone until ``wait()`` returns."""
        self._session.check()
        a, b = self._pair(local, last)
        return self._later(
            lambda: self._operations.exchange(a, b, None),
            "an exchange",
            lambda: (a.ctypes.data, b.ctypes.data),
        )

    def _later(self, operation: Any, what: str, numbers: Callable[[], Any] = lambda: None) -> Pending:
        """Queues an operation; ``numbers`` makes what identifies the call: an equal one repeats one that raised."""
        if self._unheard is not None:
            (other, its), queued = self._unheard
            if other == what and its == numbers():
                self._queue.wake()
                self._unheard = None  # no exception comes between this and the return
                return queued

        def run() -> Any:
            self._session.check()
            return operation()

        pending = Pending(run, f"{what} of {self!r}")
        try:
            self._queue.put(pending, self._session.start_deadline())
            self._unheard = None
            return pending
        except BaseException:
            # the queue may have it, and may have done it, and the caller has not heard so
            self._unheard = (what, numbers()), pending
            if not self._queue.has(pending):
                self._unheard = None
            raise

    # -- outside the clocks ----------------------------------------------------------------------------------

    def view(self) -> Array:
        """Returns a read-only window on the shared memory, without a copy, in the table's shape.

        It shows other workers' adds as they come, with no promise about their order (in synchronous mode: the
        last finished round; take a new view after each read). It outlives ``shutdown``, frozen.
        """
        self._session.check()
        offset = self._shard.values_offset()
        return self._shard.segment.window(offset, self.size, self._dtype).reshape(self.shape)

    def memory(self) -> Array:
        """Returns the values themselves, writable, in the table's shape; it outlives ``shutdown``.

        What is written there is what all workers see, and nothing locks it: for code that keeps the others away
        by itself. Not in synchronous mode, where the values change places with each round.

        Raises:
            MultiversoError: the session is in synchronous mode.
        """
        self._session.check()
        if self._session.consistency.in_rounds:
            raise MultiversoError("there is no memory() in synchronous mode, whose rounds keep two copies")
        return self._shard.values().reshape(self.shape)

    def note_written(self) -> None:
        """Says that :meth:`memory` was written to, which nobody else notices: then it is sent to other hosts, too.

        What comes from other hosts while it is being written to may be overwritten.
        """
        self._session.check()
        words.store64(self._shard.base + at.WRITTEN, words.load64(self._shard.base + at.WRITTEN) + 1)

    @overload
    def snapshot(self, out: None = None) -> Array: ...
    @overload
    def snapshot(self, out: Out) -> Out: ...
    def snapshot(self, out: Any = None) -> Any:
        """Returns a copy of the values outside the rounds and clocks, at any time, in any mode; never waits.

        In synchronous mode it is the last finished round. Otherwise each stripe of 128 KiB is consistent.
        """
        self._ready(None)
        output = self._output(out, None, self.shape)
        self._operations.settle(None)
        self._how.snapshot(output.flat)
        return output.give()

    def set(self, values: Any) -> None:
        """Overwrites the values of all workers, past the updater, whose state stays.

        Call it in one worker, and ``barrier()`` before anyone goes on: adds of others meanwhile may be lost or not,
        stripe by stripe. In synchronous mode it takes the place of the last finished round.

        Args:
            values: as for :meth:`add`; not modified.

        Raises:
            ShapeMismatchError, DtypeMismatchError: the values do not fit; nothing was changed.
            MultiversoError: a rule between hosts would make something else of them; nothing was changed.
        """
        self._ready(None)
        self._session.refuse_under_rule("set", self._dtype)
        new = self._delta(values, "values")
        self._operations.settle(None)
        self._how.put(new)

    def wait_version(self, version: int, *, timeout_seconds: float | None = None) -> int:
        """Waits until all workers together have done so many adds and exchanges; returns how many they are.

        For readers that want to see something new, and nothing twice: ``seen = table.wait_version(seen + 1)``, and
        then ``table.snapshot()``. In synchronous mode it counts finished rounds. It sleeps until something is added;
        in a job on several hosts it looks every few milliseconds.

        Args:
            version: a number of adds and exchanges, as `version` has it.
            timeout_seconds: deadline of the wait, instead of the session's.

        Raises:
            ValueError: ``version`` is not a number of operations.
            WorkerLostError, NodeLostError, WaitTimeoutError: the wait could not end well.
        """
        if isinstance(version, bool) or not isinstance(version, int) or version < 0:
            raise ValueError(f"version is a number of operations, 0 or more; got {version!r}")
        self._ready(timeout_seconds)
        reached, what = self._how.version, f"version {version} of {self._name}"
        await_version(self._session, self._shard.base, lambda: reached() >= version, what, timeout_seconds)
        return reached()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes values and updater state to a safetensors file, whole or not at all.

        Other workers' adds meanwhile may be in it or not: call ``barrier()`` first for an exact moment.
        """
        self._ready(None)
        self._operations.settle(None)
        self.copied().save(path)

    def copied(self) -> saving.Copied:
        """Returns what :meth:`save` writes; for another thread, too, beside this worker's own operations."""
        self._session.check()
        values = np.empty(self._size, self._dtype)
        self._how.snapshot(values)
        states = [np.array(state) for state in self._states()]
        return saving.Copied(self._spec, self.version, values, states)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Replaces values and updater state by what :meth:`save` wrote.

        Call it in one worker (or in all), and ``barrier()`` before anyone goes on. In a job on several hosts also
        ``barrier()`` before; where the updater has a state, all workers have to call it there. In a worker that has
        taken a dead one's place (`multiverso.incarnation`) it changes nothing, and says so.

        Raises:
            SnapshotError: no such file, not a saved table, or another shape, dtype or updater; or, where all workers
                have to, they load different things. Nothing was changed.
        """
        self._ready(None)
        saved = self._read(path)
        if self._session.leaves_values(self._name):
            return
        self._check_others(*saved)
        self._replace(*saved)

    def _check_others(self, values: Array, states: list[Array]) -> None:
        """Before a load: where each host has something of its own to be overwritten, all workers load the same."""
        if self._session.hosts and states:
            loading.check_all(self._session, self._name, [values, *states])

    def _read(self, path: str | os.PathLike[str]) -> tuple[Array, list[Array]]:
        """Returns the values and updater state that :meth:`save` wrote, if they fit this table."""
        return saving.load(path, self._spec)

    def _replace(self, values: Array, states: list[Array]) -> None:
        """Overwrites values and updater state (flat, of the table's dtype and size)."""
        self._ready(None)
        self._session.refuse_under_rule("load", self._dtype)
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
        """Whether this worker overwrites the values: of several hosts one does, as differences add up."""
        session = self._session
        if not session.hosts or self._how.in_rounds:
            return True
        if not loading.is_first(session, self._number, self._loaded_at):
            return False
        self._loaded_at = session.barriers
        return True

    # -- inside ----------------------------------------------------------------------------------------------

    @property
    def _how(self) -> Consistency:
        """What reads and adds of this table mean."""
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
        self._flush_until(self._session.start_deadline(timeout_seconds))

    def _flush_until(self, deadline: Deadline) -> None:
        """Like :meth:`flush`, for callers that already have a deadline."""
        self._queue.flush(deadline)
        self._operations.settle(deadline)

    def close(self) -> None:
        """Ends this worker's part in the table; waits for nobody but this worker's own pending operations.

        Once every worker that has the table has closed it or left the job, its memory is free for the next
        table. Until then the others go on without this worker: rounds and clocks no longer wait for it. Every
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
            number, twins = self._number, self._session.handlers()
            if not any(h is not self and h.number == number for h in twins):
                self._operations.settle(None)
                self._how.refuse_unfinished()
                self._queue.close()
            gone: Any = Closed(f"{self!r} was closed: close() was called on it")
            self._operations = self._shard = gone
            self._closed = True
        self._session.dismiss(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _leave(self) -> None:
        """Ends this worker's part in the table, at the session's end (which calls it)."""
        self._queue.close()
        if not self._closed:
            self._how.leave()

    def _is_plain(self, array: Any) -> bool:
        """Returns whether a kernel can take an array of the table's size as it is: most calls, so it is quick."""
        return (
            type(array) is np.ndarray
            and array.dtype is self._dtype
            and array.ndim == 1
            and array.size == self._size
            and array.flags.carray
        )

    def _delta(self, data: Any, what: str = "data") -> Array:
        array = as_numpy(data, what)
        check_size(array, self.shape, self._spec, what)
        return as_data(array, self._dtype, what)

    def _output(self, out: Any, dtype: npt.DTypeLike | None, shape: tuple[int, ...]) -> Output:
        if out is None:
            return fresh(shape, self._dtype, dtype)
        return into(out, shape, self._dtype, not self._spec.is_matrix)


def _consistency_of(session: Session, shard: Shard, update: int, name: str) -> Consistency:
    """Returns what the session's consistency is for this table."""
    port = Port(
        control=session.control.address,
        base=shard.base,
        worker_id=session.worker_id,
        update=update,
        spec=shard.spec,
        name=name,
        staleness=session.staleness,
        first_round=shard.first_round(session.worker_id),
        slot=lambda: shard.slot(session.worker_id),
        check_may_wait=session.check_may_wait,
        resume=session.resume,
    )
    return OF_MODE[shard.mode](port)
