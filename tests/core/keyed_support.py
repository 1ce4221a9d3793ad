"""A keyed table's kernels, uncompiled, on memory of this process, with workers that die at any store."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np

from multiverso import keyed_layout as keyed
from multiverso import layout
from multiverso.kernels import atomics  # rebound asks for what is imported
from multiverso.kernels.declaring import Kernel, rebound
from multiverso.keyed_layout import at
from multiverso.layout import CACHE_LINE, PAGE, round_up
from multiverso.memory.words import load64, store64
from multiverso.updaters import Updater

WRITES = ("store_release64", "compare_swap64", "add64", "move", "call_update", "store_float64", "store_int64")


class Died(BaseException):
    """A worker's end, at one of its writes."""


class Bench:
    """A keyed table of float64 or int64 rows and its workers, all in this thread.

    Args:
        dim: numbers in a row.
        capacity: rows.
        updater: how adds reach a row; plain addition by default.
        integer: whether the rows are int64.
    """

    def __init__(
        self, dim: int = 3, capacity: int = 4000, updater: Updater | None = None, integer: bool = True
    ) -> None:
        self.dim, self.dtype = dim, np.dtype("int64" if integer else "float64")
        self.states = len(updater.states) if updater else 0
        self.writes_left = -1  # until the worker that is at work dies; -1: never
        self.writes = 0
        self._updater = updater
        row_bytes = round_up(8 * dim * (1 + self.states), CACHE_LINE)
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
        store64(self.base + self.places["SEGMENT_WORDS"], keyed.SEGMENT_VERSION | keyed.DEPTH_BIT)
        for worker in range(layout.MAX_WORKERS):
            store64(self.base + self.places["HANDS"] + self.places["HAND_BYTES"] * worker + at.ROW, -1)
        self.kernels = _uncompiled(self)

    def begin(self, worker: int) -> None:
        """A new life of a worker's number."""
        line = self.base + keyed.LINES + keyed.LINE_BYTES * worker
        store64(line + at.INCARNATION, load64(line + at.INCARNATION) % 255 + 1)
        self.set_alive(worker, True)
        assert self.kernels["enter"](self.control, self.base, worker) == 0

    def set_alive(self, worker: int, alive: bool) -> None:
        word = layout.WORKERS + layout.WORKER_STRIDE * worker + layout.LIVENESS
        ctypes.c_int32.from_address(self.control + word).value = layout.ALIVE if alive else layout.LOST

    def add(self, worker: int, keys: Any, delta: Any) -> None:
        keys = np.asarray(keys, np.int64)
        rows = np.empty(keys.size, np.int64)
        data = np.ascontiguousarray(np.broadcast_to(delta, (keys.size, self.dim)), self.dtype)
        assert self.kernels["admit"](self.control, self.base, worker, keys, rows, 0) == 0
        assert self.kernels["add"](self.control, self.base, 1, worker, rows, data.ctypes.data, 0) == 0

    def find(self, worker: int, keys: Any) -> Any:
        keys = np.asarray(keys, np.int64)
        rows = np.empty(keys.size, np.int64)
        assert self.kernels["find"](self.control, self.base, worker, keys, rows, 0) == 0
        return rows

    def get(self, worker: int, keys: Any) -> Any:
        keys = np.asarray(keys, np.int64)
        rows, out = self.find(worker, keys), np.empty((keys.size, self.dim), self.dtype)
        assert self.kernels["read"](self.control, self.base, worker, keys, rows, out.ctypes.data, 0) == 0
        return out

    def dies_after(self, writes: int, function: Callable[[], None]) -> bool:
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

    def entries(self) -> list[tuple[int, int]]:
        """All (key, row) that stand in segments, twins too."""
        words = self.memory[self.places["SEGMENT_WORDS"] :][: 8 << self.places["MOST_DEPTH"]].view(np.int64)
        found = []
        for number in np.flatnonzero(words):
            start = self.places["SEGMENTS"] + keyed.SEGMENT_BYTES * int(number)
            buckets = self.memory[start : start + keyed.SEGMENT_BYTES].reshape(-1, keyed.BUCKET_BYTES)
            used = (buckets[:, : keyed.ENTRIES] & 0x80) != 0
            words_of = buckets.view(np.int64)
            found += zip(
                words_of[:, 2::2][used].tolist(), (words_of[:, 3::2][used] & 0xFFFFFFFF).tolist(), strict=True
            )
        return found

    def held(self) -> int:
        """Words that have an owner."""
        rows = self.memory[self.places["ROW_WORDS"] :][
            : 8 * (self.places["CAPACITY"] >> self.places["SHIFT"]) + 8
        ]
        segments = self.memory[self.places["SEGMENT_WORDS"] :][: 8 << self.places["MOST_DEPTH"]]
        return sum(int(np.count_nonzero(w.view(np.int64) & keyed.OWNER)) for w in (rows, segments))


def _uncompiled(bench: Bench) -> dict[str, Any]:
    """The kernels with writes that are counted, and that may be a worker's last."""

    def counted(function: Any) -> Any:
        def write(*args: Any) -> Any:
            bench.write()
            return function(*args)

        return write

    def update(
        function: int, values: int, delta: int, state: int, stride: int, hyper: int, count: int
    ) -> None:
        # number by number, so that a worker can die in the middle of a row
        dtype, size = bench.dtype, 8 * count

        def array(address: int, nbytes: int) -> Any:
            return np.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype)

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
        return value.function if isinstance(value, Kernel) else value

    return rebound("multiverso.kernels.keyed", replace)
