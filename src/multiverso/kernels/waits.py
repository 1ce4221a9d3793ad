"""Waiting for other workers: a condition on shared words, then a futex on the control segment's event word.

Whoever makes a condition true bumps the event word and wakes the sleepers; a waiter reads the event word
*before* it checks, so no wake is lost. Every wait is a loop of the same form::

    wait = new_wait()
    while True:
        event = load32(control + at.EVENT)
        if <the condition holds>:
            end_wait(control, me)
            return DONE
        code = pause(control, me, wait, event, <what for>)
        if code != DONE:
            return code

``pause`` gives way for a while, then says in the worker's block what it waits for, then sleeps: so every wait is
seen by the others, has a name, and counts in the search for deadlocks. A call waits for at most half a second:
signals, deadlines and the node's death are looked at between the calls, and what was said stays until the wait
has ended.
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
    clock_gettime,
    load32,
    load64,
    sched_yield,
    store32,
    store64,
)
from multiverso.kernels.codes import DONE, EINTR, LOST_SOMEONE, TIMED_OUT

# what a condition says, beside LOST_SOMEONE
READY, NOT_READY = DONE, 2
_ALL = 1 << 30
_CLOCK_MONOTONIC = 1
_YIELDS = (
    200  # measured: rounds of 1e7 floats, 2 workers: 13.2 ms with 50, 11.4 with 200 to 2000; 4 workers alike
)
SLICE_NANOSECONDS = 500_000_000
# the words of a wait: a timespec, when its first sleep began, how often it has looked
_SECONDS, _NANOSECONDS, _BEGAN, _LOOKS = range(4)


@njit(nogil=True)
def monotonic_ns(timespec):
    clock_gettime(_CLOCK_MONOTONIC, timespec.ctypes.data)
    return timespec[0] * 1_000_000_000 + timespec[1]


@njit(nogil=True)
def block_of(control, worker):
    return control + at.WORKERS + at.WORKER_STRIDE * worker


@njit(nogil=True)
def notify(control):
    add32(control + at.EVENT, 1)
    if load32(control + at.WAITERS) > 0:
        _syscall(FUTEX_CALL, control + at.EVENT, 1, _ALL, 0, 0, 0)


# -- one wait --------------------------------------------------------------------------------------------------


@njit(nogil=True)
def new_wait():
    return np.zeros(4, np.int64)


@njit(nogil=True)
def restart(wait):
    """The wait is over, and another begins: it gives way again before it sleeps, and has a new slice."""
    wait[_BEGAN] = 0
    wait[_LOOKS] = 0


@njit(nogil=True)
def publish_wait(control, me, kind, table, stage, target):
    """Says what this worker waits for, unless it says so already."""
    block = block_of(control, me)
    if (
        load32(block + at.WAIT_KIND) == kind
        and load64(block + at.WAIT_TARGET) == target
        and load32(block + at.WAIT_TABLE) == table
        and load32(block + at.WAIT_STAGE) == stage
    ):
        return
    end_wait(control, me)
    add32(block + at.WAIT_SEQ, 1)
    store32(block + at.WAIT_TABLE, table)
    store32(block + at.WAIT_STAGE, stage)
    store64(block + at.WAIT_TARGET, target)
    store64(block + at.WAIT_SINCE, monotonic_ns(np.empty(2, np.int64)))
    store32(block + at.WAIT_KIND, kind)
    add32(block + at.WAIT_SEQ, 1)


@njit(nogil=True)
def end_wait(control, me):
    """Says that this worker waits no more; returns how long it did, in nanoseconds."""
    block = block_of(control, me)
    if load32(block + at.WAIT_KIND) == at.NOTHING:
        return 0
    waited = monotonic_ns(np.empty(2, np.int64)) - load64(block + at.WAIT_SINCE)
    store64(block + at.WAITED_NS, load64(block + at.WAITED_NS) + waited)
    store32(block + at.WAIT_KIND, at.NOTHING)
    return waited


@njit(nogil=True)
def pause(control, me, wait, event, kind, table, stage, target):
    """Lets others go on until the event word is no longer ``event``: DONE to look again, EINTR or TIMED_OUT."""
    wait[_LOOKS] += 1
    if wait[_LOOKS] <= _YIELDS:
        sched_yield()
        return DONE
    publish_wait(control, me, kind, table, stage, target)
    # The slice counts from the first sleep, not from the last wake: others' rounds wake us without end, and
    # signals and deadlines must be looked at all the same.
    now = monotonic_ns(wait)
    if wait[_BEGAN] == 0:
        wait[_BEGAN] = now
    left = SLICE_NANOSECONDS - (now - wait[_BEGAN])
    if left <= 0:
        return TIMED_OUT
    wait[_SECONDS] = 0
    wait[_NANOSECONDS] = left
    add32(control + at.WAITERS, 1)
    code = DONE
    if _syscall(FUTEX_CALL, control + at.EVENT, 0, event, wait.ctypes.data, 0, 0) != 0:
        code = load32(_errno_location())
    add32(control + at.WAITERS, -1)
    if code == EINTR or code == TIMED_OUT:
        return code
    return DONE


# -- conditions ------------------------------------------------------------------------------------------------


@njit(nogil=True)
def counts(control, worker):
    """Whether a worker is alive and has not left."""
    block = block_of(control, worker)
    return load32(block + at.FATE) == at.ALIVE and load32(block + at.STATE) == at.ACTIVE


@njit(nogil=True)
def is_lost(control, worker):
    return load32(block_of(control, worker) + at.FATE) == at.LOST


@njit(nogil=True)
def _barrier_state(control, target):
    go_on = load32(control + at.CONTINUE_WITHOUT_LOST)
    state = READY
    for worker in range(load32(control + at.CAPACITY)):
        reached = block_of(control, worker) + at.BARRIER
        if load64(reached) >= target:
            continue
        if counts(control, worker):
            state = max(state, NOT_READY)
        # looked at again once it is lost: between the two it may have come, and died after that
        if go_on == 0 and is_lost(control, worker) and load64(reached) < target:
            return LOST_SOMEONE
    return state


def barrier(control, me, target):
    """Arrives at barrier number ``target`` (once) and waits until every live worker has."""
    block = block_of(control, me)
    if load64(block + at.BARRIER) < target:
        store64(block + at.BARRIER, target)
        if _barrier_state(control, target) == READY:
            notify(control)
            return DONE
    wait = new_wait()
    while True:
        event = load32(control + at.EVENT)
        state = _barrier_state(control, target)
        if state != NOT_READY:
            end_wait(control, me)
            return state
        code = pause(control, me, wait, event, at.FOR_BARRIER, 0, 0, target)
        if code != DONE:
            return code


@njit(nogil=True)
def line_of(base, worker):
    return base + load64(base + at.LINES) + worker * at.LINE_STRIDE


@njit(nogil=True)
def end_table_wait(control, base, me):
    """Like ``end_wait``, and the time counts for the table."""
    waited = end_wait(control, me)
    if waited > 0:
        add64(line_of(base, me) + at.WAITED, waited)


@njit(nogil=True)
def _clock_state(control, base, target):
    go_on = load32(control + at.CONTINUE_WITHOUT_LOST)
    state = READY
    for worker in range(load32(control + at.CAPACITY)):
        line = line_of(base, worker)
        if load32(line + at.ENROLLED) == 0 or load64(line + at.CLOCK) >= target:
            continue
        if counts(control, worker):
            state = max(state, NOT_READY)
        if go_on == 0 and is_lost(control, worker) and load64(line + at.CLOCK) < target:
            return LOST_SOMEONE  # looked at again, as above
    return state


def wait_clock(control, base, me, target):
    """Waits until every live worker of the table has done ``target`` ticks."""
    wait = new_wait()
    while True:
        event = load32(control + at.EVENT)
        state = _clock_state(control, base, target)
        if state != NOT_READY:
            end_table_wait(control, base, me)
            return state
        code = pause(control, me, wait, event, at.FOR_CLOCK, load64(base + at.TABLE_ID), 0, target)
        if code != DONE:
            return code


def tick(control, base, me):
    """One tick of this worker's clock of the table."""
    add64(line_of(base, me) + at.CLOCK, 1)  # a worker's threads may tick at once
    notify(control)


def wake(control):
    notify(control)


def set_long(address, value):
    store64(address, value)


def begin_wait(control, me, kind, table, target):
    publish_wait(control, me, kind, table, 0, target)


def finish_wait(control, me):
    return end_wait(control, me)
