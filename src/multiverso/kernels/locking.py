"""A stripe's lock: robust, with a deadline, and seen by the others while it is waited for."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,no-any-return"

from __future__ import annotations

import numpy as np

from multiverso import layout as at
from multiverso.kernels.atomics import (
    add64,
    load64,
    monotonic_ns,
    mutex_consistent,
    mutex_timedlock,
    mutex_trylock,
    mutex_unlock,
)
from multiverso.kernels.codes import BUSY, HELD, OWNER_DEAD
from multiverso.kernels.declaring import inner
from multiverso.kernels.waits import SLICE_NANOSECONDS, end_table_wait, line_of, publish_wait


@inner
def stripe_mutex(base, stripe):
    return base + load64(base + at.LOCKS) + stripe * at.MUTEX_BYTES


@inner
def _wait_for_lock(control, base, me, mutex):
    """Waits for at most half a second: a signal is handled between two calls, and the owner may be stopped
    (robustness helps only when it is dead)."""
    publish_wait(control, me, at.FOR_LOCK, load64(base + at.TABLE_ID), 0, np.int64(mutex - base))
    code = mutex_timedlock(mutex, monotonic_ns() + SLICE_NANOSECONDS)
    if code == HELD or code == OWNER_DEAD:
        end_table_wait(control, base, me)
    return code


@inner
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


@inner
def unlock_stripe(base, stripe):
    mutex_unlock(stripe_mutex(base, stripe))
