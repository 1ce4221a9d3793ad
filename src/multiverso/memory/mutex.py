"""Robust process-shared mutexes by address, for code that is not a kernel.

A mutex belongs to the *thread* that locked it: the thread's end is its owner's death.
"""

from __future__ import annotations

import ctypes
import errno
import threading
import time
from pathlib import Path

from multiverso.memory.system import libc

_PROCESS_SHARED = _ROBUST = 1
_CLOCK_MONOTONIC = 1
_OWNER_BITS = 0x3FFFFFFF

OWNER_DEAD = errno.EOWNERDEAD
NOT_RECOVERABLE = errno.ENOTRECOVERABLE
TIMED_OUT = errno.ETIMEDOUT
BUSY = errno.EBUSY


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def initialise(address: int, count: int = 1, stride: int = 64) -> None:
    """Makes ``count`` unlocked mutexes in zeroed memory, ``stride`` bytes apart."""
    attributes = ctypes.create_string_buffer(64)
    _check(libc.pthread_mutexattr_init(attributes))
    _check(libc.pthread_mutexattr_setpshared(attributes, _PROCESS_SHARED))
    _check(libc.pthread_mutexattr_setrobust(attributes, _ROBUST))
    _check(libc.pthread_mutex_init(ctypes.c_void_p(address), attributes))
    one = ctypes.string_at(address, stride)
    if count > 1:  # an unlocked mutex is plain bytes: copying them is quicker than a call for each
        ctypes.memmove(address + stride, one * (count - 1), stride * (count - 1))


def _check(code: int) -> None:
    if code != 0:
        raise OSError(code, "this system has no robust process-shared mutexes; run `multiverso doctor`")


def try_lock(address: int) -> int:
    """Returns 0 when it is now held by this thread, OWNER_DEAD when so and the last owner died, else BUSY, ..."""
    return int(libc.pthread_mutex_trylock(ctypes.c_void_p(address)))


def lock(address: int, timeout_seconds: float) -> int:
    """Like `try_lock`, but waits for at most ``timeout_seconds`` (then TIMED_OUT)."""
    until = time.monotonic_ns() + int(timeout_seconds * 1e9)
    at = _Timespec(until // 1_000_000_000, until % 1_000_000_000)
    return int(libc.pthread_mutex_clocklock(ctypes.c_void_p(address), _CLOCK_MONOTONIC, ctypes.byref(at)))


def recover(address: int) -> None:
    """After OWNER_DEAD: makes the mutex usable again. Without effect on one that is."""
    code = libc.pthread_mutex_consistent(ctypes.c_void_p(address))
    if code != errno.EINVAL:
        _check(code)


def unlock(address: int) -> None:
    """Unlocks a mutex that this thread holds."""
    code = libc.pthread_mutex_unlock(ctypes.c_void_p(address))
    if code != 0:
        raise OSError(code, "unlocking a mutex that this thread does not hold")


def is_ours(address: int) -> bool:
    """Returns whether the calling thread holds the mutex."""
    return ctypes.c_uint32.from_address(address).value & _OWNER_BITS == threading.get_native_id()


def owner_pid(address: int) -> int | None:
    """Returns the process whose thread holds the mutex, or None."""
    thread = ctypes.c_uint32.from_address(address).value & _OWNER_BITS
    if not thread:
        return None
    try:
        status = Path(f"/proc/{thread}/status").read_text()
    except OSError:
        return thread
    return next((int(line.split()[1]) for line in status.splitlines() if line.startswith("Tgid:")), thread)
