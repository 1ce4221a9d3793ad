"""A keyed table's memory: made by its first worker, attached to by all, and ready for the keys that come next.

It is there once it is used, and a page at a time: a fault for each 4 KiB, in the middle of an insert, and later a walk
through the page tables for most keys. So a worker that adds gets the next 2 MiB of rows in huge pages, and the place of
the segments that the next splits will need, ahead of its kernel and while it holds no word.
"""

from __future__ import annotations

import ctypes
import os
import time
from typing import Any

import numpy as np
import numpy.typing as npt

from multiverso.errors import TableMismatchError
from multiverso.layout import keyed as layout
from multiverso.layout.keyed import at
from multiverso.layout.words import ATTACHMENT, HUGE_PAGE
from multiverso.memory import huge_pages
from multiverso.memory.heap import free_memory
from multiverso.memory.segment import SharedMemory
from multiverso.memory.words import load64, store64
from multiverso.runtime.session.session import Session
from multiverso.spec.table import DTYPES
from multiverso.tables.keyed.spec import KINDS, Eviction, KeyedSpec

_INDEX_BYTES = 40  # of a key, beside its row: at most, with segments just split
_COUNTS = (
    "ADDS",
    "GETS",
    "ROWS_ADDED",
    "ROWS_READ",
    "KEYS_REMOVED",
    "KEYS_EVICTED",
    "SPLITS",
    "WAITS",
    "TAKEN_OVER",
    "PUT_BACK",
)


