"""The memory that actors share, with atomics and futexes in plain Python.

Every operation on a word that may change is a *step*: the scheduler decides before it who goes on. Words that
never change after a world is set up (a table's sizes, say) are marked quiet, which leaves more steps for the rest.
"""

from __future__ import annotations

import ctypes
import mmap
from types import ModuleType
from typing import Any

import numpy as np

from interleavings.scheduler import Scheduler
from interleavings.standins import Standin

SIZE = 1 << 18
NAP = 100_000  # nanoseconds of a sleep that ends by itself
SHORT = 400_000_000  # one that is shorter than this ends in time; a slice of half a second never does
EAGAIN, ETIMEDOUT = 11, 110


class Memory:
    """One block of memory at its real address, so that code that uses ``ctypes`` finds the same words."""

    def __init__(self) -> None:
        self._map = mmap.mmap(-1, SIZE)
        self.origin = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._view = memoryview(self._map)
        self.words32 = self._view.cast("i")
        self.words64 = self._view.cast("q")
        self.quiet = bytearray(SIZE // 8)
        self.scheduler = Scheduler(0)
        self._used = 0
        self.headers: dict[int, Header] = {}  # that were read in this schedule
        self.torn = False  # whether data are written in two parts, between which others may go on
        self._kept = self._used

    def reset(self, scheduler: Scheduler) -> None:
        """Zeroes everything for the next schedule."""
        self.scheduler.close()
        self.scheduler = scheduler
        self._view[self._kept : self._used] = bytes(self._used - self._kept)
        self.quiet[:] = bytes(len(self.quiet))
        self._used = self._kept
        self.headers.clear()
        self.torn = False

    def take(self, size: int) -> int:
        """Returns the address of zeroed memory, at the beginning of a page."""
        start = -(-self._used // 4096) * 4096
        self._used = start + size
        assert self._used <= SIZE, "the world does not fit"
        return self.origin + start

    def be_quiet(self, address: int, size: int) -> None:
        """Marks words that do not change any more: loading them is no step."""
        start = (address - self.origin) // 8
        self.quiet[start : start + size // 8] = b"\1" * (size // 8)

    def array(self, address: int, count: int, dtype: Any) -> np.ndarray:
        """Returns memory as an array: of the block, or an array of a caller's own."""
        if self.origin <= address < self.origin + SIZE:
            return np.ndarray((count,), dtype, self._map, int(address) - self.origin)
        buffer: Any = (ctypes.c_char * (count * np.dtype(dtype).itemsize)).from_address(int(address))
        return np.frombuffer(buffer, dtype)

    def write(self, out: Any, values: Any) -> None:
        """Writes data that no atomic guards; where ``values`` are memory, they are read at the same steps."""
        self.scheduler.step("data", 0)
        if not self.torn or len(out) < 2:
            out[:] = values
            return
        out[:1] = values[:1]
        self.scheduler.step("data", 0)
        out[1:] = values[1:]


class Header:
    """A record of int64 words that do not change any more once they are read."""

    def __init__(self, words: memoryview, place: int, dtype: np.dtype[Any]) -> None:
        self._words, self._place = words, place
        self._fields: Any = dtype.fields or {}

    def __getattr__(self, name: str) -> int:
        value = int(self._words[(self._place + self._fields[name][1]) >> 3])
        setattr(self, name, value)
        return value


def atomics(memory: Memory) -> ModuleType:
    """Returns what stands for ``multiverso.compiling.atomics``."""
    module = Standin("multiverso.compiling.atomics")
    origin, quiet = memory.origin, memory.quiet

    def words(view: memoryview, shift: int) -> tuple[Any, Any, Any]:
        def load(address: int) -> int:
            place = int(address) - origin
            if not quiet[place >> 3]:
                memory.scheduler.step("load", address)
            return int(view[place >> shift])

        def store(address: int, value: int) -> None:
            place = (int(address) - origin) >> shift
            if view[place] != value:  # a store that changes nothing is seen by nobody
                memory.scheduler.step("store", address, value)
                view[place] = int(value)

        def add(address: int, value: int) -> int:
            memory.scheduler.step("add", address, value)
            place = (int(address) - origin) >> shift
            old = int(view[place])
            view[place] = old + int(value)
            return old

        return load, store, add

    module.load32, module.store32, module.add32 = words(memory.words32, 2)  # type: ignore[attr-defined]
    module.load64, module.store64, module.add64 = words(memory.words64, 3)  # type: ignore[attr-defined]

    def compare_swap64(address: int, old: int, new: int) -> int:
        memory.scheduler.step("swap", address, new)
        place = (int(address) - origin) >> 3
        seen = int(memory.words64[place])
        if seen == int(old):
            memory.words64[place] = int(new)
        return seen

    def futex_wait(address: int, value: int, nanoseconds: int) -> int:
        if nanoseconds <= NAP:  # nobody wakes it: it looks again
            memory.scheduler.give_way()
            return ETIMEDOUT
        memory.scheduler.step("sleep", address, value)
        if memory.words32[(int(address) - origin) >> 2] != value:
            return EAGAIN
        return memory.scheduler.sleep(int(address), nanoseconds // 1000 + 1 if nanoseconds < SHORT else None)

    def futex_wake(address: int) -> int:
        memory.scheduler.step("wake", address)
        memory.scheduler.wake(int(address))
        return 0

    def call_update(update: int, values: int, delta: int, state: int, stride: int, hyper: int, count: int) -> None:
        memory.scheduler.step("update", values)
        total = memory.array(delta, count, np.int64)
        for kept in (state, values):
            array = memory.array(kept, count, np.int64)
            memory.write(array, array + total)

    def move(to: int, source: int, nbytes: int) -> None:
        memory.write(memory.array(to, nbytes // 8, np.int64), memory.array(source, nbytes // 8, np.int64))

    def add_line(to: int, source: int, like: np.ndarray) -> None:
        count = 64 // like.itemsize
        added = memory.array(source, count, like.dtype)
        line = memory.array(to, count, like.dtype)
        memory.write(line, line + added)

    headers = memory.headers

    def record_at(address: int, dtype: np.dtype[Any]) -> Header:
        if address not in headers:
            headers[address] = Header(memory.words64, int(address) - origin, dtype)
        return headers[address]

    known = {
        "load_acquire64": module.load64,
        "store_release64": module.store64,
        "fence_acquire": lambda: None,
        "fence_release": lambda: None,
        "fence_all": lambda: None,
        "prefetch": lambda address: None,
        "prefetch_to_write": lambda address: None,
        "pause": lambda: memory.scheduler.give_way(),
        "move": move,
        "move_line": lambda to, source: move(to, source, 64),
        "add_line": add_line,
        "call_update": call_update,
        "compare_swap64": compare_swap64,
        "array_at": lambda address, count, like: memory.array(address, count, like.dtype),
        "record_at": record_at,
        "scratch": lambda count, like: np.empty(count, like.dtype),
        "words": lambda count: np.zeros(count, np.int64),
        "futex_wait": futex_wait,
        "futex_wake": futex_wake,
        # a microsecond a step: no slice of half a second is ever over, so that only a wake ends a sleep
        "monotonic_ns": lambda: 1_000_000_000 + 1000 * memory.scheduler.clock,
        "sched_yield": lambda: memory.scheduler.give_way(),
    }
    vars(module).update(known)
    return module


def words(memory: Memory, kernels: ModuleType) -> ModuleType:
    """Returns what stands for ``multiverso.memory.words``: the same words, without Numba."""
    module = ModuleType("multiverso.memory.words")

    def bump_and_wake(address: int) -> None:
        memory.scheduler.step("bump and wake", address)
        memory.words32[(address - memory.origin) >> 2] += 1
        memory.scheduler.wake(address)

    for name in ("load32", "store32", "load64", "store64"):
        setattr(module, name, getattr(kernels, name))
    module.bump_and_wake = bump_and_wake  # type: ignore[attr-defined]
    return module


def mutexes(memory: Memory) -> ModuleType:
    """Returns what stands for ``multiverso.memory.mutex``."""
    module = ModuleType("multiverso.memory.mutex")
    module.initialise = lambda address, count=1, stride=64: None  # type: ignore[attr-defined]
    module.MUTEX_BYTES = 64  # type: ignore[attr-defined]
    return module
