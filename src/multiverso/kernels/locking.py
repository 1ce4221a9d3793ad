"""Robust locks with a deadline, inside kernels."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

from __future__ import annotations

import numpy as np
from numba import njit

from multiverso.kernels.atomics import (
    clock_gettime,
    mutex_clocklock,
    mutex_consistent,
    mutex_trylock,
    mutex_unlock,
)

_EBUSY, _EOWNERDEAD, _CLOCK_MONOTONIC = 16, 130, 1
_SLICE_NANOSECONDS = 500_000_000


@njit(nogil=True)
def monotonic_ns(timespec):
    clock_gettime(_CLOCK_MONOTONIC, timespec.ctypes.data)
    return timespec[0] * 1_000_000_000 + timespec[1]


@njit(nogil=True)
def lock(mutex):
    """Locks for at most half a second: 0 held, 130 held and the last owner died, else not held.

    In slices, because a signal (Ctrl-C) is handled between them, and because the owner may be stopped:
    robustness helps only when it is dead.
    """
    code = mutex_trylock(mutex)
    if code == _EBUSY:
        timespec = np.empty(2, np.int64)
        until = monotonic_ns(timespec) + _SLICE_NANOSECONDS
        timespec[0] = until // 1_000_000_000
        timespec[1] = until % 1_000_000_000
        code = mutex_clocklock(mutex, _CLOCK_MONOTONIC, timespec.ctypes.data)
    if code == _EOWNERDEAD:
        # without this, every later lock would answer ENOTRECOVERABLE
        mutex_consistent(mutex)
    return code


@njit(nogil=True)
def unlock(mutex):
    mutex_unlock(mutex)
