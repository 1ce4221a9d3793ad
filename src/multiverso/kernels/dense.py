"""Whole tables, asynchronously: one stripe after another, each under its lock.

The inner loops are functions of their own that get slices: written as ``for i in range(lo, hi)`` over whole
arrays they lose their vector code. A worker begins at its own stripe, so that workers do not queue up.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,no-any-return"

from __future__ import annotations

from multiverso import layout as at
from multiverso.kernels.atomics import add64, array_at, call_update, load64, scratch, store64
from multiverso.kernels.codes import HELD
from multiverso.kernels.declaring import Address, Data, Int, inner, kernel
from multiverso.kernels.locking import lock_stripe, unlock_stripe
from multiverso.kernels.waits import line_of, tick

_CHUNK = 4096


@inner
def add_into(table, delta):
    for i in range(table.size):
        table[i] += delta[i]


@inner
def copy_into(out, table):
    for i in range(out.size):
        out[i] = table[i]


@inner
def push_pull(table, local, last):
    for i in range(table.size):
        value = table[i] + (local[i] - last[i])
        table[i] = value
        local[i] = value
        last[i] = value


@inner
def subtract_into(out, a, b):
    for i in range(out.size):
        out[i] = a[i] - b[i]


@inner
def store_both(values, local, last):
    for i in range(values.size):
        value = values[i]
        local[i] = value
        last[i] = value


@inner
def update_with(base, update, offset, values, delta, state):
    """Runs a compiled updater on part of a table that begins ``offset`` elements in."""
    itemsize = load64(base + at.ITEMSIZE)
    call_update(
        update,
        values.ctypes.data,
        delta.ctypes.data,
        base + state + offset * itemsize,
        load64(base + at.ELEMENTS),
        base + at.HYPER,
        values.size,
    )


@inner
def version_of(base):
    """Adds and exchanges done by all workers."""
    total = 0
    for worker in range(load64(base + at.TABLE_WORKERS)):
        line = line_of(base, worker)
        total += load64(line + at.ADDS) + load64(line + at.EXCHANGES)
    return total


@inner
def record_staleness(base, line):
    """Records how many pushes of others came since this worker's last read."""
    now = version_of(base) - load64(line + at.ADDS) - load64(line + at.EXCHANGES)
    stale = now - load64(line + at.SEEN)
    store64(line + at.SEEN, now)
    store64(line + at.STALENESS_LAST, stale)
    if stale > load64(line + at.STALENESS_MAX):
        store64(line + at.STALENESS_MAX, stale)
    add64(line + at.STALENESS_SUM, stale)
    add64(line + at.STALENESS_COUNT, 1)


@inner
def record_operation(base, me, what, size):
    line = line_of(base, me)
    add64(line + what, 1)
    add64(line + at.BYTES, size * load64(base + at.ITEMSIZE))
    return line


@inner
def end_read(control, base, me, what, size, ticks):
    record_staleness(base, record_operation(base, me, what, size))
    if ticks:
        tick(control, base, me)


@inner
def end_call(call):
    """Everything is done: said in the same step as its effects, so that no exception comes between."""
    store64(call + at.CALL_COMPLETE, 1)
    store64(call + at.CALL_DONE, 0)


@inner
def next_stripe(base, me, done):
    stripes = load64(base + at.STRIPE_COUNT)
    return (me * stripes // max(load64(base + at.TABLE_WORKERS), me + 1) + done) % stripes


@kernel
def add(
    control: Address,
    base: Address,
    update: Address,
    me: Int,
    delta: Data,
    call: Address,
) -> Int:
    values = array_at(base + load64(base + at.BUFFER_0), delta.size, delta)
    stripes, length = load64(base + at.STRIPE_COUNT), load64(base + at.STRIPE_SIZE)
    for done in range(load64(call + at.CALL_DONE), stripes):
        stripe = next_stripe(base, me, done)
        code = lock_stripe(control, base, me, stripe)
        if code != HELD:
            return code
        lo = stripe * length
        hi = min(delta.size, lo + length)
        if update == 0:
            add_into(values[lo:hi], delta[lo:hi])
        else:
            update_with(base, update, lo, values[lo:hi], delta[lo:hi], load64(base + at.STATE_0))
        unlock_stripe(base, stripe)
        store64(call + at.CALL_DONE, done + 1)
    record_operation(base, me, at.ADDS, delta.size)
    end_call(call)
    return 0


@kernel
def get(
    control: Address,
    base: Address,
    me: Int,
    out: Data,
    ticks: Int,
    call: Address,
) -> Int:
    values = array_at(base + load64(base + at.BUFFER_0), out.size, out)
    stripes, length = load64(base + at.STRIPE_COUNT), load64(base + at.STRIPE_SIZE)
    for done in range(load64(call + at.CALL_DONE), stripes):
        stripe = next_stripe(base, me, done)
        code = lock_stripe(control, base, me, stripe)
        if code != HELD:
            return code
        lo = stripe * length
        hi = min(out.size, lo + length)
        copy_into(out[lo:hi], values[lo:hi])
        unlock_stripe(base, stripe)
        store64(call + at.CALL_DONE, done + 1)
    end_read(control, base, me, at.GETS, out.size, ticks)
    end_call(call)
    return 0


@kernel
def put(
    control: Address,
    base: Address,
    me: Int,
    source: Data,
    call: Address,
) -> Int:
    """Overwrites the table: initial values and loading."""
    values = array_at(base + load64(base + at.BUFFER_0), source.size, source)
    stripes, length = load64(base + at.STRIPE_COUNT), load64(base + at.STRIPE_SIZE)
    for stripe in range(load64(call + at.CALL_DONE), stripes):
        code = lock_stripe(control, base, me, stripe)
        if code != HELD:
            return code
        lo = stripe * length
        hi = min(source.size, lo + length)
        copy_into(values[lo:hi], source[lo:hi])
        unlock_stripe(base, stripe)
        store64(call + at.CALL_DONE, stripe + 1)
    add64(base + at.WRITTEN, 1)
    end_call(call)
    return 0


@kernel
def exchange(
    control: Address,
    base: Address,
    update: Address,
    me: Int,
    local: Data,
    last: Data,
    ticks: Int,
    call: Address,
) -> Int:
    values = array_at(base + load64(base + at.BUFFER_0), local.size, local)
    stripes, length = load64(base + at.STRIPE_COUNT), load64(base + at.STRIPE_SIZE)
    delta = scratch(_CHUNK, local)
    for done in range(load64(call + at.CALL_DONE), stripes):
        stripe = next_stripe(base, me, done)
        code = lock_stripe(control, base, me, stripe)
        if code != HELD:
            return code
        lo = stripe * length
        hi = min(local.size, lo + length)
        if update == 0:
            push_pull(values[lo:hi], local[lo:hi], last[lo:hi])
        else:
            state = load64(base + at.STATE_0)
            for a in range(lo, hi, _CHUNK):
                b = min(hi, a + _CHUNK)
                subtract_into(delta[: b - a], local[a:b], last[a:b])
                update_with(base, update, a, values[a:b], delta[: b - a], state)
                store_both(values[a:b], local[a:b], last[a:b])
        unlock_stripe(base, stripe)
        store64(call + at.CALL_DONE, done + 1)
    end_read(control, base, me, at.EXCHANGES, 2 * local.size, ticks)
    end_call(call)
    return 0


@kernel
def version(base: Address) -> Int:
    return version_of(base)
