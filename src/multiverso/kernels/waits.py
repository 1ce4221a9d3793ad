"""Waiting for other workers: a condition on shared words, then a futex on the control segment's event word.

A thread that makes a condition true bumps the event word and wakes the sleepers; a waiter reads the event word
*before* it checks, so no wake is lost. Every wait is a loop of the same form::

    wait = words(WAIT_WORDS)
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
# mypy: disable-error-code="no-untyped-def,no-untyped-call,no-any-return"

from __future__ import annotations

from multiverso.compiling.atomics import (
    add32,
    add64,
    futex_wait,
    futex_wake,
    load32,
    load64,
    monotonic_ns,
    record_at,
    sched_yield,
    store32,
    store64,
    words,
)
from multiverso.compiling.declaring import Address, Int, Int32, inner, kernel
from multiverso.kernels.codes import DONE, EINTR, LOST_SOMEONE, TIMED_OUT
from multiverso.layout import words as at

# what a condition says, beside LOST_SOMEONE
READY, NOT_READY = DONE, 2
_YIELDS = 200  # measured: rounds of 1e7 floats, 2 workers: 13.2 ms with 50, 11.4 with 200 to 2000; 4 workers alike
SLICE_NANOSECONDS = 500_000_000
FOREVER = 1 << 62
_SHORTEST_NAP, _LONGEST_NAP = 100_000, 5_000_000
# the words of a wait: when its first sleep began, how often it has looked; WAIT_WORDS is their number
_BEGAN, _LOOKS = 0, 1
WAIT_WORDS = 2
_HEADER = at.TABLE.dtype


@inner
def block_of(control, worker):
    """Returns the address of a worker's block in the control segment."""
    return control + at.WORKERS + at.WORKER_STRIDE * worker


@inner
def notify(control):
    """Wakes all sleepers, to look again at what they wait for."""
    add32(control + at.EVENT, 1)
    if load32(control + at.WAITERS) > 0:
        futex_wake(control + at.EVENT)


@inner
def tell_watchers(base):
    """Wakes those that wait for another version of a table; each says again that it waits before it sleeps."""
    if load32(base + at.WATCHED) != 0:
        store32(base + at.WATCHED, 0)
        add32(base + at.CHANGED, 1)
        futex_wake(base + at.CHANGED)


# -- one wait --------------------------------------------------------------------------------------------------


@inner
def slice_end(control, me, began):
    """Until when a wait that began then continues without a look at signals and deadlines (the node's: control 0)."""
    end = began + SLICE_NANOSECONDS
    look_at = load64(block_of(control, me) + at.LOOK_AT) if control != 0 else 0
    return look_at if began < look_at < end else end


