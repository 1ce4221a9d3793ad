"""A keyed table's rows as the node reads and changes them: under the same words as the workers, as one more of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from multiverso.errors import ClosedError, MultiversoError, OutOfMemoryError
from multiverso.kernels import waits
from multiverso.kernels.codes import DONE, FULL, TIMED_OUT
from multiverso.kernels.keyed import calls, passes, removal
from multiverso.layout import keyed as layout
from multiverso.layout import words
from multiverso.layout.keyed import at
from multiverso.memory.heap import Budget
from multiverso.memory.segment import Segment
from multiverso.memory.words import load32, load64, store64

Keys = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]
_LISTED_AT_ONCE = 8 * layout.BUCKETS * layout.ENTRIES


class KeyedRows:
    """One thread at a time may call.

    Args:
        segment: all of the table's memory.
        control: address of the job's control segment.
        closing: whether a wait for a stopped worker is to end.

    Attributes:
        size: bytes of a row's values.
        whole: of its values and the updater's state.
    """

    def __init__(self, segment: Segment, control: int, closing: Callable[[], bool]) -> None:
        self._segment, self.base, self._control, self._closing = segment, segment.address, control, closing
        self._me = load32(control + words.NODE_BLOCK)
        columns, itemsize = load64(self.base + at.COLUMNS), load64(self.base + at.ITEMSIZE)
        states, row_states = load64(self.base + at.STATES), load64(self.base + at.ROW_STATES)
        self.size = columns * itemsize
        self.whole = (columns * (1 + states) + row_states) * itemsize
        self._line = self.base + layout.LINES + layout.LINE_BYTES * self._me
        self._held = 0  # what is pinned beyond a call
        self._budget = Budget()
        store64(self._line + at.ATTACHMENT, load64(control + words.worker_block(self._me) + words.ATTACHMENT))

    # -- rows ------------------------------------------------------------------------------------------------

    def find(self, keys: Keys) -> Keys:
        """Returns the rows of keys, -1 for those that have none; they are pinned until the next call that ends so."""
        rows = np.empty(keys.size, np.int64)
        self._run(calls.find, keys, rows)
        return rows

    def has(self, keys: Keys) -> npt.NDArray[np.bool_]:
        """Returns which keys have a row."""
        rows = self.find(keys)
        self.release()
        return rows >= 0

    def enter(self, keys: Keys, after: int = 1) -> Keys:
        """As `find`, but a key without a row gets one, or counts towards it, where it takes ``after`` adds.

        Raises:
            OutOfMemoryError: there is no memory for as many rows, and none was entered; or no room in the table, and
                the keys before have theirs.
        """
        if not self.has_room(keys.size):
            raise OutOfMemoryError("there is no memory for more rows")
        rows = np.full(keys.size, -1)
        self._run(calls.admit, 0, keys, rows, np.array([0, 0, after]))
        return rows

    def has_room(self, rows: int) -> bool:
        """Whether the machine has memory for so many more rows."""
        return self._budget.shortage(rows * load64(self.base + at.ROW_BYTES)) is None

    def enter_copies(self, keys: Keys, values: Bytes) -> Keys:
        """As `enter`, with values that a new row has before anybody can find it."""
        rows = np.full(keys.size, -1)
        self._run(calls.admit_copies, keys, rows, values.ctypes.data, np.array([0, 0, 1]))
        return rows

    def apply(self, loop: int, rows: Keys, delta: npt.NDArray[Any]) -> None:
        """Gives each row that there is its ``delta``, by the loop at an address; ends what pins them."""
        self._run(calls.add, rows, delta.ctypes.data, before=(loop,))
        self._unpinned()

    def values(self, keys: Keys) -> Bytes:
        """Returns the values of keys: (n, `size`); of those without a row their initial ones."""
        out = np.empty((keys.size, self.size), np.uint8)
        self._run(calls.read, keys, self.find(keys), out.ctypes.data)
        self._unpinned()
        return out

    def apply_to_copies(self, loop: int, rows: Keys, delta: npt.NDArray[Any]) -> None:
        """As `apply`, to copies of rows that other hosts have, which do not count as changed."""
        self._run(calls.apply_to_copies, rows, delta.ctypes.data, before=(loop,))
        self._unpinned()

    def overwrite(self, keys: Keys, rows: Bytes) -> None:
        """Gives each key these bytes, values and state; nobody else may use the table meanwhile."""
        places = self.enter(keys)
        all_rows = self._array(at.ROWS, load64(self.base + at.NEXT_ROW) >> 16, load64(self.base + at.ROW_BYTES))
        all_rows[places, : rows.shape[1]] = rows
        self.stamps()[places] = load64(self.base + at.GENERATION)
        self.release()

    def remove(self, keys: Keys) -> Keys:
        """Removes keys; returns 1 for each that had a row, else 0."""
        removed = np.zeros(keys.size, np.int64)
        self._run(removal.remove, keys, removed)
        return removed

    def release(self) -> None:
        """Ends what pins rows."""
        calls.release.compiled()(self.base, self._me)
        self._unpinned()

    def word(self, place: int) -> int:
        """Returns a word of the table's header."""
        return load64(self.base + place)

    def set_word(self, place: int, value: int) -> None:
        """Sets a word of the table's header that holds on all hosts."""
        if place not in layout.EVERYWHERE:
            raise MultiversoError(f"a host sets no word {place} of another host's table")
        store64(self.base + place, value)

    # -- pins beyond a call ----------------------------------------------------------------------------------

    def hold(self) -> None:
        """From here on no row of a removed key is another key's, until `let_go`."""
        calls.hold.compiled()(self.base, self._me)
        self._held = load64(self._line + at.PIN)

    def let_go(self) -> None:
        """Ends that."""
        self._held = 0
        self.release()

    def _unpinned(self) -> None:
        """A call has ended what it had pinned; no key has been entered since, so what is held is as it was."""
        if self._held:
            store64(self._line + at.PIN, self._held)

    @property
    def epoch(self) -> int:
        """Counts up after keys were removed."""
        return load64(self.base + at.EPOCH)

    def are_through(self, epoch: int) -> bool:
        """Whether every call of a worker that began before an epoch has ended."""
        return bool(removal.are_through.compiled()(self._control, self.base, self._me, epoch))

    # -- all of them -----------------------------------------------------------------------------------------

    def count(self) -> int:
        """Returns how many keys have a row."""
        totals = np.zeros(3, np.int64)
        self._run(passes.counts, totals)
        return int(totals[0])

    def added(self) -> int:
        """Returns how many rows all workers of this host have added to, as they count them."""
        lines = self._array_at(layout.LINES, layout.OWNERS, layout.LINE_BYTES).view(np.int64)
        return int(lines[: self._me, at.ROWS_ADDED // 8].sum())

    def next_generation(self) -> int:
        """Returns the generation that ends here: what is stamped with it, or an earlier one, has been done."""
        generation = passes.next_generation.compiled()(self.base)
        self._run(passes.pass_through)
        return generation

    def stamps(self) -> npt.NDArray[np.int32]:
        """Returns the generation in which each row was last changed."""
        return self._array(at.STAMPS, load64(self.base + at.NEXT_ROW) >> 16, 4).view(np.int32).reshape(-1)

    def list_keys(self, pattern: int) -> tuple[int, Keys]:
        """Returns some keys, with a row or as candidates for one, and where to continue, -1: these were all.

        Args:
            pattern: of hashes: where to begin.
        """
        after, keys, _, kinds = self._entries(pattern)
        return after, keys[kinds != passes.GONE]

    def list_changed(self, pattern: int, since: int) -> tuple[int, Keys, npt.NDArray[np.bool_]]:
        """As `list_keys`, of keys with a row, and whether that was changed after a generation."""
        after, keys, values, kinds = self._entries(pattern)
        with_row = kinds == passes.KEY
        return after, keys[with_row], self.stamps()[values[with_row] & layout.NO_ROW] > since

    def _entries(self, pattern: int) -> tuple[int, Keys, Keys, Keys]:
        found = np.array([pattern, 0])
        parts = tuple(np.empty(_LISTED_AT_ONCE, np.int64) for _ in range(3))
        self._run_one(lambda: passes.entries.compiled()(self._control, self.base, self._me, found, *parts))
        keys, values, kinds = (part[: found[1]] for part in parts)
        return int(found[0]), keys, values, kinds

    @property
    def removed(self) -> int:
        """Returns how many keys have been removed; it may still be about to be said which the last ones are."""
        return load64(self.base + at.REMOVED)

    def removals(self, since: int, until: int) -> Keys:
        """Returns the keys that were removed from one number to another, the last ones of very many."""
        size = load64(self.base + at.RING)
        ring = self._array(at.REMOVALS, size, 8).view(np.int64).reshape(-1)
        return ring[np.arange(max(since, until - size), until) % size]

    def read_whole(self, keys: Keys) -> tuple[Keys, Bytes]:
        """Returns those of the keys that have a row, and their rows with the updater's state."""
        rows = self.find(keys)
        there = rows >= 0
        out = np.empty((int(there.sum()), self.whole), np.uint8)
        self._run(calls.read_whole, rows[there], out.ctypes.data, self.whole)
        self.release()
        return keys[there], out

    # -- inside ----------------------------------------------------------------------------------------------

    def _array(self, begins: int, count: int, each: int) -> Bytes:
        return self._array_at(load64(self.base + begins), count, each)

    def _array_at(self, offset: int, count: int, each: int) -> Bytes:
        array: Bytes = self._segment.array(offset, count * each, np.uint8).reshape(count, each)
        return array

    def _run(self, kernel: Any, *arguments: Any, before: tuple[int, ...] = ()) -> None:
        compiled, progress = kernel.compiled(), [0]

        def go() -> int:
            code: int = compiled(self._control, self.base, *before, self._me, *arguments, progress[0])
            progress[0] = code >> 16
            return code & 0xFFFF

        self._run_one(go)

    def _run_one(self, go: Callable[[], int]) -> None:
        code = go()
        if code == TIMED_OUT:
            try:
                while code == TIMED_OUT:  # a worker that is stopped is waited for, as workers do
                    if self._closing():
                        raise ClosedError("this host's node is closing")
                    code = go()
            finally:
                waits.finish_wait.compiled()(self._control, self._me)
        if code == FULL:
            raise OutOfMemoryError("there is no row for another key")
        if code != DONE:
            raise MultiversoError(f"a word of a keyed table is broken ({code})")
