"""A keyed table on several hosts: rows that live here, and copies of those that live elsewhere, behind one face.

Each host has the rows of its groups of keys (`hosts.spread.homes`) in memory of its own, and in another piece copies
of rows that its workers have touched lately. A worker works on both as on any keyed table; for a row that is in neither
it asks its node (`desk`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from multiverso.compiling.on_demand import compile_update
from multiverso.deadline import Deadline
from multiverso.errors import MultiversoError, NotInThisJobError, SnapshotError
from multiverso.hosts.spread.placement import groups_of
from multiverso.kernels.keyed import calls as kernels
from multiverso.kernels.keyed.index import ABSENT
from multiverso.kernels.keyed.passes import KEY
from multiverso.layout import desk as layout
from multiverso.layout.keyed import COPIES, ELSEWHERE, KEPT
from multiverso.runtime.session.session import Session
from multiverso.shards.keyed import copies_status
from multiverso.signal_safety import turn
from multiverso.spec.states import State
from multiverso.tables.convert import Array
from multiverso.tables.keyed.calls import KeyedCalls
from multiverso.tables.keyed.desk import Bytes, Desk
from multiverso.tables.keyed.keys import Keys
from multiverso.tables.keyed.memory import KeyedMemory, memory_name
from multiverso.tables.keyed.progress import NOT_YET, Adding, Call, Removing, done, unmarked
from multiverso.tables.keyed.spec import KeyedSpec
from multiverso.tables.keyed.whole import KeyedPasses
from multiverso.updaters import BY_NAME
from multiverso.updaters.cached import copy_loops
from multiverso.wire.requests import Spread

T = TypeVar("T")
_COPIES_BYTES = 256 << 20  # by default
_COPY_SECONDS = 1.0


class Found(NamedTuple):
    """Where the rows of a call's keys are.

    Attributes:
        here, copies: the rows of each key, ELSEWHERE in one of them.
        away: how many live on other hosts.
        no_copy, no_row: of how many of those there is no copy, and how many live here and have no row.
    """

    here: Keys
    copies: Keys
    away: int
    no_copy: int
    no_row: int


class SpreadCalls(KeyedCalls):
    """What this worker does with a keyed table of a job on several hosts.

    It is itself what works on copies of rows that live elsewhere, of which those that are missing are fetched; an add
    or a removal of both kinds of rows is a call of its own, with a part that `own` does.

    Args:
        session: the worker's.
        memory, spec: of the copies.
        own: what is done to the rows that live here.
        desk: where the node is asked for rows.
        most: copies that there may be.
    """

    def __init__(
        self, session: Session, memory: KeyedMemory, spec: KeyedSpec, own: KeyedCalls, desk: Desk, most: int
    ) -> None:
        super().__init__(session, memory, spec)
        self.own, self.desk, self._most = own, desk, most
        self.lock, self._mine = own.lock, own._mine  # it is one table's
        self._spec, self._most_keys = own._spec, own._most_keys  # in words, it is that table
        self._here = session.hosts.index(session.control.here)
        self._size = spec.dim * np.dtype(spec.dtype).itemsize
        self._add_copy = compile_update(copy_loops(own._spec.updater).add, spec.dtype)

    # -- rows ------------------------------------------------------------------------------------------------

    def _live_here(self, keys: Keys) -> npt.NDArray[np.bool_]:
        """Returns which keys live here; they do until a call has ended that has pinned what it finds before."""
        here: npt.NDArray[np.bool_] = self.own.is_here[groups_of(keys)] != 0
        return here

    def _parts(self, keys: Keys) -> tuple[Keys, Keys]:
        """Returns the places of keys that live here, and of the others."""
        here = self._live_here(keys)
        return np.flatnonzero(here), np.flatnonzero(~here)

    def in_one_view(self, do: Callable[[], T]) -> T:
        """Does something that can be done again, until nothing has moved meanwhile."""
        while True:
            view = self.desk.view
            result = do()
            if self.desk.view == view:
                return result

    def get(self, keys: Keys, out: Array, deadline: Deadline | None) -> None:
        """See `KeyedCalls.get`."""
        with turn(self.lock, self._spec):
            self.own.ready(deadline)
            self.ready(deadline)
            for low in range(0, keys.size, self._most):
                self._get(keys[low : low + self._most], out.ctypes.data + low * self._size, deadline)

    def _get(self, keys: Keys, out: int, deadline: Deadline | None) -> None:
        try:
            while True:
                found = self.find_either(keys, deadline)
                if not found.no_copy:
                    break
                self.release()  # the node may have to let copies go first
                deadline = deadline or self._session.start_deadline()
                self.desk.fetch(np.unique(keys[found.copies == ABSENT]), deadline)
            self.own.run(kernels.read, (keys, found.here, out), deadline)
            if found.away:
                self.run(kernels.read, (keys, found.copies, out), deadline)
        finally:
            self.release()

    def add(self, call: Call, deadline: Deadline | None) -> None:
        """See `KeyedCalls.add`."""
        here = call.work
        assert isinstance(here, Adding)
        if here.keys.size > self._most:
            self._check_number(here.keys)
        work = Adding.of(self._add_copy, here.keys, here.delta, 1)
        call.work, work.here = work, here
        super().add(call, deadline)

    def _check_number(self, keys: Keys) -> None:
        _, there = self._parts(keys)
        if (number := np.unique(keys[there]).size) > self._most:
            raise ValueError(
                f"an add to {number:,} keys that live on other hosts, and this host keeps copies of {self._most:,} "
                "rows: give the table more (cache_rows=), or add to fewer at a time"
            )

    def contains(self, keys: Keys) -> npt.NDArray[np.bool_]:
        """See `KeyedCalls.contains`."""

        def look() -> npt.NDArray[np.bool_]:
            here, there = self._parts(keys)
            found = np.zeros(keys.size, np.bool_)
            found[here] = self.own.contains(keys[here])
            answer = unmarked(keys[there])
            self.asked(self.desk.flags, layout.CONTAINS, keys[there], answer)
            found[there] = answer
            return found

        return self.in_one_view(look)

    @property
    def part(self) -> tuple[int, int]:
        """This host's place among those that rows live on, and how many they are: with backups, without lost ones."""
        hosts = np.unique(self.desk.homes).tolist()
        if self._here not in hosts:
            raise SnapshotError(
                f"{self._session.control.here} was started again in place of a host that was lost, and no rows of the "
                f"{self.own._spec} live on it: the other hosts write them"
            )
        return hosts.index(self._here), len(hosts)

    def prefetch(self, keys: Keys) -> None:
        """Asks for copies of the rows of keys, and does not wait."""
        _, there = self._parts(keys)
        wanted = np.unique(keys[there])
        if wanted.size:
            missing = wanted[self.find(wanted) < 0]
            with turn(self.lock, self._spec):
                if missing.size:
                    self.desk.prefetch(missing)

    def overwrite(self, keys: Keys, rows: Bytes) -> None:
        """See `KeyedCalls.overwrite`."""

        def write() -> None:
            here, there = self._parts(keys)
            self.own.overwrite(keys[here], rows[here])
            self.asked(self.desk.overwrite, keys[there], rows[there])

        self.in_one_view(write)

    def set_word(self, place: int, value: int) -> None:
        """See `KeyedCalls.set_word`."""
        self.own.set_word(place, value)
        self.asked(self.desk.set_word, place, value)

    def listed(self, view: int) -> Iterator[tuple[int, Keys]]:
        """Yields other hosts and some of the keys there, with a row or as candidates, each once.

        Raises:
            WorkerLostError: hosts were lost or have come again since that view.
        """
        self.desk.raise_if_moved(view)
        for host in range(len(self._session.hosts)):
            pattern = -1 if host == self._here else 0
            while pattern >= 0:
                pattern, keys = self.asked(self.desk.list_keys, host, pattern)
                yield host, keys
                self.desk.raise_if_moved(view)

    def evict(self, call: Call, seconds: float | None) -> int:
        """See `KeyedCalls.evict`; of this host, as are the next two."""
        return self.own.evict(call, seconds)

    def evict_excess(self) -> None:
        """See `KeyedCalls.evict_excess`."""
        self.own.evict_excess()

    def excess(self) -> int:
        """See `KeyedCalls.excess`."""
        return self.own.excess()

    def statistics(self) -> dict[str, int]:
        """Returns what this host has of rows that live on others, as `KeyedTable.stats` has it."""
        return copies_status(self.address)

    def close(self, reason: str) -> None:
        """See `KeyedCalls.close`."""
        super().close(reason)
        self.own.close(reason)

    def asked(self, ask: Any, *arguments: Any) -> Any:
        """Returns what the desk answers."""
        with turn(self.lock, self._spec):
            deadline = self._session.start_deadline()
            self.ready(deadline)
            return ask(*arguments, deadline)

    # -- one call, of rows here and of copies ------------------------------------------------------------------

    def has_begun(self, call: Adding | Removing) -> bool:
        """See `KeyedCalls.has_begun`. What only a lost host could finish has not."""
        here = call.here
        begun = here is not None and (here.complete or self.own.is_half_done(here))
        begun = begun or (isinstance(here, Adding) and here.has_begun(0))
        there = call.there if isinstance(call, Removing) else None
        begun = begun or (there is not None and (bool(done(there.removed)) or self.desk.is_asking(there.removed)))
        return begun or super().has_begun(call)

    def _finish_add(self, call: Adding, deadline: Deadline | None) -> None:
        here = call.here
        assert here is not None
        if not self.own.is_half_done(here):
            self.own._clear(deadline)
        while True:
            if call.keys.size and call.rows[0] == NOT_YET and not self.own._spec.keeps_use:
                self._find_all(call, here, deadline)
            self._admit(call, deadline)
            self.own._admit(here, deadline)
            if not ((call.rows == ELSEWHERE) & (here.rows == ELSEWHERE)).any():
                break
            self.release()  # some of them have moved meanwhile
            call.forget()
        self.own.finish(here, deadline)
        super()._finish_add(call, deadline)
        self.desk.say_added()

    def _finish_removal(self, call: Removing, deadline: Deadline | None) -> None:
        while (left := call.removed == NOT_YET).any():
            if call.here is None or call.there is None:
                here = left & self._live_here(call.keys)
                call.here, call.there = (Removing.of(call.keys[some]) for some in (here, left & ~here))
            here, there = (np.isin(call.keys, part.keys) for part in (call.here, call.there))
            try:
                self.desk.flags(layout.REMOVE, call.there.keys, call.there.removed, deadline)
            except MultiversoError:
                if not self.desk.is_asking(call.there.removed):
                    call.there = None  # a home has answered that it cannot
                raise
            try:
                self.own.hold()
                if self._live_here(call.here.keys).all() or call.here.complete:
                    self.own.finish(call.here, deadline)
            finally:
                self.own.release()
            call.removed[here], call.removed[there] = call.here.removed, call.there.removed
            if self.own.is_half_done(call.here):
                self.own.abandon()
            call.here = call.there = None  # what has moved meanwhile is asked for

    def find_either(self, keys: Keys, deadline: Deadline | None) -> Found:
        """Returns the rows of keys, here and copied; they are pinned."""
        n = keys.size
        rows = np.empty(2 * n + 3, np.int64)
        rows[2 * n :] = 0
        self.own.run(kernels.find_either, (self.own.is_here, keys, rows), deadline, self.address)
        away, no_copy, no_row = rows[2 * n :].tolist()
        return Found(rows[:n], rows[n : 2 * n], away, no_copy, no_row)

    def release(self) -> None:
        """See `KeyedCalls.release`; of both."""
        self.own.release()
        super().release()

    def _find_all(self, call: Adding, here: Adding, deadline: Deadline | None) -> None:
        """Finds the rows of an add to keys that all have one on this host, as most do, in one pass."""
        found = self.find_either(call.keys, deadline)
        if found.no_copy or found.no_row:
            self.release()
            return
        self.desk.raise_if_in_trouble()
        here.rows[:], call.rows[:] = found.here, found.copies

    def _admit(self, call: Adding, deadline: Deadline | None) -> None:
        if not done(call.rows) < call.keys.size:
            return
        self.desk.raise_if_in_trouble()
        deadline = deadline or self._session.start_deadline()
        while True:
            there = ~self._live_here(call.keys)
            keys = call.keys[there]
            missing = (rows := self._find(keys, deadline)) < 0
            if not missing.any():
                break
            self.release()  # the node may have to let copies go first
            self.desk.fetch(np.unique(keys[missing]), deadline)
        call.rows[:] = ELSEWHERE
        call.rows[there] = rows