@inner
def nap_nanoseconds(waited):
    """How long to sleep between looks at what is not announced: the longer, the longer it has taken."""
    return min(max(_SHORTEST_NAP, waited // 16), _LONGEST_NAP)


@inner
def restart(wait):
    """The wait is over, and another begins: it gives way again before it sleeps, and has a new slice."""
    wait[_BEGAN] = 0
    wait[_LOOKS] = 0


@inner
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
    store64(block + at.WAIT_SINCE, monotonic_ns())
    store32(block + at.WAIT_KIND, kind)
    add32(block + at.WAIT_SEQ, 1)


@inner
def end_wait(control, me):
    """Says that this worker waits no more; returns how long it did, in nanoseconds."""
    block = block_of(control, me)
    if load32(block + at.WAIT_KIND) == at.NOT_WAITING:
        return 0
    waited = monotonic_ns() - load64(block + at.WAIT_SINCE)
    store64(block + at.WAITED_NS, load64(block + at.WAITED_NS) + waited)
    store32(block + at.WAIT_KIND, at.NOT_WAITING)
    return waited


@inner
def pause(control, me, wait, event, kind, table, stage, target):
    """Lets others run until the event word is no longer ``event``: DONE to look again, EINTR or TIMED_OUT."""
    return pause_until(control, me, wait, event, kind, table, stage, target, FOREVER)


@inner
def pause_until(control, me, wait, event, kind, table, stage, target, until):
    """As ``pause``, but no longer than until then."""
    wait[_LOOKS] += 1
    if wait[_LOOKS] <= _YIELDS:
        sched_yield()
        return DONE
    publish_wait(control, me, kind, table, stage, target)
    # The slice counts from the first sleep, not from the last wake: others' rounds wake us without end, and
    # signals and deadlines must be looked at all the same.
    now = monotonic_ns()
    if wait[_BEGAN] == 0:
        wait[_BEGAN] = now
    left = slice_end(control, me, wait[_BEGAN]) - now
    if left <= 0:
        return TIMED_OUT
    if until <= now:
        return DONE
    add32(control + at.WAITERS, 1)
    code = futex_wait(control + at.EVENT, event, min(left, until - now))
    add32(control + at.WAITERS, -1)
    if code == EINTR or (code == TIMED_OUT and left <= until - now):
        return code
    return DONE


# -- conditions ------------------------------------------------------------------------------------------------


@inner
def is_live(control, worker):
    """Returns whether a worker is alive and has not left."""
    block = block_of(control, worker)
    return load32(block + at.LIVENESS) == at.ALIVE and load32(block + at.PARTICIPATION) == at.ACTIVE


@inner
def is_lost(control, worker):
    """Returns whether a worker died, or exited without leaving."""
    return load32(block_of(control, worker) + at.LIVENESS) == at.LOST


@inner
def _gate_state(control, continues):
    """Of a barrier across hosts that the node has not released: one that was lost may have taken its adds with it."""
    for worker in range(load32(control + at.CAPACITY)):
        if continues == 0 and is_lost(control, worker):
            return LOST_SOMEONE
    return NOT_READY


@inner
def _barrier_state(control, target):
    continues, gated = load32(control + at.CONTINUE_WITHOUT_LOST), load32(control + at.SPANS_HOSTS) == 1
    held = gated and load64(control + at.RELEASED) < target  # first: who was lost before it was let go is seen below
    state = READY
    for worker in range(load32(control + at.CAPACITY)):
        reached = block_of(control, worker) + at.BARRIER
        if load64(reached) >= target:
            continue
        # between hosts the node awaits those that live: how far others' are is shown here late, and wakes nobody
        if not gated and is_live(control, worker):
            state = max(state, NOT_READY)
        # looked at again once it is lost: between the two it may have come, and died after that
        if continues == 0 and is_lost(control, worker) and load64(reached) < target:
            return LOST_SOMEONE
    if held:
        state = _gate_state(control, continues)
        # let go meanwhile: looked at once more, as the lost may have gone after that
        return NOT_READY if load64(control + at.RELEASED) >= target else state
    return state


@kernel
def barrier(control: Address, me: Int, target: Int) -> Int:
    """Arrives at barrier number ``target`` (once) and waits until every live worker has."""
    block = block_of(control, me)
    if load64(block + at.BARRIER) < target:
        store64(block + at.BARRIER, target)
        if _barrier_state(control, target) == READY:
            store64(block + at.PASSED, target)
            notify(control)
            return DONE
    wait = words(WAIT_WORDS)
    while True:
        event = load32(control + at.EVENT)
        state = _barrier_state(control, target)
        if state != NOT_READY:
            if state == READY:
                store64(block + at.PASSED, target)
            end_wait(control, me)
            return state
        code = pause(control, me, wait, event, at.FOR_BARRIER, 0, 0, target)
        if code != DONE:
            return code


@inner
def header_of(base):
    """Returns a table's header as a record: for the words that are written once."""
    return record_at(base, _HEADER)


@inner
def line_of(base, worker):
    """Returns the address of a worker's line in a table."""
    return base + header_of(base).lines + worker * at.LINE_STRIDE


@inner
def end_table_wait(control, base, me):
    """Like ``end_wait``, and the time counts for the table."""
    waited = end_wait(control, me)
    if waited > 0:
        add64(line_of(base, me) + at.LINE_WAITED, waited)


@inner
def _clock_state(control, base, target):
    continues = load32(control + at.CONTINUE_WITHOUT_LOST)
    state = READY
    for worker in range(load32(control + at.CAPACITY)):
        line = line_of(base, worker)
        if load32(line + at.ENROLLED) == 0 or load64(line + at.CLOCK) >= target:
            continue
        if is_live(control, worker):
            state = max(state, NOT_READY)
        if continues == 0 and is_lost(control, worker) and load64(line + at.CLOCK) < target:
            return LOST_SOMEONE  # looked at again, as above
    return state


@kernel
def wait_clock(control: Address, base: Address, me: Int, target: Int) -> Int:
    """Waits until every live worker of the table has done ``target`` ticks."""
    wait = words(WAIT_WORDS)
    while True:
        event = load32(control + at.EVENT)
        state = _clock_state(control, base, target)
        if state != NOT_READY:
            end_table_wait(control, base, me)
            return state
        code = pause(control, me, wait, event, at.FOR_CLOCK, header_of(base).table_id, 0, target)
        if code != DONE:
            return code


@inner
def tick(control, base, me):
    """One tick of this worker's clock of the table."""
    add64(line_of(base, me) + at.CLOCK, 1)  # a worker's threads may tick at once
    notify(control)


@kernel
def wake(control: Address) -> None:
    """As ``notify``, from Python."""
    notify(control)


@kernel
def set_long(address: Address, value: Int) -> None:
    """Stores a word, as kernels store it."""
    store64(address, value)


@kernel
def begin_wait(control: Address, me: Int, kind: Int32, table: Int, stage: Int, target: Int) -> None:
    """As ``publish_wait``, from Python."""
    publish_wait(control, me, kind, table, stage, target)


@kernel
def finish_wait(control: Address, me: Int) -> Int:
    """As ``end_wait``, from Python."""
    return end_wait(control, me)
