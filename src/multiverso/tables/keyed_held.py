"""What a worker holds of a keyed table: which one it is, how it is opened and closed."""

from __future__ import annotations

from typing import Any, Self

import numpy as np

from multiverso.deadline import Deadline
from multiverso.errors import NotInThisJobError
from multiverso.runtime.session.refusals import refuse_across_hosts
from multiverso.runtime.session.session import Session
from multiverso.tables.closed_handler import Closed
from multiverso.tables.convert import Array
from multiverso.tables.keyed_calls import KeyedCalls
from multiverso.tables.keyed_memory import KeyedMemory
from multiverso.tables.keyed_spec import KeyedSpec
from multiverso.tables.keyed_whole import KeyedPasses
from multiverso.tables.steered import Steered
from multiverso.updaters import Updater


class HeldKeyedTable(Steered):
    """One worker's hold of a keyed table, without its operations; see :class:`~multiverso.tables.keyed.KeyedTable`."""

    _memory: KeyedMemory
    _calls: KeyedCalls
    _passes: KeyedPasses

    def __init__(self, session: Session, spec: KeyedSpec, updater: Updater) -> None:
        session.check()
        if session.consistency.reads_wait:
            raise NotInThisJobError(
                f"keyed tables are asynchronous, and this session is {session.consistency.name}: "
                "call init() without sync= and staleness=, or use a MatrixTableHandler"
            )
        refuse_across_hosts(
            session.hosts,
            "a KeyedTable",
            "use a MatrixTableHandler, whose rows have numbers, or start all workers on one host",
        )
        super().__init__(session, updater)
        self._spec = spec
        self._dtype = np.dtype(spec.dtype)
        self._closed = False
        handles = session.keyed_handles
        with session.making:
            by_order = sum(called.startswith("order:") for called in handles)
            called = f"order:{by_order + 1}" if spec.name is None else f"name:{spec.name}"
            twins: list[HeldKeyedTable] = handles.get(called, [])
            if twins:
                twins[0]._memory.check_equal(spec)
                self._memory, self._calls = twins[0]._memory, twins[0]._calls
            else:
                self._memory = KeyedMemory.of(session, called, spec)
                self._calls = KeyedCalls(session, self._memory, spec)
            self._passes = KeyedPasses(session, self._memory, self._calls)
            self._called, self._shared = called, self._memory.memory
            # in one step each: either this call has opened the table, or it can be made again
            if called in handles:
                twins.append(self)
            else:
                handles[called] = [self]

    # -- what it is ------------------------------------------------------------------------------------------

    @property
    def dim(self) -> int:
        """Numbers in a row."""
        return self._spec.dim

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the values in the shared memory."""
        return self._dtype

    @property
    def name(self) -> str | None:
        """Its name, or None for one that was created by order."""
        return self._spec.name

    @property
    def spec(self) -> KeyedSpec:
        """Everything that the workers have agreed on."""
        return self._spec

    def _hyper(self, index: int) -> Array:
        return self._memory.hyper()[index : index + 1]

    def _steps(self) -> int:
        return self._memory.adds()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._spec}>"

    # -- the end ---------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Ends this worker's part in the table; an ``add`` or ``remove`` that raised half done is finished first.

        Once every worker that has the table has closed it or left the job, its memory is free; until then the others
        go on. Every later call raises ClosedError. A name can then be used for a new table; the place in the order
        of a table without one cannot: a worker that comes to it later is refused, so let all of them come
        (``barrier()``) before the first one closes it. Where a worker has opened a named table twice, each object is
        closed for itself.

        A second call does nothing; one that was interrupted is finished by calling it again.

        Raises:
            WaitTimeoutError: what was half done could not be finished. Nothing was changed.
        """
        session = self._session
        if session.closed is not None:
            return
        with session.making:
            handles = session.keyed_handles.get(self._called, [])
            if self not in handles:
                return
            last = len(handles) == 1
            if not self._closed:
                reason = f"{self!r} was closed: close() was called on it"
                if last:
                    self._calls.close(reason)
                gone: Any = Closed(reason)
                self._memory = self._calls = self._passes = gone
                self._closed = True
            if last:
                session.close_memory(self._shared)
            if self in handles:  # a signal's handler may have closed it meanwhile
                handles.remove(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # -- inside ----------------------------------------------------------------------------------------------

    def _flush_until(self, deadline: Deadline) -> None:
        """Finishes what a call that raised has left half; a ``close`` that raised has done so."""
        if not self._closed:
            self._calls.settle(deadline)
