"""Goes through a whole keyed table, a segment at a time, while others add and remove: counts, entries, checks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from multiverso.kernels.keyed import calls as kernels
from multiverso.kernels.keyed import passes as passes
from multiverso.layout import keyed as layout
from multiverso.runtime.session.session import Session
from multiverso.tables.convert import Array
from multiverso.tables.keyed.calls import KeyedCalls
from multiverso.tables.keyed.keys import Keys
from multiverso.tables.keyed.memory import KeyedMemory

_MOST_AT_ONCE = 1 << 16
_SEGMENT_ENTRIES = layout.BUCKETS * layout.ENTRIES


class KeyedPasses:
    """Passes over a whole table. Owner: the table.

    Args:
        session: the worker's.
        memory: the table's.
        calls: through which it goes, one kernel at a time.
    """

    def __init__(self, session: Session, memory: KeyedMemory, calls: KeyedCalls) -> None:
        self._session, self._memory, self._calls = session, memory, calls

    def counts(self) -> tuple[int, int, int]:
        """Returns how many keys have a row, how many are candidates for one, and how many entries are dead."""
        totals = np.zeros(3, np.int64)
        self._calls.alone(self._calls.run, passes.counts, (totals,), None)
        return int(totals[0]), int(totals[1]), int(totals[2])

    def entries(self, batch: int) -> Iterator[tuple[Keys, Keys, Keys]]:
        """Yields keys, what stands beside them, and their kinds, each key once while others add and remove."""
        found = np.zeros(2, np.int64)
        while found[0] >= 0:
            found[1] = 0
            parts = tuple(np.empty(batch + _SEGMENT_ENTRIES, np.int64) for _ in range(3))
            self._calls.alone(self._fill, found, parts)
            yield tuple(part[: found[1]] for part in parts)  # type: ignore[misc]

    def rows_since(self, generation: int, size: int) -> Iterator[tuple[Keys, Keys, npt.NDArray[np.uint8]]]:
        """Yields keys whose rows were changed after a generation, what stands beside them, and their rows' bytes."""
        found = np.zeros(2, np.int64)
        while found[0] >= 0:
            yield self._calls.alone(self._next_rows, found, generation, size)

    def _next_rows(self, found: Keys, generation: int, size: int) -> tuple[Keys, Keys, npt.NDArray[np.uint8]]:
        found[1] = 0
        parts = tuple(np.empty(16 * _SEGMENT_ENTRIES, np.int64) for _ in range(3))
        kernels.hold.compiled()(self._memory.address, self._session.index)
        self._fill(found, parts)
        keys, values, kinds = (part[: found[1]] for part in parts)
        places = values & layout.NO_ROW
        wanted = kinds == passes.KEY
        wanted[wanted] = self._memory.stamps()[places[wanted]] > generation
        return keys[wanted], values[wanted], self._calls.bytes_of(places[wanted], size)

    def check(self) -> dict[str, int]:
        """Looks at every entry; see ``KeyedTable.check``."""
        keys, values, kinds = (np.concatenate(part) for part in zip(*self.entries(_MOST_AT_ONCE), strict=True))
        rows, live = values & layout.NO_ROW, kinds == passes.KEY
        entered = keys[kinds != passes.GONE]
        with_row = rows[rows != layout.NO_ROW]
        counted = [int((kinds == kind).sum()) for kind in (passes.KEY, passes.WAITING, passes.GONE)]
        return {
            "keys": counted[0],
            "twins": int(entered.size - np.unique(entered).size),
            "misplaced": int((self._calls.find(keys[live]) != rows[live]).sum()),
            "shared": int(with_row.size - np.unique(with_row).size),
            "lost": int(self._memory.rows_handed_out() - np.unique(with_row).size),
            "miscounted": sum(abs(a - b) for a, b in zip(self.counts(), counted, strict=True)),
            "held": self._memory.held(),
        }

    def begin_snapshot(self) -> tuple[int, int]:
        """Returns the number of the generation that ends here, and of the next key to be removed.

        What is stamped with that generation or an earlier one has been done.
        """
        return self._calls.alone(self._begin_snapshot)

    def _begin_snapshot(self) -> tuple[int, int]:
        generation: int = passes.next_generation.compiled()(self._memory.address)
        removed = self._memory.word("REMOVED")
        self._calls.run(passes.pass_through, (), None)
        return generation, removed

    def note_use(self, keys: Keys, uses: Keys) -> None:
        """Writes when and how often keys were used."""
        self._calls.alone(self._calls.run, passes.note_use, (keys, uses), None)

    def _fill(self, found: Keys, parts: tuple[Array, ...]) -> None:
        arguments = (self._session.control.address, self._memory.address, self._session.index)
        call: Callable[..., int] = passes.entries.compiled()
        code = call(*arguments, found, *parts)
        if code:
            again = lambda: call(*arguments, found, *parts)  # noqa: E731
            self._session.resume(code, again, None, self._calls.what)
