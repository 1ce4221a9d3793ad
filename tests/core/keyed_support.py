"""A keyed table's kernels, uncompiled, on memory of this process, with workers that die at any store."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np

from multiverso.compiling import atomics
from multiverso.compiling.declared import rebound
from multiverso.kernels.keyed import passes as keyed_passes  # rebound asks for what is imported
from multiverso.kernels.keyed import removal as keyed_removal  # rebound asks for what is imported
from multiverso.kernels.keyed import rounds as keyed_rounds  # rebound asks for what is imported
from multiverso.layout import keyed
from multiverso.layout import words as layout
from multiverso.layout.keyed import at
from multiverso.layout.words import CACHE_LINE, PAGE, round_up
from multiverso.memory.words import load64, store64
from multiverso.spec.states import states_of
from multiverso.updaters import Updater

WRITES = (
    *("store_release64", "store_int32", "compare_swap64", "add64", "move", "call_update"),
    *("store_float64", "store_int64"),
)


assert keyed_passes
assert keyed_removal
assert keyed_rounds


class Died(BaseException):
    """A worker's end, at one of its writes."""


class Bench:
    """A keyed table of float64 or int64 rows and its workers, all in this thread.

    Args:
        dim: numbers in a row.
        capacity: rows.
        updater: how adds reach a row; plain addition by default.
        integer: whether the rows are int64.
        broken: functions of the kernels' modules, by name, in whose places others stand.
        header: words of the header: ADMIT_AFTER, MOST_KEYS and the like.
    """

    def __init__(
        self,
        dim: int = 3,
        capacity: int = 4000,
        updater: Updater | None = None,
        integer: bool = True,
        broken: dict[str, Callable[..., Any]] | None = None,
        **header: int,
    ) -> None:
        self.dim, self.dtype = dim, np.dtype("int64" if integer else "float64")
        self.states = len(states_of(updater.states)) if updater else 0
        self.writes_left = -1  # until the worker that is at work dies; -1: never
        self.writes = 0
        self._updater = updater
        self.broken = broken or {}
        # in rounds the last one stands behind the state
        row_bytes = round_up(8 * dim * (1 + self.states) + 8, CACHE_LINE)
        self.places = keyed.places(row_bytes, capacity)
        self._raw = np.zeros(self.places["size"] + PAGE, np.uint8)
        start = -self._raw.ctypes.data % PAGE
        self.memory = self._raw[start : start + self.places["size"]]
        self.base = self.memory.ctypes.data
        self._control = np.zeros(layout.control_bytes(4), np.uint8)
        self.control = self._control.ctypes.data
        for name in (n for n in at._fields if n in self.places):
            store64(self.base + getattr(at, name), self.places[name])
        store64(self.base + at.COLUMNS, dim)
        store64(self.base + at.DTYPE, keyed.INT64 if integer else keyed.FLOAT64)
        store64(self.base + at.ITEMSIZE, 8)
        store64(self.base + at.STATES, self.states)
        store64(self.base + at.GENERATION, 2)
        self.after = header.get("ADMIT_AFTER", 1)
        for name, value in header.items():
            store64(self.base + getattr(at, name), value)
        store64(self.base + self.places["SEGMENT_WORDS"], keyed.SEGMENT_VERSION | keyed.DEPTH_BIT)
        self.kernels = _uncompiled(self)

    def begin(self, worker: int) -> None:
        """A new life of a worker's number."""
        line = self.base + keyed.LINES + keyed.LINE_BYTES * worker
        store64(line + at.ATTACHMENT, self.admit(worker))
        assert self.kernels["enter"](self.control, self.base, worker) == 0

    def admit(self, worker: int) -> int:
        """The node gives a worker's number to a new life, whose number is returned; it may never come to the table."""
        life = self._life(worker) % 255 + 1
        self._say(worker, layout.ALIVE, life)
        return life

    def set_alive(self, worker: int, alive: bool) -> None:
        """What the node says of the life that came to the table last."""
        self._say(worker, layout.ALIVE if alive else layout.LOST, self._life(worker))

    def _life(self, worker: int) -> int:
        return load64(self.base + keyed.LINES + keyed.LINE_BYTES * worker + at.ATTACHMENT)

    def _say(self, worker: int, liveness: int, life: int) -> None:
        block = self.control + layout.worker_block(worker)
        store64(block + layout.ATTACHMENT, life)
        ctypes.c_int32.from_address(block + layout.LIVENESS).value = liveness

    def add(self, worker: int, keys: Any, delta: Any) -> None:
        keys = self.array(keys)
        rows = np.empty(keys.size, np.int64)
        data = np.ascontiguousarray(np.broadcast_to(delta, (keys.size, self.dim)), self.dtype)
        call = np.array([0, 0, self.after])
        assert self.kernels["admit"](self.control, self.base, worker, 0, keys, rows, call, 0) == 0
        assert self.kernels["add"](self.control, self.base, 1, worker, rows, data.ctypes.data, 0) == 0

    def find(self, worker: int, keys: Any) -> Any:
        keys = self.array(keys)
        rows = np.empty(keys.size, np.int64)
        assert self.kernels["find"](self.control, self.base, worker, keys, rows, 0) == 0
        self.kernels["release"](self.base, worker)
        return rows

    @staticmethod
    def array(numbers: Any) -> Any:
        return np.array(numbers, np.int64)

    def remove(self, worker: int, keys: Any) -> Any:
        keys = self.array(keys)
        removed = np.zeros(keys.size, np.int64)
        assert self.kernels["remove"](self.control, self.base, worker, keys, removed, 0) == 0
        return removed

    def evict(self, worker: int) -> int:
        seen = np.zeros(2, np.int64)
        assert self.kernels["evict"](self.control, self.base, worker, seen, 2**62) == 0
        return int(seen[1])

    def get(self, worker: int, keys: Any) -> Any:
        keys = self.array(keys)
        rows, out = np.empty(keys.size, np.int64), np.empty((keys.size, self.dim), self.dtype)
        assert self.kernels["find"](self.control, self.base, worker, keys, rows, 0) == 0
        assert self.kernels["read"](self.control, self.base, worker, keys, rows, out.ctypes.data, 0) == 0
        return out

    def dies_after(self, writes: int, function: Callable[[], object]) -> bool:
        """Runs a worker's work until its given write, which does not happen; returns whether it came so far."""
        self.writes_left = writes
        try:
            function()
        except Died:
            return True
        finally:
            self.writes_left = -1
        return False

    def write(self) -> None:
        """Before each write to shared memory."""
        self.writes += 1
        if self.writes_left == 0:
            raise Died
        self.writes_left -= 1

    def entries(self) -> list[tuple[int, int, int]]:
        """All (key, value, tag) that stand in segments: twins and dead ones, too."""
        words = self.memory[self.places["SEGMENT_WORDS"] :][: 8 << self.places["MOST_DEPTH"]].view(np.int64)
        found: list[tuple[int, int, int]] = []
        for number in np.flatnonzero(words):
            start = self.places["SEGMENTS"] + keyed.SEGMENT_BYTES * int(number)
            buckets = self.memory[start : start + keyed.SEGMENT_BYTES].reshape(-1, keyed.BUCKET_BYTES)
            tags = buckets[:, : keyed.ENTRIES]
            used = (tags & 0x80) != 0
            words_of = buckets.view(np.int64)
            parts = (words_of[:, 2::2][used], words_of[:, 3::2][used], tags[used])
            found += zip(*(part.tolist() for part in parts), strict=True)
        return found

    def keys(self) -> dict[int, int]:
        """The row of each key that has one. Fails if one is there twice."""
        live = [(k, v & keyed.NO_ROW) for k, v, tag in self.entries() if tag != keyed.DEAD and not v & keyed.CANDIDATE]
        assert len(dict(live)) == len(live), "a key is there twice"
        return dict(live)

    def check_rows(self) -> None:
        """Every row that was handed out belongs to exactly one entry, live or dead, or is claimed in one undo slot."""
        rows = [v & keyed.NO_ROW for _, v, _ in self.entries() if v & keyed.NO_ROW != keyed.NO_ROW]
        assert sorted(rows + self.claimed()) == list(range(load64(self.base + at.NEXT_ROW) >> 16))

    def claimed(self) -> list[int]:
        """Rows that are in an undo slot for keys to come."""
        rows: list[int] = []
        undo_slots = self.base + self.places["UNDO_SLOTS"]
        for worker in range(layout.MAX_WORKERS):
            claim = load64(undo_slots + self.places["UNDO_BYTES"] * worker + at.CLAIM)
            first, number = (claim >> 2) & keyed.NO_ROW, (claim >> keyed.MORE_SHIFT) + 1
            rows += range(first, first + number) if claim & 3 == keyed.CLAIMED else ()
        return rows

    def rows_of_keys(self) -> int:
        """How many rows were given to keys, those that are gone included."""
        return (load64(self.base + at.NEXT_ROW) >> 16) - len(self.claimed())

    def check_counts(self) -> None:
        """What each segment says of how many there are of each kind is so."""
        words = self.memory[self.places["SEGMENT_WORDS"] :][: 8 << self.places["MOST_DEPTH"]].view(np.int64)
        totals = [0, 0, 0]
        for number in np.flatnonzero(words):
            counts = load64(self.base + self.places["SEGMENT_COUNTS"] + 8 * int(number))
            for kind in range(3):
                totals[kind] += (counts >> (16 * kind)) & 0xFFFF
        dead = sum(tag == keyed.DEAD for _, _, tag in self.entries())
        assert totals == [len(self.keys()), len(self.entries()) - dead - len(self.keys()), dead]

    def held(self) -> int:
        """Words that have an owner."""
        rows = self.memory[self.places["ROW_WORDS"] :][: 8 * (self.places["CAPACITY"] >> self.places["SHIFT"]) + 8]
        segments = self.memory[self.places["SEGMENT_WORDS"] :][: 8 << self.places["MOST_DEPTH"]]
        return sum(int(np.count_nonzero(w.view(np.int64) & keyed.OWNER)) for w in (rows, segments))


