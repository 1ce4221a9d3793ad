"""Whole tables, asynchronously: one stripe after another, each under its word.

The inner loops are functions of their own that get slices: written as ``for i in range(lo, hi)`` over whole
arrays they lose their vector code. A worker begins at its own stripe, so that workers do not queue up.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,no-any-return"

from __future__ import annotations

import numpy as np

from multiverso.compiling.atomics import (
    add64,
    array_at,
    call_update,
    fence_acquire,
    futex_wake,
    load32,
    load64,
    load_acquire64,
    scratch,
    store32,
    store64,
)
from multiverso.compiling.declaring import Address, Data, Int, inner, kernel
from multiverso.kernels.locking import rows_of
from multiverso.kernels.stripe_words import (
    OWNER,
    hold,
    owner_of,
    release,
    release_unchanged,
    release_undo_slot,
    take_undo_slot,
    word_at,
)
from multiverso.kernels.waits import header_of, line_of, tell_watchers, tick
from multiverso.layout import words as at

PART = 4096  # elements
_TRIES = 4  # of a read of a stripe without its word
_BEHIND_HYPER = 8 + 1  # places for the most hyperparameters and a count


@inner
def add_into(table, delta):
    """``table += delta``."""
    for i in range(table.size):
        table[i] += delta[i]


@inner
def copy_into(out, table):
    """``out = table``."""
    for i in range(out.size):
        out[i] = table[i]


@inner
def push_pull(table, local, last):
    """``table += local - last``; then both are what the table is."""
    for i in range(table.size):
        value = table[i] + (local[i] - last[i])
        table[i] = value
        local[i] = value
        last[i] = value


@inner
def subtract_into(out, a, b):
    """``out = a - b``."""
    for i in range(out.size):
        out[i] = a[i] - b[i]


@inner
def store_both(values, local, last):
    """``local = last = values``."""
    for i in range(values.size):
        value = values[i]
        local[i] = value
        last[i] = value


@inner
def version_of(base):
    """Adds and exchanges done by all workers."""
    total = 0
    for worker in range(header_of(base).node_line):
        line = line_of(base, worker)
        total += load64(line + at.ADDS) + load64(line + at.EXCHANGES)
    return total


@inner
def update_in_step(base, update, offset, values, delta, state, step, hyper):
    """Runs a compiled updater on part of a table that begins ``offset`` elements in; ``hyper``: its hyperparameters.

    If the updater counts the table's steps, it finds the count behind its hyperparameters: in a copy of them, as
    other workers may be in another step.
    """
    itemsize = header_of(base).itemsize
    place = header_of(base).step_place
    if place > 0:
        mine = scratch(_BEHIND_HYPER, values)
        copy_into(mine[: place - 1], array_at(hyper, place - 1, values))
        mine[place - 1] = load64(base + at.STEPS_BEFORE) + step
        hyper = np.int64(mine.ctypes.data)
    call_update(
        update,
        values.ctypes.data,
        delta.ctypes.data,
        base + state + offset * itemsize,
        header_of(base).elements,
        hyper,
        values.size,
    )


@inner
def add_with(base, update, offset, values, delta):
    """Adds at once to a part that begins ``offset`` elements in, plainly or by an updater, as the next step."""
    if update == 0:
        add_into(values, delta)
    else:
        step = version_of(base) + 1 if header_of(base).step_place > 0 else 0
        update_in_step(base, update, offset, values, delta, header_of(base).state_0, step, base + at.HYPER)


@inner
def exchange_with(base, update, offset, values, local, last, delta):
    """As ``add_with``, of ``local - last``; then both are what the values are. ``delta`` has room for a PART."""
    if update == 0:
        push_pull(values, local, last)
        return
    for a in range(0, values.size, PART):
        b = min(values.size, a + PART)
        subtract_into(delta[: b - a], local[a:b], last[a:b])
        add_with(base, update, offset + a, values[a:b], delta[: b - a])
        store_both(values[a:b], local[a:b], last[a:b])


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
    """Counts an operation (ADDS, GETS or EXCHANGES) and its bytes in this worker's line; returns the line."""
    line = line_of(base, me)
    add64(line + what, 1)
    add64(line + at.BYTES, size * header_of(base).itemsize)
    tell_watchers(base)
    return line


@inner
def tell_node(control):
    """Wakes the node if it has gone to sleep until a table changes; it looks once more between saying so and that."""
    if load32(control + at.NODE_RESTS) != 0:
        store32(control + at.NODE_RESTS, 0)
        futex_wake(control + at.NODE_RESTS)


@inner
def end_add(control, base, me, size):
    """Counts an add, and tells the node of it: other hosts have to know of it."""
    record_operation(base, me, at.ADDS, size)
    tell_node(control)


@inner
def end_read(control, base, me, what, size, ticks):
    """Counts a read and how stale it was, and ends a tick of the clock if reads do; an exchange is an add, too."""
    record_staleness(base, record_operation(base, me, what, size))
    if what == at.EXCHANGES:
        tell_node(control)
    if ticks:
        tick(control, base, me)


