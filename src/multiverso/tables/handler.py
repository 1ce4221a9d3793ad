"""What all tables have in common."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from multiverso.checks import whole
from multiverso.consistency.protocol import Call
from multiverso.deadline import Deadline
from multiverso.errors import NotInThisJobError, SnapshotError
from multiverso.hosts.options import refuse_under_rule
from multiverso.layout import words as at
from multiverso.memory import words
from multiverso.runtime.session.replacing import leaves_values
from multiverso.runtime.session.waiting import await_version
from multiverso.spec.table import MOST_WEIGHT
from multiverso.tables import saving
from multiverso.tables.convert import Array, Out, as_whole, refuse_overlap, writable
from multiverso.tables.held import HeldTable
from multiverso.tables.operations import ADD, EXCHANGE, GET, Kind, Posted
from multiverso.tables.output import Output
from multiverso.tables.pending import Pending
from multiverso.tables.typed import Float16, Scalar

_COPY_TRIES = 1000


class TableHandler(HeldTable[Scalar]):
    """A table that all workers of the job share.

    The base of ``ArrayTableHandler`` and ``MatrixTableHandler``. Every method may be
    called from any thread; in synchronous mode one thread runs at a time.

    A table lasts until all workers have closed it (`close`, or the end of a ``with``) or have left: dropping a handler
    does not close it.

    After an exception (a deadline, Ctrl-C, an alarm's handler) call the method again with the same arguments: that
    finishes the operation, and repeats nothing. See ``docs/decisions/0045-a-call-that-raised.md``.

    Owner: its session. After ``shutdown`` only ``view()``s taken before are still readable.
    """

    # -- reading and adding ----------------------------------------------------------------------------------

    @overload
    def get(
        self, out: None = None, sync: bool = True, *, dtype: None = None, timeout_seconds: float | None = None
    ) -> npt.NDArray[Scalar]: ...
    @overload
    def get(
        self, out: None = None, sync: bool = True, *, dtype: Float16, timeout_seconds: float | None = None
    ) -> npt.NDArray[np.float16]: ...
    @overload
    def get(
        self, out: None = None, sync: bool = True, *, dtype: npt.DTypeLike, timeout_seconds: float | None = None
    ) -> Array: ...
    @overload
    def get(self, out: Out, sync: bool = True, *, timeout_seconds: float | None = None) -> Out: ...
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
        bits. With bounded staleness it waits for workers that are too far behind. In an asynchronous job it waits only
        while another worker writes to the same stripe: microseconds as a rule, not at all if that worker has died,
        but until the deadline if its process is stopped.

        Args:
            out: written to and returned: a NumPy array of the table's size and dtype (or float16), or a torch
                tensor; no copy is made between where dtype and memory allow.
            sync: accepted for older programs; a read always comes after this worker's own adds.
            dtype: of the result, where ``out`` is not given: the table's, ``"float16"`` or ``"bfloat16"``.
            timeout_seconds: deadline of the wait, instead of the session's.

        Raises:
            ShapeMismatchError, DtypeMismatchError: ``out`` does not fit.
            WorkerLostError, NodeLostError, DeadlockError, WaitTimeoutError: the wait failed.
            InterruptedRoundError: another read was interrupted in the middle of a round, and has to be finished first.
        """
        deadline = self._ready(timeout_seconds)
        if self._is_plain(out):
            operations = self._operations
            operations.run(GET, operations.how.get, (out,), deadline)
            return out
        return self._get(self._output(out, dtype, self.shape), deadline)

    def _get(self, output: Output, deadline: Deadline | None) -> Any:
        operations = self._operations
        return operations.run(GET, operations.how.get, (output.flat,), deadline, output.give)

    def add(self, data: Any, sync: bool = False, *, weight: int | None = None) -> None:
        """Adds to the whole table, through its updater.

        Args:
            data: ``size`` numbers in any shape (a matrix: (num_row, num_col) or flat), or one number for all; any
                sequence, array or tensor. It is not modified. Same-kind numbers are rounded to the table's dtype.
            sync: accepted for older programs; the add is always applied when the call returns.
            weight: how much it counts in the mean of a synchronous round, as the number of its minibatches: a whole
                number below 2**20. An add without one counts 1 beside others that have one, and a worker that
                gives none counts 1.

        Raises:
            ShapeMismatchError, DtypeMismatchError: the data do not fit; nothing was changed.
            NotInThisJobError: a weight, where no mean of a round is taken.
            WaitTimeoutError: a stopped process holds a part of the table. The next ``add`` of equal data continues
                where this one stopped; any other call on the table first finishes it.
        """
        self._ready(None)
        delta = data if self._is_plain(data) else as_whole(data, self._spec, "data")
        if self._transforms:
            delta = self._transformed(delta)
        operations = self._operations
        if weight is None:
            operations.run(ADD, operations.how.add, (delta,))
        else:
            self._weighted(ADD, weight, (delta,))[1]()

    def _weighted(
        self, kind: Kind, weight: int, arguments: tuple[Array, ...]
    ) -> tuple[tuple[Array, ...], Callable[[], None]]:
        """Returns an add with a weight: its arguments, of which the delta is the last, and what does it."""
        *ids, delta = arguments
        if not (self._spec.mean and self._how.in_rounds):
            raise NotInThisJobError(
                f"weight= is for a mean over a round's workers, init(sync=True) and updater='mean'; {self!r} has none"
            )
        number = whole(weight, "weight", 1, MOST_WEIGHT)
        add = partial(getattr(self._how, kind.name), weight=number)
        weighted = (*ids, delta * delta.dtype.type(number))
        return weighted, lambda: self._operations.run(kind, add, weighted)

    def exchange(self, local: Any, last: Any, *, timeout_seconds: float | None = None) -> None:
        """Pushes ``local - last`` and pulls the result into both, in one pass over the memory.

        The push-pull of a training loop: ``local`` are the worker's parameters, ``last`` their values after
        the last exchange.

        Args:
            local: ``size`` numbers of the table's dtype, C-contiguous and writable; overwritten.
            last: the same; overwritten.
            timeout_seconds: deadline of the wait, instead of the session's.

        Raises:
            WorkerLostError, NodeLostError, DeadlockError, WaitTimeoutError: the wait failed. Called
                again with the same two arrays it continues where it stopped.
        """
        deadline = self._ready(timeout_seconds)
        a, b = self._pair(local, last)
        if self._schedule is not None:
            self._follow_schedule()
        operations = self._operations
        operations.run(EXCHANGE, operations.how.exchange, (a, b), deadline)

    def _pair(self, local: Any, last: Any) -> tuple[Array, Array]:
        if self._clip is not None:
            self._refuse_clipped()
        a = local if self._is_plain(local) else writable(local, self._size, self._dtype, "local")
        b = last if self._is_plain(last) else writable(last, self._size, self._dtype, "last")
        return refuse_overlap(a, b)

    # -- in the background -----------------------------------------------------------------------------------

    def add_async(self, data: Any, *, weight: int | None = None) -> Pending[None]:
        """Like `add`, in the background. The data are copied first, so they may change at once.

        Operations of one worker on one table are done in the order of the calls, and later synchronous calls
        wait for them. At most 16 are pending; the next call then blocks.
        """
        self._session.check()
        delta = np.array(self._transformed(as_whole(data, self._spec, "data")))
        return self._add_later(ADD, weight, (delta,))

    def _add_later(self, kind: Kind, weight: int | None, arguments: tuple[Array, ...]) -> Pending[None]:
        # a call with *arguments lets handlers run after it: what they raised would have the add queued and not returned
        if weight is None:
            return self._later(kind, arguments)
        weighted, add = self._weighted(kind, weight, arguments)
        return self._later(kind, weighted, add)

    @overload
    def get_async(self, out: None = None) -> Pending[npt.NDArray[Scalar]]: ...
    @overload
    def get_async(self, out: Out) -> Pending[Out]: ...
    def get_async(self, out: Any = None) -> Pending[Any]:
        """Like `get`, in the background; ``wait()`` returns the values."""
        self._session.check()
        output = self._output(out, None, self.shape)
        return self._later(GET, (id(out),), lambda: self._get(output, None))

    def exchange_async(self, local: Any, last: Any) -> Pending[None]:
        """Like `exchange`, in the background. Leave both arrays alone until ``wait()`` returns."""
        self._session.check()
        a, b = self._pair(local, last)
        self._follow_schedule()
        return self._later(EXCHANGE, (a, b))

    def _later(
        self, kind: Kind, arguments: tuple[Any, ...], operation: Callable[[], Any] | None = None
    ) -> Pending[Any]:
        """Queues an operation; an equal call repeats one that raised, whose operation may be in the queue already.

        Without ``operation`` it is what the table's consistency does with the arguments. As in `Operations.run` the
        call is recorded before the queue gets it, and removed in the last step.
        """
        for earlier in [each for each in list(self._unheard) if each.raised]:
            if earlier.kind is kind and kind.is_same(earlier.arguments, arguments) and self._queue.has(earlier.pending):
                self._queue.wake()
                del self._unheard[earlier]  # no exception comes between this and the return
                return earlier.pending
            self._unheard.pop(earlier, None)  # its user has continued without repeating it

        operations = self._operations
        do = operation or (lambda: operations.run(kind, getattr(operations.how, kind.name), arguments))

        def run() -> Any:
            self._session.check()
            return do()

        call = Posted(kind, arguments, Pending(run, f"{kind.name} of {self!r}", self._session.threads.blocked))
        self._unheard[call] = None
        try:
            self._queue.put(call.pending, self._session.start_deadline())
        except BaseException:
            call.raised = True
            raise
        del self._unheard[call]
        return call.pending

    # -- past rounds and clocks: windows on the memory, copies, files -----------------------------------------

    def view(self) -> npt.NDArray[Scalar]:
        """Returns a read-only window on the shared memory, without a copy, in the table's shape.

        It shows other workers' adds as they come, with no promise about their order (in synchronous mode: the
        last finished round; take a new view after each read). It outlives ``shutdown``, frozen.
        """
        self._session.check()
        offset = self._shard.values_offset()
        return self._shard.segment.window(offset, self.size, self._dtype).reshape(self.shape)

    def memory(self) -> npt.NDArray[Scalar]:
        """Returns the values themselves, writable, in the table's shape; it outlives ``shutdown``.

        All workers of this host see a write at once. Nothing locks it: your code has to keep the
        others away, or to tolerate lost writes. Other hosts do not see the write; on several hosts use `add`. There is
        none in synchronous mode, where the values move with each round.

        Raises:
            NotInThisJobError: the session is in synchronous mode.
        """
        self._session.check()
        if self._session.consistency.in_rounds:
            raise NotInThisJobError("there is no memory() in synchronous mode, whose rounds keep two copies")
        return self._shard.values().reshape(self.shape)

    def note_written(self) -> None:
        """Marks `memory` as written to, which nothing else notices, so that it is sent to other hosts, too.

        What comes from other hosts while it is being written to may be overwritten.
        """
        self._session.check()
        words.store64(self._shard.base + at.WRITTEN, words.load64(self._shard.base + at.WRITTEN) + 1)
        rests = self._session.control.address + at.NODE_RESTS
        if words.load32(rests):
            words.bump_and_wake(rests)

    @overload
    def snapshot(self, out: None = None) -> npt.NDArray[Scalar]: ...
    @overload
    def snapshot(self, out: Out) -> Out: ...
    def snapshot(self, out: Any = None) -> Any:
        """Returns a copy of the values outside the rounds and clocks, at any time, in any mode.

        In synchronous mode it is the last finished round. Otherwise each stripe (128 KiB; 8 KiB of a matrix) is
        consistent. It first finishes this worker's own calls (asynchronous ones, and one that
        raised), and waits only while another worker writes to the same stripe, as an asynchronous `get`
        does; the deadline is the session's.

        Raises:
            ShapeMismatchError, DtypeMismatchError: ``out`` does not fit.
            WaitTimeoutError: a stopped process holds a part of the table.
        """
        self._ready(None)
        output = self._output(out, None, self.shape)
        self._operations.settle(None)
        self._how.snapshot(output.flat)
        return output.give()

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> Array:
        """What ``np.asarray(table)`` gives: a `snapshot`, which ends no round and waits for no clock.

        Raises:
            ValueError: ``copy=False``: `view` shows the values without a copy.
        """
        if copy is False:
            raise ValueError("np.array(table, copy=False): a table is copied; table.view() is a window on it")
        values: Array = self.snapshot()
        return values if dtype is None else values.astype(dtype, copy=False)

    def set(self, values: Any) -> None:
        """Overwrites the values of all workers, past the updater, whose state stays.

        Call it in one worker, and ``barrier()`` before anyone continues: adds of others meanwhile may be lost or not,
        stripe by stripe. In synchronous mode it takes the place of the last finished round.

        Args:
            values: as for `add`; not modified.

        Raises:
            ShapeMismatchError, DtypeMismatchError: the values do not fit; nothing was changed.
            NotInThisJobError: a rule between hosts would change them; nothing was changed.
        """
        self._ready(None)
        refuse_under_rule(self._session.hosts, self._session.exchange, "set", self._dtype)
        new = as_whole(values, self._spec, "values")
        self._operations.settle(None)
        self._how.put(new)

    def wait_version(self, version: int, *, timeout_seconds: float | None = None) -> int:
        """Waits until all workers together have done this many adds and exchanges; returns the number of them.

        For readers that want to see each state once: ``seen = table.wait_version(seen + 1)``, and
        then ``table.snapshot()``. In synchronous mode it counts finished rounds. It sleeps until something is added;
        in a job on several hosts it looks every few milliseconds.

        Args:
            version: a number of adds and exchanges, as `version` has it.
            timeout_seconds: deadline of the wait, instead of the session's.

        Raises:
            ValueError: ``version`` is not a number of operations.
            WorkerLostError, NodeLostError, WaitTimeoutError: the wait failed.
        """
        version = whole(version, "version", 0)
        self._ready(timeout_seconds)
        reached, what = self._how.newest, f"version {version} of {self._name}"
        await_version(self._session, self._shard.base, lambda: reached() >= version, what, timeout_seconds)
        return reached()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes values and updater state to a safetensors file, whole or not at all.

        Other workers' adds meanwhile may be in it or not: call ``barrier()`` first for an exact moment.

        Raises:
            SnapshotError: it cannot be written; its cause is the system's error.
        """
        self._ready(None)
        self._operations.settle(None)
        self.copied().save(path)

    def copied(self) -> saving.Copied:
        """Returns what `save` writes; for another thread, too, beside this worker's own operations."""
        self._session.check()
        values, in_rounds = np.empty(self._size, self._dtype), self._session.consistency.in_rounds
        for _ in range(_COPY_TRIES):
            newest = self._how.newest()
            self._how.snapshot(values)
            states, version = [np.array(state) for state in self._states()], self.version
            if not in_rounds or self._how.newest() == newest:  # the values and states are of one round
                return saving.Copied(self._spec, version, values, states)
        raise SnapshotError(f"no consistent copy of {self._name} in {_COPY_TRIES} tries: its rounds are too quick")

    def _unread(self) -> tuple[Array, ...] | None:
        """In a synchronous job: what this worker has added since its last read, as `add` takes it; None: nothing.

        Raises:
            InterruptedRoundError: a read was interrupted and has to be finished first.
        """
        self._ready(None)
        added = self._how.staged()
        return None if added is None else (added,)

    def _add_unread(self, delta: Array) -> None:
        """Adds again what `_unread` returned, as it is: it was clipped before."""
        self._ready(None)
        self._how.add(delta, Call())

    def load(self, path: str | os.PathLike[str]) -> None:
        """Replaces values and updater state by those of a `save`.

        Call it in one worker (or in all), and ``barrier()`` before anyone continues. On several hosts also call
        ``barrier()`` before it; there, all workers have to call it if the updater has a state. In a replacement
        (`multiverso.incarnation`) it changes nothing, and says so, unless all have to call it and have not done so yet.

        Raises:
            SnapshotError: no such file, not a saved table, or another shape, dtype or updater; or the workers load
                different files. Nothing was changed.
        """
        self._ready(None)
        saved = self._read(path)
        if leaves_values(self._session, self._name, self._steps_of_load):
            return
        self._check_others(*saved)
        self._replace(*saved)
