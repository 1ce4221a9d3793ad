"""Rows of a matrix, asynchronously. A row lies in one stripe, so a read row is never torn."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,no-any-return"

from __future__ import annotations

from multiverso import layout as at
from multiverso.kernels.atomics import array_at, load64, store64
from multiverso.kernels.codes import BAD_ROW, HELD
from multiverso.kernels.declaring import Address, Data, Int, Words, inner, kernel
from multiverso.kernels.dense import (
    add_into,
    copy_into,
    end_call,
    end_read,
    record_operation,
    update_with,
)
from multiverso.kernels.locking import lock_stripe, unlock_stripe


@inner
def first_bad_row(ids, rows):
    for i in range(ids.size):
        if ids[i] < 0 or ids[i] >= rows:
            return i
    return -1


@kernel
def get_rows(
    control: Address,
    base: Address,
    me: Int,
    ids: Words,
    out: Data,
    ticks: Int,
    call: Address,
) -> Int:
    columns = load64(base + at.COLUMNS)
    elements = load64(base + at.ELEMENTS)
    first = load64(call + at.CALL_DONE)
    if first == 0:
        bad = first_bad_row(ids, elements // columns)
        if bad >= 0:
            return (bad << 16) | BAD_ROW
    values = array_at(base + load64(base + at.BUFFER_0), elements, out)
    rows_in_stripe = load64(base + at.STRIPE_SIZE) // columns
    held = -1
    for i in range(first, ids.size):
        row = ids[i]
        stripe = row // rows_in_stripe
        if stripe != held:
            if held >= 0:
                unlock_stripe(base, held)
            held = -1
            code = lock_stripe(control, base, me, stripe)
            if code != HELD:
                store64(call + at.CALL_DONE, i)
                return code
            held = stripe
        copy_into(out[i * columns : (i + 1) * columns], values[row * columns : (row + 1) * columns])
    if held >= 0:
        unlock_stripe(base, held)
    end_read(control, base, me, at.GETS, out.size, ticks)
    end_call(call)
    return 0


@kernel
def add_rows(
    control: Address,
    base: Address,
    update: Address,
    me: Int,
    ids: Words,
    delta: Data,
    call: Address,
) -> Int:
    columns = load64(base + at.COLUMNS)
    elements = load64(base + at.ELEMENTS)
    first = load64(call + at.CALL_DONE)
    if first == 0:
        bad = first_bad_row(ids, elements // columns)
        if bad >= 0:
            return (bad << 16) | BAD_ROW
    values = array_at(base + load64(base + at.BUFFER_0), elements, delta)
    rows_in_stripe = load64(base + at.STRIPE_SIZE) // columns
    held = -1
    for i in range(first, ids.size):
        row = ids[i]
        stripe = row // rows_in_stripe
        if stripe != held:
            if held >= 0:
                unlock_stripe(base, held)
            held = -1
            code = lock_stripe(control, base, me, stripe)
            if code != HELD:
                store64(call + at.CALL_DONE, i)
                return code
            held = stripe
        lo = row * columns
        part = delta[i * columns : (i + 1) * columns]
        if update == 0:
            add_into(values[lo : lo + columns], part)
        else:
            update_with(base, update, lo, values[lo : lo + columns], part, load64(base + at.STATE_0))
    if held >= 0:
        unlock_stripe(base, held)
    record_operation(base, me, at.ADDS, delta.size)
    end_call(call)
    return 0
