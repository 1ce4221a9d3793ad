"""Atomic words, locks, sleeping and memory by address: all that kernels know of the machine.

What stands here are stand-ins in plain Python: they do the same, so a kernel can be run uncompiled. In compiled
kernels each is replaced by the function of the same name in ``native``.
"""

from __future__ import annotations

import ctypes
import platform
from typing import Any

import numpy as np
import numpy.typing as npt

FUTEX_CALL = {"x86_64": 202, "aarch64": 98}.get(platform.machine(), 98)
FUTEX_WAIT, FUTEX_WAKE = 0, 1  # never FUTEX_PRIVATE: the words are shared between processes
CLOCK_MONOTONIC = 1
MADVISE_CALL = {"x86_64": 28, "aarch64": 233}.get(platform.machine(), 233)
POPULATE_WRITE = 23  # Linux 5.14
ALL = 1 << 30

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
Array = npt.NDArray[Any]


def load32(address: int) -> int:
    """Returns the int32 at an address."""
    return ctypes.c_int32.from_address(address).value


def load64(address: int) -> int:
    """Returns the int64 at an address."""
    return ctypes.c_int64.from_address(address).value


def store32(address: int, value: int) -> None:
    """Stores an int32."""
    ctypes.c_int32.from_address(address).value = value


def store64(address: int, value: int) -> None:
    """Stores an int64."""
    ctypes.c_int64.from_address(address).value = value


def add32(address: int, value: int) -> int:
    """Adds to an int32 and returns what it was."""
    before = load32(address)
    store32(address, before + value)
    return before


def add64(address: int, value: int) -> int:
    """Adds to an int64 and returns what it was."""
    before = load64(address)
    store64(address, before + value)
    return before


def compare_swap64(address: int, old: int, new: int) -> int:
    """Returns what the word held; it holds ``new`` afterwards if that was ``old``."""
    before = load64(address)
    if before == old:
        store64(address, new)
    return before


def array_at(address: int, count: int, like: Array) -> Array:
    """Returns ``count`` numbers of the dtype of ``like`` at an address, as a flat array."""
    memory: Any = (ctypes.c_char * (count * like.itemsize)).from_address(address)
    array: Array = np.frombuffer(memory, like.dtype, count)
    return array


def record_at(address: int, dtype: np.dtype[Any]) -> Any:
    """Returns the record at an address, whose fields are its attributes: of words that no longer change."""
    memory: Any = (ctypes.c_char * dtype.itemsize).from_address(address)
    return np.frombuffer(memory, dtype, 1).view(np.recarray)[0]


def scratch(count: int, like: Array) -> Array:
    """Returns a flat array of the dtype of ``like`` on the stack; ``count`` must be a constant, of at most 8,192."""
    return np.empty(count, like.dtype)


def words(count: int) -> npt.NDArray[np.int64]:
    """Returns zeroed int64 on the stack; ``count`` must be a constant."""
    return np.zeros(count, np.int64)


def sched_yield() -> None:
    """Lets others run."""
    _libc.sched_yield()


def monotonic_ns() -> int:
    """Returns CLOCK_MONOTONIC, the clock of all deadlines."""
    time = (ctypes.c_int64 * 2)()
    _libc.clock_gettime(CLOCK_MONOTONIC, time)
    return time[0] * 1_000_000_000 + time[1]


