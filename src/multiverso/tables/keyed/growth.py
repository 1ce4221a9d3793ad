"""Memory for the keys that come next, in huge pages before any worker writes to it.

A keyed table's memory is there once it is used, and a page at a time: a fault for each 4 KiB, in the middle of an
insert, and later a walk through the page tables for most keys. So a worker that adds gets the next 2 MiB of rows, and
the place of the segments that the next splits will need, ahead of its kernel and while it holds no word.
"""

from __future__ import annotations

import time

from multiverso.layout import keyed as layout
from multiverso.layout.words import HUGE_PAGE
from multiverso.memory import huge_pages
from multiverso.memory.heap import free_memory
from multiverso.tables.keyed.memory import KeyedMemory

_SMALL = 2 * HUGE_PAGE  # of rows: below it a table may as well have small pages
_AT_ONCE = 8  # huge pages of the index for each one of rows, at most,
_INDEX_SECONDS = 0.002  # and for so long: the worker's other threads wait meanwhile
_SLOW_SECONDS = 0.005  # a huge page that took so long: the system is busy, or has none
_MOST_SKIPPED = 64


class Growth:
    """What this worker has got ready of a table. Owner: its ``KeyedCalls``, under its lock."""

    def __init__(self, memory: KeyedMemory, row_bytes: int) -> None:
        self._memory, self._row_bytes = memory, row_bytes
        self._keys_left = 0  # that may come before there is something to do
        self._rows_ready = 0  # bytes of rows
        self._depth = memory.word("HINT")  # of the segments that there is a place for
        self._index_left = range(0)  # offsets of huge pages
        self._skipped = self._skip = 0
        self._wanted = huge_pages.wanted()

    @property
    def most_at_once(self) -> int:
        """For how many keys at a time memory is got ready: a huge page of rows, so that no call does more at once."""
        return max(HUGE_PAGE // self._row_bytes, 1)

    def prepare(self, keys: int) -> None:
        """Before so many keys are entered, `most_at_once` at most."""
        self._keys_left -= keys
        if self._keys_left < 0:
            self._look(keys)

    def _look(self, keys: int) -> None:
        memory, row_bytes = self._memory, self._row_bytes
        used = (memory.word("NEXT_ROW") >> 16) * row_bytes
        if not self._wanted or used < _SMALL:
            self._keys_left = HUGE_PAGE // row_bytes
            return
        ready = max(self._rows_ready, -(-used // HUGE_PAGE) * HUGE_PAGE)
        while ready < used + keys * row_bytes:
            place = memory.word("ROWS") + ready
            if not self._make_huge(place):
                huge_pages.populate(memory.address + place)
            ready += HUGE_PAGE
        self._rows_ready = ready
        self._keys_left = (ready - used) // row_bytes - keys
        self._look_at_index()

    def _look_at_index(self) -> None:
        depth = self._memory.word("HINT")
        if depth > self._depth:
            self._depth, half = depth, layout.SEGMENT_BYTES << (depth - 1)
            start = self._memory.word("SEGMENTS") + half
            enough = HUGE_PAGE <= half < free_memory() // 8
            self._index_left = range(start, start + half if enough else start, HUGE_PAGE)
        end = time.monotonic() + _INDEX_SECONDS
        for offset in self._index_left[:_AT_ONCE]:
            self._make_huge(offset)
            self._index_left = self._index_left[1:]
            if time.monotonic() >= end:
                break

    def _make_huge(self, offset: int) -> bool:
        if self._skipped < self._skip:
            self._skipped += 1
            return False
        began = time.monotonic()
        made = huge_pages.make_huge(self._memory.address + offset)
        slow = not made or time.monotonic() - began > _SLOW_SECONDS
        self._skipped, self._skip = 0, min(2 * self._skip + 1, _MOST_SKIPPED) if slow else 0
        return made