class KeyedMemory:
    """The memory itself. Owner: the table of its session that was made first.

    Attributes:
        bytes_a_key: memory that another key takes; every add asks.
    """

    def __init__(self, memory: SharedMemory, spec: KeyedSpec) -> None:
        self.address = memory.address
        self.memory = memory
        self._spec = spec
        self.bytes_a_key = spec.row_bytes + _INDEX_BYTES + spec.log_bytes

    @classmethod
    def of(cls, session: Session, called: str, spec: KeyedSpec, *, on_this_host: bool = False) -> KeyedMemory:
        """Makes the memory, or attaches to what another worker has made, and begins this worker's attachment to it.

        ``on_this_host``: each host of the job makes its own.

        Raises:
            TableMismatchError: what is there is another table.
        """
        places = layout.places(spec.row_bytes, min(physical_memory() // (spec.row_bytes + 16), 2**32 - 2))

        def initialise(memory: SharedMemory) -> None:
            write_empty(memory.address, spec, places)

        by_order = spec.name is None
        found = session.shared_memory(
            memory_name(called), places["size"], initialise, sparse=True, once=by_order, on_this_host=on_this_host
        )
        memory = cls(found, spec)
        memory.check_equal(spec)
        line = memory._line(session.index)
        block = session.control.block(session.worker_id)
        store64(line + at.ATTACHMENT, load64(block + ATTACHMENT))
        return memory

    def check_equal(self, spec: KeyedSpec) -> None:
        """Raises TableMismatchError unless the memory is of such a table."""
        made, asked = self.array(0, layout.LINES), np.zeros(layout.LINES, np.uint8)
        places = layout.places(self.word("ROW_BYTES"), self.word("CAPACITY"))
        _write_header(asked.ctypes.data, spec, places)
        if not np.array_equal(made[: at.HYPER], asked[: at.HYPER]):
            raise TableMismatchError(
                f"another worker has made a keyed table here with other arguments than the {spec}: dim, dtype, "
                "initial, seed, updater, admission and eviction must be equal in all workers"
            )

    def word(self, name: str) -> int:
        """Returns a 64-bit word of the header, by its name in the layout."""
        return load64(self.address + getattr(at, name))

    def set_word(self, name: str, value: int) -> None:
        """Sets a word of the header that has no other writer."""
        store64(self.address + getattr(at, name), value)

    def position(self, worker: int) -> ctypes.c_int64:
        """The word of a worker's undo slot that says how many rows of its add are done, as it is."""
        return ctypes.c_int64.from_address(self.undo_slot(worker) + at.UNDO_POSITION)

    # -- counting --------------------------------------------------------------------------------------------

    def rows_handed_out(self) -> int:
        """Rows that belong to an entry of the index."""
        last = self.word("NEXT_ROW")
        return (last >> 16) - sum(self._claims(worker, last) for worker in range(layout.OWNERS))

    def _claims(self, worker: int, last: int) -> int:
        """How many rows a worker has in hand that are not a key's yet."""
        claim = load64(self.undo_slot(worker) + at.CLAIM)
        number = (claim >> layout.MORE_SHIFT) + 1
        if claim & 3 == layout.CLAIMING:  # it may have died in the middle
            end = ((claim >> 2) & layout.NO_ROW) + number
            return number if last == (end << 16) | (worker + 1) else 0
        return number if claim & 3 == layout.CLAIMED else 0

    def _line(self, worker: int) -> int:
        return self.address + layout.LINES + layout.LINE_BYTES * worker

    def undo_slot(self, worker: int) -> int:
        """Returns the address of a worker's undo slot."""
        return self.address + self.word("UNDO_SLOTS") + self.word("UNDO_BYTES") * worker

    def _segment_words(self) -> npt.NDArray[np.int64]:
        """The words of all segments that there are, by number."""
        return self.array(self.word("SEGMENT_WORDS"), 8 << self.word("HINT")).view(np.int64)

    def held(self) -> int:
        """Words that a worker holds, or held when it was killed."""
        blocks = ((self.word("NEXT_ROW") >> 16) >> self.word("SHIFT")) + 1
        rows = self.array(self.word("ROW_WORDS"), 8 * blocks).view(np.int64)
        return sum(int(np.count_nonzero(words & layout.OWNER)) for words in (rows, self._segment_words()))

    def adds(self) -> int:
        """Returns how many calls of all workers have added."""
        return sum(load64(self._line(worker) + at.ADDS) for worker in range(layout.OWNERS))

    def statistics(self) -> dict[str, Any]:
        """Returns what memory the table takes, and what its workers have done."""
        segments = int(np.count_nonzero(self._segment_words()))
        used = (self.word("NEXT_ROW") >> 16) * self._spec.row_bytes + segments * layout.SEGMENT_BYTES
        lines = [self._line(worker) for worker in range(layout.OWNERS)]
        counts = {name.lower(): sum(load64(line + getattr(at, name)) for line in lines) for name in _COUNTS}
        return {"bytes": used, "segments": segments, **counts}

    # -- parts of it -----------------------------------------------------------------------------------------

    def stamps(self) -> npt.NDArray[np.int32]:
        """Returns the generation in which each row was last changed."""
        return self.array(self.word("STAMPS"), 4 * (self.word("NEXT_ROW") >> 16)).view(np.int32)

    def removals(self, since: int, until: int) -> npt.NDArray[np.int64]:
        """Returns keys out of the ring of those that were removed, by their numbers."""
        size = self.word("RING")
        ring = self.array(self.word("REMOVALS"), 8 * size).view(np.int64)
        return ring[np.arange(since, until) % size]

    def rows(self) -> npt.NDArray[np.uint8]:
        """Returns all rows, (rows, bytes of a row), for a caller that knows that nobody else uses them."""
        number = self.word("NEXT_ROW") >> 16
        size = self._spec.row_bytes
        return self.array(self.word("ROWS"), number * size).reshape(number, size)

    def hyper(self) -> npt.NDArray[Any]:
        """Returns the updater's hyperparameters, as all workers use them."""
        return self.array(at.HYPER, 8 * layout.MOST_HYPER).view(self._spec.dtype)[: len(self._spec.hyper)]

    def array(self, offset: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """Returns a part of the memory itself."""
        return self.memory.array[offset : offset + nbytes]


def physical_memory() -> int:
    """Returns how many bytes of memory the machine has."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def memory_name(called: str) -> str:
    """Returns under which name a job's shared memory has the keyed table that is called so."""
    return layout.KEYED_MEMORY + called


def _write_header(address: int, spec: KeyedSpec, places: dict[str, int]) -> None:
    """Writes what never changes, and the hyperparameters."""
    eviction = spec.eviction or Eviction(most_keys=1)
    some = spec.eviction is not None
    words = {
        "MAGIC": layout.MAGIC,
        "COLUMNS": spec.dim,
        "DTYPE": DTYPES.index(spec.dtype),
        "ITEMSIZE": np.dtype(spec.dtype).itemsize,
        "STATES": sum(state.per == "element" for state in spec.states),
        "ROW_STATES": sum(state.per == "row" for state in spec.states),
        "SEED": spec.seed,
        "KIND": KINDS.index(spec.kind),
        "ADMIT_AFTER": spec.admission,
        "KEEPS_USE": int(spec.keeps_use),
        "IDLE_TICKS": some * (eviction.idle_ticks or 0),
        "MOST_KEYS": some * (eviction.most_keys or 0),
        "BY_FREQUENCY": some * (eviction.by == "frequency"),
        "SCALE": _bits(spec.scale),
        "LEAST_NORM": _bits(some * (eviction.least_norm or 0.0)),
        **{name: place for name, place in places.items() if name != "size"},
    }
    for name, value in words.items():
        store64(address + getattr(at, name), int(value))
    for place, state in enumerate(spec.states):
        store64(address + at.STATE_INITIAL + 8 * place, _bits(state.initial))
    hyper = np.zeros(8 * layout.MOST_HYPER, np.uint8)
    packed = np.asarray(spec.hyper, spec.dtype).view(np.uint8)
    hyper[: packed.size] = packed
    for place, word in enumerate(hyper.view(np.int64)):
        store64(address + at.HYPER_AT_FIRST + 8 * place, int(word))
        store64(address + at.HYPER + 8 * place, int(word))


def write_empty(address: int, spec: KeyedSpec, places: dict[str, int]) -> None:
    """Makes a table without keys of fresh memory."""
    _write_header(address, spec, places)
    store64(address + places["SEGMENT_WORDS"], layout.SEGMENT_VERSION | layout.DEPTH_BIT)
    store64(address + at.GENERATION, 1)
    store64(address + at.IDENTITY, int.from_bytes(os.urandom(7), "little"))


def _bits(value: float) -> int:
    return int(np.float64(value).view(np.int64))


_SMALL = 2 * HUGE_PAGE  # of rows: below it a table may as well have small pages
_AT_ONCE = 8  # huge pages of the index for each one of rows, at most,
_INDEX_SECONDS = 0.002  # and for so long: the worker's other threads wait meanwhile
_SLOW_SECONDS = 0.005  # a huge page that took so long: the system is busy, or has none
_MOST_SKIPPED = 64


class Growth:
    """Gets a table's memory ready for this worker. Owner: its ``KeyedCalls``, under its lock."""

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