def futex_wait(address: int, value: int, nanoseconds: int) -> int:
    """Sleeps while the int32 holds ``value``: 0 or EAGAIN (11), EINTR (4), ETIMEDOUT (110)."""
    time = (ctypes.c_int64 * 2)(nanoseconds // 1_000_000_000, nanoseconds % 1_000_000_000)
    return _futex(address, FUTEX_WAIT, value, time)


def futex_wake(address: int) -> int:
    """Wakes all that sleep on the int32."""
    return _futex(address, FUTEX_WAKE, ALL, None)


def _futex(address: int, operation: int, value: int, time: Any) -> int:
    code = _libc.syscall(
        ctypes.c_long(FUTEX_CALL),
        ctypes.c_void_p(address),
        ctypes.c_long(operation),
        ctypes.c_long(value),
        time,
        None,
        ctypes.c_long(0),
    )
    return ctypes.get_errno() if code < 0 else 0


def call_update(function: int, values: int, delta: int, state: int, stride: int, hyper: int, count: int) -> None:
    """Calls a compiled updater by its address, so that one compiled kernel serves every updater."""
    _call(function, "pppnpn", values, delta, state, stride, hyper, count)


def call_push(
    function: int, centre: int, local: int, state: int, stride: int, hyper: int, delta: int, count: int
) -> None:
    """Calls a rule's compiled push by its address."""
    _call(function, "pppnppn", centre, local, state, stride, hyper, delta, count)


def call_pull(function: int, centre: int, local: int, state: int, stride: int, hyper: int, count: int) -> None:
    """Calls a rule's compiled pull by its address."""
    _call(function, "pppnpn", centre, local, state, stride, hyper, count)


def _call(function: int, kinds: str, *arguments: int) -> None:
    types = {"p": ctypes.c_void_p, "n": ctypes.c_int64}
    ctypes.CFUNCTYPE(None, *(types[kind] for kind in kinds))(function)(*arguments)


# -- for words that order what lies beside them (kernels/keyed/row_words.py): acquire and release, not one order for all


def load_acquire64(address: int) -> int:
    """Returns the int64 at an address; what is read after it is read after it."""
    return load64(address)


def store_release64(address: int, value: int) -> None:
    """Stores an int64 after all that was stored before it."""
    store64(address, value)


def load_double(address: int) -> float:
    """Returns the float64 at an address, which must not change meanwhile."""
    return ctypes.c_double.from_address(address).value


def fence_acquire() -> None:
    """Nothing that follows is read before it."""


def fence_release() -> None:
    """Nothing that follows is stored before what precedes it has been."""


def fence_all() -> None:
    """Nothing that follows happens before what precedes it has been seen: also no load before a store."""


def populate(address: int, nbytes: int) -> int:
    """Makes whole pages be there that are about to be written to: 0, or why they cannot be (EFAULT, ENOMEM, EINVAL)."""
    return 0 * (address + nbytes)


def prefetch(address: int) -> None:
    """Sends for a cache line that is going to be needed; any address may be asked for."""


def prefetch_to_write(address: int) -> None:
    """As ``prefetch``, of a cache line that is going to be changed."""


def pause() -> None:
    """Gives the other thread of this core its turn, for a moment."""


def load_float32(address: int) -> float:
    """Returns the float32 at an address."""
    return ctypes.c_float.from_address(address).value


def move(to: int, source: int, nbytes: int) -> None:
    """Copies bytes that do not overlap."""
    ctypes.memmove(to, source, nbytes)


def move_line(to: int, source: int) -> None:
    """Copies 64 bytes at once; either may begin anywhere."""
    ctypes.memmove(to, source, 64)


def add_line(to: int, source: int, like: Any) -> None:
    """Adds 64 bytes of numbers of ``like``'s dtype to as many others, at once; either may begin anywhere."""
    count = 64 // like.itemsize
    numbers = array_at(to, count, like)
    numbers += array_at(source, count, like)


def trailing_zeros(value: int) -> int:
    """Returns the number of the lowest bit that is set; ``value`` is not 0."""
    return (value & -value).bit_length() - 1


def hash64(value: int) -> int:
    """Returns SplitMix64's finaliser of an int64, as an int64: every bit of it depends on every bit given."""
    mask = (1 << 64) - 1
    x = (int(value) + 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    x ^= x >> 31
    return x - (1 << 64) if x >> 63 else x


def store_float32(address: int, value: float) -> None:
    """Stores a number as a float32."""
    ctypes.c_float.from_address(address).value = value


def store_float64(address: int, value: float) -> None:
    """Stores a number as a float64."""
    ctypes.c_double.from_address(address).value = value


def store_int32(address: int, value: float) -> None:
    """Stores a number, rounded towards 0, as an int32."""
    ctypes.c_int32.from_address(address).value = int(value)


def store_int64(address: int, value: float) -> None:
    """Stores a number, rounded towards 0, as an int64."""
    ctypes.c_int64.from_address(address).value = int(value)


def object_head() -> int:
    """Returns how many bytes of any object of Python come before its own: more in a Python without the GIL."""
    return object.__basicsize__