class SpreadPasses:
    """What goes through a whole table, wherever its rows live; has what `KeyedPasses` has.

    Args:
        own: passes over the rows that live here.
        calls: the way to the others.
    """

    def __init__(self, own: KeyedPasses, calls: SpreadCalls) -> None:
        self.own, self._calls = own, calls
        self.check = own.check

    def counts(self) -> tuple[int, int, int]:
        """See `KeyedPasses.counts`; candidates and dead entries are this host's."""

        def count() -> tuple[int, int, int]:
            keys, candidates, dead = self.own.counts()
            return keys + self._calls.asked(self._calls.desk.count), candidates, dead

        return self._calls.in_one_view(count)

    def entries(self, batch: int) -> Iterator[tuple[Keys, Keys, Keys]]:
        """See `KeyedPasses.entries`."""
        view = self._calls.desk.view
        yield from self.own.entries(batch)
        for _, keys in self._calls.listed(view):
            yield keys, np.zeros_like(keys), np.full(keys.size, KEY)

    def rows_since(self, generation: int, size: int) -> Iterator[tuple[Keys, Keys, Bytes]]:
        """See `KeyedPasses.rows_since`; generations are counted by each host for itself: only 0 means something."""
        view = self._calls.desk.view
        yield from self.own.rows_since(generation, size)
        for host, keys in self._calls.listed(view):
            there, rows = self._calls.asked(self._calls.desk.read_whole, host, keys)
            self._calls.desk.raise_if_moved(view)
            yield there, np.zeros_like(there), np.ascontiguousarray(rows[:, :size])

    def note_use(self, keys: Keys, uses: Keys) -> None:
        """Does nothing: rows that are loaded count as used just now."""


