"""Waiting for other workers: a condition on shared words, then a futex on the control segment's event word.

Whoever makes a condition true bumps the event word and wakes the sleepers; a waiter reads the event word
*before* it checks, so no wake is lost. Each call waits for at most half a second: signals, deadlines and the
node's death are looked at between the calls.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

from __future__ import annotations

import numpy as np
from numba import njit

from multiverso import layout as at
from multiverso.kernels.atomics import (
    FUTEX_CALL,
    _errno_location,
    _syscall,
    add32,
    add64,
    load32,
    load64,
    sched_yield,
    store32,
    store64,
)
from multiverso.kernels.locking import monotonic_ns

_READY, _LOST, _NOT_READY = 0, 1, 2
_EINTR, _ETIMEDOUT = 4, 110
_ALL = 1 << 30
_YIELDS = (
    200  # measured: rounds of 1e7 floats, 2 workers: 13.2 ms with 50, 11.4 with 200 to 2000; 4 workers alike
)
_SLICE_NANOSECONDS = 500_000_000


@njit(nogil=True)
def block_of(control, worker):
    return control + at.WORKERS + at.WORKER_STRIDE * worker


@njit(nogil=True)
def notify(control):
    add32(control + at.EVENT, 1)
    if load32(control + at.WAITERS) > 0:
        _syscall(FUTEX_CALL, control + at.EVENT, 1, _ALL, 0, 0, 0)


@njit(nogil=True)
def sleep_on(control, event, rounds, timespec):
    """Gives way for a while, then sleeps until the event word changes: 0, EINTR or ETIMEDOUT."""
    if rounds <= _YIELDS:
        sched_yield()
        return 0
    # The slice counts from the first sleep, not from the last wake: others' rounds wake us without end, and
    # signals and deadlines must be looked at all the same.
    left = _SLICE_NANOSECONDS
    if timespec.size > 2:
        now = monotonic_ns(timespec)
        if timespec[2] == 0:
            timespec[2] = now
        left -= now - timespec[2]
        if left <= 0:
            return _ETIMEDOUT
    timespec[0] = 0
    timespec[1] = left
    add32(control + at.WAITERS, 1)
    code = 0
    if _syscall(FUTEX_CALL, control + at.EVENT, 0, event, timespec.ctypes.data, 0, 0) != 0:
        code = load32(_errno_location())
    add32(control + at.WAITERS, -1)
    if code == _EINTR or code == _ETIMEDOUT:
        return code
    return 0


@njit(nogil=True)
def counts(control, worker):
    """Whether a worker is alive and has not left."""
    block = block_of(control, worker)
    return load32(block + at.FATE) == at.ALIVE and load32(block + at.STATE) == at.ACTIVE


@njit(nogil=True)
def is_lost(control, worker):
    return load32(block_of(control, worker) + at.FATE) == at.LOST


@njit(nogil=True)
def describe_wait(control, me, kind, table, stage, target):
    block = block_of(control, me)
    store32(block + at.WAIT_TABLE, table)
    store32(block + at.WAIT_STAGE, stage)
    store64(block + at.WAIT_TARGET, target)
    store64(block + at.WAIT_SINCE, monotonic_ns(np.empty(2, np.int64)))
    add32(block + at.WAIT_SEQ, 1)
    store32(block + at.WAIT_KIND, kind)


@njit(nogil=True)
def end_wait(control, me):
    block = block_of(control, me)
    if load32(block + at.WAIT_KIND) == at.NOTHING:
        return 0
    waited = monotonic_ns(np.empty(2, np.int64)) - load64(block + at.WAIT_SINCE)
    store64(block + at.WAITED_NS, load64(block + at.WAITED_NS) + waited)
    store32(block + at.WAIT_KIND, at.NOTHING)
    return waited


@njit(nogil=True)
def _barrier_state(control, target):
    go_on = load32(control + at.CONTINUE_WITHOUT_LOST)
    state = _READY
    for worker in range(load32(control + at.CAPACITY)):
        behind = load32(block_of(control, worker) + at.BARRIER) < target
        if behind and counts(control, worker):
            state = max(state, _NOT_READY)
        if behind and go_on == 0 and is_lost(control, worker):
            return _LOST
    return state


def barrier(control, me, target):
    """Arrives at barrier number ``target`` (once) and waits until every live worker has."""
    block = block_of(control, me)
    if load32(block + at.BARRIER) < target:
        store32(block + at.BARRIER, target)
        if _barrier_state(control, target) == _READY:
            notify(control)
            return 0
    timespec = np.zeros(3, np.int64)
    rounds = 0
    while True:
        event = load32(control + at.EVENT)
        state = _barrier_state(control, target)
        if state != _NOT_READY:
            end_wait(control, me)
            return state
        rounds += 1
        if rounds == _YIELDS and load32(block + at.WAIT_KIND) == at.NOTHING:
            describe_wait(control, me, at.FOR_BARRIER, 0, 0, target)
        code = sleep_on(control, event, rounds, timespec)
        if code != 0:
            return code


@njit(nogil=True)
def _clock_state(control, lines, me, target):
    go_on = load32(control + at.CONTINUE_WITHOUT_LOST)
    state = _READY
    for worker in range(load32(control + at.CAPACITY)):
        line = lines + worker * at.LINE_STRIDE
        behind = load32(line + at.ENROLLED) == 1 and load64(line + at.CLOCK) < target
        if behind and counts(control, worker):
            state = max(state, _NOT_READY)
        if behind and go_on == 0 and is_lost(control, worker):
            return _LOST
    return state


def wait_clock(control, base, me, target):
    """Waits until every live worker of the table has done ``target`` ticks."""
    lines = base + load64(base + at.LINES)
    timespec = np.zeros(3, np.int64)
    block = block_of(control, me)
    rounds = 0
    while True:
        event = load32(control + at.EVENT)
        state = _clock_state(control, lines, me, target)
        if state != _NOT_READY:
            waited = end_wait(control, me)
            store64(
                lines + me * at.LINE_STRIDE + at.WAITED,
                load64(lines + me * at.LINE_STRIDE + at.WAITED) + waited,
            )
            return state
        rounds += 1
        if rounds == _YIELDS and load32(block + at.WAIT_KIND) == at.NOTHING:
            describe_wait(control, me, at.FOR_CLOCK, load64(base + at.TABLE_ID), 0, target)
        code = sleep_on(control, event, rounds, timespec)
        if code != 0:
            return code


def tick(control, base, me):
    """One tick of this worker's clock of the table."""
    line = base + load64(base + at.LINES) + me * at.LINE_STRIDE
    add64(line + at.CLOCK, 1)  # a worker's threads may tick at once
    notify(control)


def wake(control):
    notify(control)


def set_word(address, value):
    store32(address, value)


def set_long(address, value):
    store64(address, value)


def begin_wait(control, me, kind, table, target):
    describe_wait(control, me, kind, table, 0, target)


def finish_wait(control, me):
    return end_wait(control, me)
