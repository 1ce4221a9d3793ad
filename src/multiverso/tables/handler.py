"""What all tables have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from multiverso.deadline import Deadline
from multiverso.errors import ShapeMismatchError
from multiverso.tables.contents import Contents
from multiverso.tables.convert import Array, Out, writable
from multiverso.tables.operations import ADD, EXCHANGE, GET, Kind, Posted
from multiverso.tables.output import Output
from multiverso.tables.pending import Pending


class TableHandler(Contents):
    """A table that all workers of the job share.

    Do not make one yourself: make an ``ArrayTableHandler`` or a ``MatrixTableHandler``. Every method may be
    called from any thread; in synchronous mode one thread at a time gets in.

    A table lasts until all workers have closed it (:meth:`close`, or the end of a ``with``) or have left: its
    memory is the job's, so a handler that is merely forgotten keeps it.

    A call that raised has not returned (a deadline, Ctrl-C, an alarm's handler): call it again with the same arguments,
    and it is finished; what it had done is not done again. See ``docs/decisions/0045-a-call-that-raised.md``.

    Owner: its session. After ``shutdown`` only ``view()``s taken before are still readable.
    """

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
        bits. With bounded staleness it waits for workers that are too far behind. In an asynchronous job it waits for
        no other worker's progress, only for one that is writing to the same stripe at this moment: microseconds as
        a rule, nothing if that one has died, but until the deadline if its process is stopped.

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
            operations = self._operations
            operations.run(GET, operations.how.get, (out,), deadline)
            return out
        return self._get(self._output(out, dtype, self.shape), deadline)

    def _get(self, output: Output, deadline: Deadline | None) -> Any:
        operations = self._operations
        return operations.run(GET, operations.how.get, (output.flat,), deadline, output.give)

    def add(self, data: Any, sync: bool = False) -> None:
        """Adds to the whole table, through its updater.

        Args:
            data: ``size`` numbers in any shape (a matrix: (num_row, num_col) or flat), or one number for all; any
                sequence, array or tensor. It is not modified. Same-kind numbers are rounded to the table's dtype.
            sync: True returns when the add is applied; as applying at once is fastest, it always is.

        Raises:
            ShapeMismatchError, DtypeMismatchError: the data do not fit; nothing was changed.
            WaitTimeoutError: a stopped process holds a part of the table. With equal data the next ``add`` goes on
                where this one stopped; any other call on the table does first what is left of it.
        """
        self._ready(None)
        delta = data if self._is_plain(data) else self._delta(data)
        if self._transforms:
            delta = self._transformed(delta)
        operations = self._operations
        operations.run(ADD, operations.how.add, (delta,))

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
        if self._schedule is not None:
            self._follow_schedule()
        operations = self._operations
        operations.run(EXCHANGE, operations.how.exchange, (a, b), deadline)

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
        operations = self._operations
        return self._later(lambda: operations.run(ADD, operations.how.add, (delta,)), ADD, (delta,))

    def get_async(self, out: Any = None) -> Pending:
        """Like :meth:`get`, in the background; ``wait()`` returns the values."""
        self._session.check()
        output = self._output(out, None, self.shape)
        return self._later(lambda: self._get(output, None), GET, (id(out),))

    def exchange_async(self, local: Any, last: Any) -> Pending:
        """Like :meth:`exchange`, in the background. Leave both arrays alone until ``wait()`` returns."""
        self._session.check()
        a, b = self._pair(local, last)
        self._follow_schedule()
        operations = self._operations
        return self._later(
            lambda: operations.run(EXCHANGE, operations.how.exchange, (a, b)), EXCHANGE, (a, b)
        )

    def _later(self, operation: Callable[[], Any], kind: Kind, arguments: tuple[Any, ...]) -> Pending:
        """Queues an operation; an equal call repeats one that raised, whose operation may be in the queue already.

        As in `Operations.run` the call is recorded before the queue gets it, and removed in the last step.
        """
        for earlier in [each for each in list(self._unheard) if each.raised]:
            if (
                earlier.kind is kind
                and kind.is_same(earlier.arguments, arguments)
                and self._queue.has(earlier.pending)
            ):
                self._queue.wake()
                del self._unheard[earlier]  # no exception comes between this and the return
                return earlier.pending
            self._unheard.pop(earlier, None)  # its user has gone on without repeating it

        def run() -> Any:
            self._session.check()
            return operation()

        call = Posted(kind, arguments, Pending(run, f"{kind.name} of {self!r}"))
        self._unheard[call] = None
        try:
            self._queue.put(call.pending, self._session.start_deadline())
        except BaseException:
            call.raised = True
            raise
        del self._unheard[call]
        return call.pending