def open_spread(
    session: Session, called: str, spec: KeyedSpec, cache_rows: int | None
) -> tuple[KeyedMemory, SpreadCalls, SpreadPasses]:
    """Opens this host's part of a table, and tells the node.

    Args:
        session: the worker's.
        called: what the job calls the table.
        spec: it.
        cache_rows: of how many rows of other hosts this one keeps copies; None: 256 MB of them.

    Raises:
        TableMismatchError: other workers of this host asked for another table.
        NotInThisJobError: what does not work over hosts.
    """
    if spec.updater not in BY_NAME:
        raise NotInThisJobError(
            f"a KeyedTable on several hosts has one of our own updaters ({', '.join(sorted(BY_NAME))}), since nodes "
            f"apply it, too; got {spec.updater!r}"
        )
    copy_spec = replace(
        spec,
        kind="constant",
        scale=0.0,
        seed=0,
        updater="add",
        hyper=(),
        states=(State("unsent"),),
        admission=1,
        eviction=None,
    )
    most = cache_rows or max(1024, _COPIES_BYTES // copy_spec.row_bytes)
    memory = KeyedMemory.of(session, called, spec, on_this_host=True)
    copy_memory = KeyedMemory.of(session, COPIES + called, copy_spec, on_this_host=True)
    kept = KeyedMemory.of(session, KEPT + called, spec, on_this_host=True) if spec.copies > 1 else None
    desks = session.shared_memory(
        f"{memory_name(called)}-desks", layout.BYTES, sparse=True, once=spec.name is None, on_this_host=True
    )
    bell = session.shared_memory(layout.BELL, layout.BELL_WORDS.size, on_this_host=True)
    whole = sum(spec.widths()) * np.dtype(spec.dtype).itemsize
    if 8 + whole > layout.ROOM:
        raise ValueError(f"a row of a KeyedTable on several hosts has at most {layout.ROOM:,} bytes, with its state")
    there = Spread(
        called=called,
        spec=spec.as_message(),
        rows=memory.memory.number,
        copies=copy_memory.memory.number,
        desks=desks.number,
        bell=bell.number,
        most_copies=most,
        seconds=_COPY_SECONDS,
        kept=None if kept is None else kept.memory.number,
    )
    session.node.ask(there, f"this host's node to open the {spec}")
    desk = Desk(session, desks, bell, str(spec), whole)
    own = KeyedCalls(session, memory, spec, desk.here)
    calls = SpreadCalls(session, copy_memory, copy_spec, own, desk, most)
    return memory, calls, SpreadPasses(KeyedPasses(session, memory, own), calls)
