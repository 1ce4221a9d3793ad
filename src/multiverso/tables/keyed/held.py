"""A worker's handle of a keyed table: opens and closes it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from multiverso.deadline import Deadline
from multiverso.errors import NotInThisJobError
from multiverso.hosts.options import refuse_across_hosts
from multiverso.layout.keyed import at
from multiverso.memory.words import load64
from multiverso.runtime.session.session import Session
from multiverso.tables.convert import Array
from multiverso.tables.keyed.calls import KeyedCalls
from multiverso.tables.keyed.memory import KeyedMemory
from multiverso.tables.keyed.rounds import KeyedRounds
from multiverso.tables.keyed.spec import KeyedSpec
from multiverso.tables.keyed.spread import SpreadCalls, SpreadPasses, open_spread
from multiverso.tables.keyed.whole import KeyedPasses
from multiverso.tables.table import Closed, Table
from multiverso.updaters import Updater


class HeldKeyedTable(Table[KeyedSpec]):
    """One worker's hold of a keyed table, without its operations; see `KeyedTable`."""

    _memory: KeyedMemory
    _calls: KeyedCalls
    _passes: KeyedPasses | SpreadPasses
    _rounds: KeyedRounds | None = None  # in a synchronous job

    def __init__(self, session: Session, spec: KeyedSpec, updater: Updater, cache_rows: int | None = None) -> None:
        session.check()
        mode = session.consistency
        if mode.has_clocks:
            raise NotInThisJobError(
                f"keyed tables are asynchronous or synchronous, and this session is {mode.name}: "
                "call init() without staleness=, or use a MatrixTableHandler"
            )
        if mode.by_quorum:
            raise NotInThisJobError(
                "keyed tables do not go through rounds with a quorum yet: call init() without quorum=, or use a "
                "MatrixTableHandler"
            )
        if mode.in_rounds and (spec.admission > 1 or spec.eviction is not None):
            raise NotInThisJobError(
                "a KeyedTable in a synchronous job admits each key at once and keeps it: leave out admission= and "
                "eviction=, or call init() without sync="
            )
        if mode.in_rounds:
            refuse_across_hosts(
                session.hosts,
                "a KeyedTable in a synchronous job",
                "call init() without sync=, use a MatrixTableHandler, or start all workers on one host",
            )
        spec = replace(spec, in_rounds=mode.in_rounds)
        if session.hosts:
            spec = spec.part_of(len(session.hosts))
        super().__init__(session, spec, updater)
        self._closed = False
        handles = session.handles
        with handles.making:
            by_order = sum(table.startswith(_key("order:")) for table in handles.known())
            called = f"order:{by_order + 1}" if spec.name is None else f"name:{spec.name}"
            twin = next(iter(handles.of(_key(called))), None)
            if isinstance(twin, HeldKeyedTable):
                twin._memory.check_equal(spec)
                self._memory, self._calls, self._rounds = twin._memory, twin._calls, twin._rounds
                self._passes = twin._passes
            elif mode.in_rounds:
                self._rounds = KeyedRounds.of(session, called, spec, updater)
                self._memory, self._calls = self._rounds.memory, self._rounds.calls
            elif session.hosts:
                self._memory, self._calls, self._passes = open_spread(session, called, spec, cache_rows)
            else:
                self._memory = KeyedMemory.of(session, called, spec)
                self._calls = KeyedCalls(session, self._memory, spec)
            if not isinstance(self._calls, SpreadCalls):
                self._passes = KeyedPasses(session, self._memory, self._calls)
            self._operations = self._rounds.operations if self._rounds is not None else None
            self._called, self._shared = called, self._memory.memory
            # in one step: either this call has opened the table, or it can be made again
            handles.list_of(_key(called)).append(self)

    # -- what it is ------------------------------------------------------------------------------------------

    @property
    def dim(self) -> int:
        """Numbers in a row."""
        return self._spec.dim

    def _hyper(self, index: int) -> Array:
        return self._memory.hyper()[index : index + 1]

    def _tell_rate(self, rate: float) -> None:
        if isinstance(self._calls, SpreadCalls) and self._rate_index is not None:
            place = at.HYPER + self._rate_index * self._dtype.itemsize // 8 * 8
            self._calls.set_word(place, load64(self._memory.address + place))

    def _steps(self) -> int:
        return self._memory.adds() if self._rounds is None else self._rounds.version()

    # -- the end ---------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Ends this worker's part in the table; an ``add`` or ``remove`` that raised half done is finished first.

        Once every worker that has the table has closed it or left the job, its memory is free; until then the others
        continue. Every later call raises ClosedError. A name can then be used for a new table; the place in the order
        of a table without one cannot: a worker that comes to it later is refused, so let all of them come
        (``barrier()``) before the first one closes it. Where a worker has opened a named table twice, each object is
        closed for itself.

        A second call does nothing; one that was interrupted is finished by calling it again.

        Raises:
            WaitTimeoutError: what was half done could not be finished. Nothing was changed.
            InterruptedRoundError: in a synchronous job, this worker's adds since its last read would be lost, or a read
                was interrupted: ``get`` first. Nothing was changed.
        """
        session = self._session
        if session.closed is not None:
            return
        with session.handles.making:
            handles = session.handles.of(_key(self._called))
            if self not in handles:
                return
            last = len(handles) == 1
            if not self._closed:
                reason = f"{self!r} was closed: close() was called on it"
                if last:
                    if self._rounds is not None:
                        self._rounds.operations.settle(None)
                        self._rounds.refuse_unfinished()
                    self._calls.close(reason)
                gone: Any = Closed(reason)
                self._memory = self._calls = self._passes = self._operations = gone
                self._closed = True
            if last:
                session.close_memory(self._shared)
                if self._rounds is not None:  # last: rows must not be older than the rounds that changed them
                    self._rounds.close()
            # the name stays known: a table by order is never another one
            session.handles.remove(_key(self._called), self)

    # -- inside ----------------------------------------------------------------------------------------------

    def _deadline(self, timeout_seconds: float | None) -> Deadline | None:
        """None: the session's own time from when it first has to wait."""
        return None if timeout_seconds is None else self._session.start_deadline(timeout_seconds)

    def _flush_until(self, deadline: Deadline) -> None:
        """Finishes what a call that raised has left half; a ``close`` that raised has done so."""
        if not self._closed:
            self._calls.settle(deadline)

    def _raise_if_unsent(self) -> None:
        """At a barrier: raises where another host does not take what was added here to rows that live there."""
        if isinstance(self._calls, SpreadCalls) and not self._closed:
            self._calls.desk.raise_if_in_trouble()

    def _leave(self) -> None:
        """At the session's end (which calls it): the others need nothing more of this worker."""


def _key(called: str) -> str:
    """Returns what a session's handles call a keyed table."""
    return f"keyed {called}"
