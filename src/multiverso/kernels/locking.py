"""A stripe's lock: robust, with a deadline, and seen by the others while it is waited for."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

from __future__ import annotations

import numpy as np
from numba import njit

from multiverso import layout as at
from multiverso.kernels.atomics import (
    add64,
    load64,
    mutex_clocklock,
    mutex_consistent,
    mutex_trylock,
    mutex_unlock,
)
from multiverso.kernels.codes import BUSY, HELD, OWNER_DEAD
from multiverso.kernels.waits import SLICE_NANOSECONDS, end_table_wait, line_of, monotonic_ns, publish_wait

_CLOCK_MONOTONIC = 1


@njit(nogil=True)
def stripe_mutex(base, stripe):
    return base + load64(base + at.LOCKS) + stripe * at.MUTEX_BYTES


@njit(nogil=True)
def _wait_for_lock(control, base, me, mutex):
    """Waits for at most half a second: a signal is handled between two calls, and the owner may be stopped
    (robustness helps only when it is dead)."""
    publish_wait(control, me, at.FOR_LOCK, load64(base + at.TABLE_ID), 0, np.int64(mutex - base))
    timespec = np.empty(2, np.int64)
    until = monotonic_ns(timespec) + SLICE_NANOSECONDS
    timespec[0] = until // 1_000_000_000
    timespec[1] = until % 1_000_000_000
    code = mutex_clocklock(mutex, _CLOCK_MONOTONIC, timespec.ctypes.data)
    if code == HELD or code == OWNER_DEAD:
        end_table_wait(control, base, me)
    return code


@njit(nogil=True)
def lock_stripe(control, base, me, stripe):
    """Locks a stripe for worker ``me``: HELD, or why it could not (TIMED_OUT, NOT_RECOVERABLE).

    A lock whose owner died is taken over, and counted: the stripe may hold half of what the dead one did.
    """
    mutex = stripe_mutex(base, stripe)
    code = mutex_trylock(mutex)
    if code == BUSY:
        code = _wait_for_lock(control, base, me, mutex)
    if code == OWNER_DEAD:
        # without this, every later lock would answer ENOTRECOVERABLE
        mutex_consistent(mutex)
        add64(line_of(base, me) + at.RECOVERED, 1)
        code = HELD
    return code


@njit(nogil=True)
def unlock_stripe(base, stripe):
    mutex_unlock(stripe_mutex(base, stripe))