@inner
def end_call(call):
    """Everything is done: said in the same step as its effects, so that no exception comes between."""
    store64(call + at.CALL_COMPLETE, 1)
    store64(call + at.CALL_DONE, 0)


@inner
def next_stripe(base, me, done):
    """Returns the stripe that comes after ``done`` others: each worker begins at one of its own."""
    stripes = header_of(base).stripe_count
    return (me * stripes // max(header_of(base).node_line, me + 1) + done) % stripes


@inner
def change_stripes(control, base, me, size, call, change, what):
    """Changes one stripe after another under its word: 0, or why it stopped; the call's record says where.

    ``change(base, lo, hi, what)`` does so with the elements from ``lo`` to ``hi``, and returns whether any are others.
    """
    stripes, length = header_of(base).stripe_count, header_of(base).stripe_size
    rows = rows_of(base, me)
    undo = take_undo_slot(rows, control, me, -1)
    if undo < 0:
        return -undo
    owner = owner_of(rows, control, me, undo)
    for done in range(load64(call + at.CALL_DONE), stripes):
        stripe = next_stripe(base, me, done)
        word = hold(rows, control, me, owner, undo, stripe)
        if word < 0:
            release_undo_slot(undo)
            return -word
        lo = stripe * length
        if change(base, lo, min(size, lo + length), what):
            release(rows, stripe, word)
        else:
            release_unchanged(rows, stripe, word)
        store64(call + at.CALL_DONE, done + 1)
    release_undo_slot(undo)
    return 0


@inner
def _add_stripe(base, lo, hi, what):
    update, values, delta = what
    add_with(base, update, lo, values[lo:hi], delta[lo:hi])
    return True


@kernel
def add(control: Address, base: Address, update: Address, me: Int, delta: Data, call: Address) -> Int:
    """Adds ``delta`` to the whole table, through its updater: 0, or why it stopped; the call's record says where."""
    values = array_at(base + header_of(base).buffer_0, delta.size, delta)
    code = change_stripes(control, base, me, delta.size, call, _add_stripe, (update, values, delta))
    if code != 0:
        return code
    end_add(control, base, me, delta.size)
    end_call(call)
    return 0


@inner
def read_stripe(rows, control, me, stripe, out, values):
    """Copies a stripe as it is at one moment: the word that it had then, or -TIMED_OUT."""
    address = word_at(rows, stripe)
    for _ in range(_TRIES):
        word = load_acquire64(address)
        if word & OWNER != 0:
            break
        copy_into(out, values)
        fence_acquire()
        if load_acquire64(address) == word:
            return word
    undo = take_undo_slot(rows, control, me, -1)
    if undo < 0:
        return undo
    word = hold(rows, control, me, owner_of(rows, control, me, undo), undo, stripe)
    if word >= 0:
        copy_into(out, values)
        release_unchanged(rows, stripe, word)
    release_undo_slot(undo)
    return word


@kernel
def get(control: Address, base: Address, me: Int, out: Data, ticks: Int, call: Address) -> Int:
    """Copies the whole table to ``out``, each stripe as it is at one moment: 0, or why it stopped."""
    head = header_of(base)
    values = array_at(base + head.buffer_0, out.size, out)
    stripes, length = head.stripe_count, head.stripe_size
    rows = rows_of(base, me)
    for done in range(load64(call + at.CALL_DONE), stripes):
        stripe = next_stripe(base, me, done)
        lo = stripe * length
        hi = min(out.size, lo + length)
        word = read_stripe(rows, control, me, stripe, out[lo:hi], values[lo:hi])
        if word < 0:
            return -word
        store64(call + at.CALL_DONE, done + 1)
    end_read(control, base, me, at.GETS, out.size, ticks)
    end_call(call)
    return 0


@inner
def _put_stripe(base, lo, hi, what):
    values, source = what
    copy_into(values[lo:hi], source[lo:hi])
    return True


@kernel
def put(control: Address, base: Address, me: Int, source: Data, call: Address) -> Int:
    """Overwrites the table: initial values and loading."""
    values = array_at(base + header_of(base).buffer_0, source.size, source)
    code = change_stripes(control, base, me, source.size, call, _put_stripe, (values, source))
    if code != 0:
        return code
    add64(base + at.WRITTEN, 1)
    tell_node(control)
    end_call(call)
    return 0


@inner
def _exchange_stripe(base, lo, hi, what):
    update, values, local, last, delta = what
    exchange_with(base, update, lo, values[lo:hi], local[lo:hi], last[lo:hi], delta)
    return True


@kernel
def exchange(
    control: Address, base: Address, update: Address, me: Int, local: Data, last: Data, ticks: Int, call: Address
) -> Int:
    """Adds ``local - last`` and reads the result into both, in one pass: 0, or why it stopped."""
    values = array_at(base + header_of(base).buffer_0, local.size, local)
    what = update, values, local, last, scratch(PART, local)
    code = change_stripes(control, base, me, local.size, call, _exchange_stripe, what)
    if code != 0:
        return code
    end_read(control, base, me, at.EXCHANGES, 2 * local.size, ticks)
    end_call(call)
    return 0


@kernel
def version(base: Address) -> Int:
    """Returns how many adds and exchanges all workers have done."""
    return version_of(base)
