"""A table's stripes under their words: for whole-table operations, and for rows.

One stripe at a time, with an undo slot of this worker's that was taken before::

    rows = rows_of(base, me)
    undo slot = take_undo_slot(rows, control, me, -1)
    if undo < 0:
        return -undo
    owner = owner_of(rows, control, me, undo slot)
    ...
    value = hold(rows, control, me, owner, undo slot, stripe)
    if value >= 0:
        <change the stripe>
        release(rows, stripe, value)
    ...
    release_undo_slot(undo slot)

or, once in a while, ``lock_stripe`` and ``unlock_stripe``.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,no-any-return"

from __future__ import annotations

from multiverso.compiling.atomics import load_acquire64
from multiverso.compiling.declaring import Address, Int, inner, kernel
from multiverso.kernels.codes import HELD
from multiverso.kernels.stripe_words import (
    OWNER,
    Rows,
    hold,
    owner_of,
    release,
    release_unchanged,
    release_undo_slot,
    settle_undo_slots,
    take_undo_slot,
    undo_slot_in,
    word_at,
)
from multiverso.kernels.waits import header_of, line_of
from multiverso.layout import words as at


@inner
def rows_of(base, me):
    """The words of a table that has no rounds, as worker ``me`` uses them."""
    head = header_of(base)
    stride = head.columns * head.itemsize
    return Rows(
        head.table_id,
        line_of(base, me) + at.COUNTS,
        base + head.words,
        at.WORD_SPACING,
        head.shift,
        base + head.undo_slots,
        head.undo_stride,
        at.UNDO_SLOTS_EACH,
        at.UNDO_BYTES,
        base + head.buffer_0,
        stride,
        head.kept,
        base + head.state_0,
        head.elements * head.itemsize,
        head.state_count,
    )


@inner
def lock_stripe(control, base, me, stripe):
    """Takes a stripe's word, and an undo slot for it: HELD, or TIMED_OUT."""
    rows = rows_of(base, me)
    undo = take_undo_slot(rows, control, me, -1)
    if undo < 0:
        return -undo
    value = hold(rows, control, me, owner_of(rows, control, me, undo), undo, stripe)
    if value < 0:
        release_undo_slot(undo)
        return -value
    return HELD


@inner
def unlock_stripe(base, me, stripe, changed):
    """Releases a stripe that ``lock_stripe`` has taken, with its next version if what it guards has changed."""
    rows = rows_of(base, me)
    held = load_acquire64(word_at(rows, stripe))
    if changed:
        release(rows, stripe, held & ~OWNER)
    else:
        release_unchanged(rows, stripe, held & ~OWNER)
    release_undo_slot(rows.undo_slots + rows.undo_bytes * undo_slot_in(held))


@kernel
def enter(control: Address, base: Address, me: Int) -> None:
    """A new attachment comes to a table: what an earlier one had begun is settled."""
    settle_undo_slots(rows_of(base, me), control, me)


@kernel
def hold_stripe(control: Address, base: Address, me: Int, stripe: Int) -> Int:
    """Takes a stripe's word for as long as this process likes: 0 or TIMED_OUT. For tests and scripted faults."""
    return lock_stripe(control, base, me, stripe)


@kernel
def free_stripe(base: Address, me: Int, stripe: Int) -> None:
    """The end of `hold_stripe`."""
    unlock_stripe(base, me, stripe, True)