def _uncompiled(bench: Bench) -> dict[str, Any]:
    """The kernels with writes that are counted, and that may be a worker's last."""

    def counted(function: Any) -> Any:
        def write(*args: Any) -> Any:
            bench.write()
            return function(*args)

        return write

    def update(function: int, values: int, delta: int, state: int, stride: int, hyper: int, count: int) -> None:
        # number by number, so that a worker can die in the middle of a row
        dtype, size = bench.dtype, 8 * count

        def array(address: int, nbytes: int) -> Any:
            memory: Any = (ctypes.c_char * nbytes).from_address(address)
            return np.frombuffer(memory, dtype)

        row, change = array(values, size), array(delta, size)
        kept = array(state, size * bench.states) if bench.states else np.empty(0, dtype)
        for i in range(count):
            bench.write()
            if bench._updater is None:
                row[i] += change[i]
            else:
                numbers = array(hyper, 64)
                bench._updater.apply(row[i:], change[i:], kept[i:], stride, numbers, 1)

    def replace(value: Any) -> Any:
        if getattr(value, "__module__", "") == atomics.__name__ and value.__name__ in WRITES:
            return update if value.__name__ == "call_update" else counted(value)
        if value in (atomics.load32, atomics.load64, atomics.store64, atomics.array_at):
            # fields of headers are numbers of NumPy's, which ctypes does not take
            return lambda *args: value(*(int(a) if isinstance(a, np.integer) else a for a in args))
        return bench.broken.get(getattr(value, "__name__", ""), value)

    return {
        **rebound("multiverso.kernels.keyed.passes", replace),
        **rebound("multiverso.kernels.keyed.removal", replace),
        **rebound("multiverso.kernels.keyed.rounds", replace),
        **rebound("multiverso.kernels.keyed.calls", replace),
    }
