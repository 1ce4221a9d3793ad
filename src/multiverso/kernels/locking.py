"""A table's stripes under their words: for whole-table operations, and for rows.

One stripe at a time, with a hand of this worker's that was taken before::

    rows = rows_of(base, me)
    hand = take_hand(rows, control, me, -1)
    if hand < 0:
        return -hand
    owner = owner_of(rows, control, me, hand)
    ...
    value = hold(rows, control, me, owner, hand, stripe)
    if value >= 0:
        <change the stripe>
        let_go(rows, stripe, value)
    ...
    drop_hand(hand)

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
    drop_hand,
    give_back,
    hand_in,
    hold,
    let_go,
    owner_of,
    settle_hands,
    take_hand,
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
        base + head.hands,
        head.hand_stride,
        at.HANDS_EACH,
        at.HAND_BYTES,
        base + head.buffer_0,
        stride,
        head.kept,
        base + head.state_0,
        head.elements * head.itemsize,
        head.state_count,
    )


@inner
def lock_stripe(control, base, me, stripe):
    """Takes a stripe's word, and a hand for it: HELD, or TIMED_OUT."""
    rows = rows_of(base, me)
    hand = take_hand(rows, control, me, -1)
    if hand < 0:
        return -hand
    value = hold(rows, control, me, owner_of(rows, control, me, hand), hand, stripe)
    if value < 0:
        drop_hand(hand)
        return -value
    return HELD


@inner
def unlock_stripe(base, me, stripe):
    """Lets go of a stripe that ``lock_stripe`` has taken: what it guards has changed."""
    rows = rows_of(base, me)
    held = load_acquire64(word_at(rows, stripe))
    let_go(rows, stripe, held & ~OWNER)
    drop_hand(rows.hands + rows.hand_bytes * hand_in(held))


@inner
def leave_stripe(base, me, stripe):
    """Lets go of a stripe that ``lock_stripe`` has taken: what it guards is as it was."""
    rows = rows_of(base, me)
    held = load_acquire64(word_at(rows, stripe))
    give_back(rows, stripe, held & ~OWNER)
    drop_hand(rows.hands + rows.hand_bytes * hand_in(held))


@kernel
def enter(control: Address, base: Address, me: Int) -> None:
    """A new life of a worker's number comes to a table: what an earlier one had in hand is put in order."""
    settle_hands(rows_of(base, me), control, me)


@kernel
def hold_stripe(control: Address, base: Address, me: Int, stripe: Int) -> Int:
    """Takes a stripe's word for as long as this process likes: 0 or TIMED_OUT. For tests and scripted faults."""
    return lock_stripe(control, base, me, stripe)


@kernel
def free_stripe(base: Address, me: Int, stripe: Int) -> None:
    """The end of :func:`hold_stripe`."""
    unlock_stripe(base, me, stripe)
