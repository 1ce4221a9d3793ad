"""Rows under words: 8 bytes for each block of rows are lock, version and owner at once.

Words of arrays and matrices, and of rows of keyed tables (`kernels/keyed/row_words.py`), follow this one protocol.

A writer takes the word by one compare-and-swap and lets it go by one store that counts its version up; a reader
copies what it wants and looks whether the word is free and still the same. Nobody who reads writes shared memory::

    word   [version 44 | life of the owner's worker 8 | owner's hand + 1: 12]     the low 20 bits are 0: it is free

Each thread that writes has a *hand*, which says which word it is about to take and keeps the row as it was before the
change. Whoever meets the word of a dead owner takes that copy into its own hand, takes the word over, puts the row
back, and goes on: a row is changed wholly or not at all, and a killed call has changed an exact prefix of its rows. An
owner that is alive and stopped is waited for until the caller's deadline.

Correctness rests on the order of the stores: the hand names the word before the word is taken, the copy is complete
before the hand names the row, and the row is named before its first byte changes. An operation on a whole table takes
the same words and keeps no copies: what a worker had added to a block when it was killed stays as it is.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,no-any-return"

from __future__ import annotations

from typing import NamedTuple

from multiverso.compiling.atomics import (
    add64,
    compare_swap64,
    fence_acquire,
    fence_release,
    futex_wait,
    load32,
    load_acquire64,
    monotonic_ns,
    move,
    move_line,
    pause,
    prefetch,
    sched_yield,
    store_release64,
)
from multiverso.compiling.declaring import inner
from multiverso.kernels.codes import DONE, TIMED_OUT
from multiverso.kernels.waits import block_of, end_wait, nap_nanoseconds, publish_wait, slice_end
from multiverso.layout import words as at
from multiverso.layout.words import CACHE_LINE

OWNER, VERSION = at.OWNER, at.VERSION
_HAND = (1 << at.HAND_BITS) - 1
_LIFE = (1 << at.LIFE_BITS) - 1

_PAUSES, YIELDS = 20, 50
_AHEAD = 16  # rows that are on their way from memory meanwhile
_TRIES = 64  # of a read without the word


class Rows(NamedTuple):
    """Where a table's rows lie, and the words and hands that guard them: addresses in this process, and bytes."""

    table: int  # the table's number, for whoever looks at waits
    counts: int  # this worker's counters of what happens to words
    words: int
    spacing: int  # word w lies at words + (w << spacing)
    shift: int  # row r is guarded by word r >> shift
    hands: int
    hand_bytes: int  # from one hand to the next
    each: int  # hands of a worker; with 1, a hand's number is its worker's
    copy: int  # where a hand's copy begins
    values: int
    stride: int  # from one row to the next
    kept: int  # bytes of a row that a hand keeps; 0: none
    state: int  # the same row's part in the updater's first array
    state_stride: int  # from one of the updater's arrays to the next
    states: int


@inner
def word_at(rows, word):
    """Returns the address of a word."""
    return rows.words + (word << rows.spacing)


@inner
def move_row(to, source, nbytes):
    """Copies a row, by cache lines: to call libc for it takes longer than to copy 64 floats that are in the cache."""
    whole = nbytes & ~(CACHE_LINE - 1)
    for line in range(0, whole, CACHE_LINE):
        move_line(to + line, source + line)
    if whole < nbytes:
        move(to + whole, source + whole, nbytes - whole)


# -- owners ----------------------------------------------------------------------------------------------------


@inner
def owner_word(life, hand):
    """What stands in a word that a hand holds, by its number, in a life of its worker's number."""
    return (life << at.HAND_BITS) | (hand + 1)


@inner
def hand_in(word):
    """Returns the number of the hand that holds a word; -1: none does."""
    return (word & _HAND) - 1


@inner
def life_in(word):
    """Returns the life that the holder of a word is in."""
    return (word >> at.HAND_BITS) & _LIFE


# -- hands ---------------------------------------------------------------------------------------------------------


@inner
def life_of(control, me):
    """Which life of its number a worker is; the node, which may know of no control segment, has only one."""
    return load_acquire64(block_of(control, me) + at.LIFE_NUMBER) if control != 0 else 1


@inner
def take_hand(rows, control, me, position):
    """Address of a hand of this worker's that no other thread of it uses, or -TIMED_OUT.

    ``position`` is how far a call that changes rows has come; -1: this one changes none. It is in the hand before the
    hand says who is using it: where a worker is killed between the two stores, the hand must not vouch for the position
    that the call before it had reached.
    """
    life = life_of(control, me)
    first = rows.hands + rows.hand_bytes * rows.each * me
    began = 0
    tries = 0
    while True:
        for slot in range(rows.each):
            hand = first + rows.hand_bytes * slot
            user = hand + at.HAND_USER
            if load_acquire64(user) == 0 and compare_swap64(user, 0, -life) == 0:
                store_release64(hand + at.HAND_POSITION, position)
                store_release64(user, life)
                return hand
        tries += 1
        if tries <= YIELDS:
            sched_yield()
            continue
        now = monotonic_ns()
        if began == 0:
            began = now
        if now >= slice_end(control, me, began):
            return -TIMED_OUT
        futex_wait(first + at.HAND_USER, load32(first + at.HAND_USER), nap_nanoseconds(now - began))


@inner
def drop_hand(hand):
    """Gives a hand back that ``take_hand`` returned."""
    store_release64(hand + at.HAND_USER, 0)


@inner
def owner_of(rows, control, me, hand):
    """What stands in a word that is held by a hand of worker ``me``, in its current life."""
    life = life_of(control, me)
    return owner_word(life, (hand - rows.hands) // rows.hand_bytes)


@inner
def worker_of(rows, owner):
    """Returns the number of the worker whose hand an owner names."""
    return hand_in(owner) // rows.each


@inner
def has_died(control, worker, life):
    """Whether a life of a worker's number is over: the number has another one, or none."""
    block = block_of(control, worker)
    # the node's word for the life: a new life of the number may never come to this table
    if load_acquire64(block + at.LIFE_NUMBER) != life:
        return True
    return load32(block + at.LIVENESS) != at.ALIVE


@inner
def is_dead(rows, control, owner):
    """Whether the owner of a word will never let it go."""
    return control != 0 and has_died(control, worker_of(rows, owner), life_in(owner))


@inner
def keep(rows, hand, row):
    """The hand keeps a row as it is, before its first byte changes."""
    if rows.kept == 0:
        return
    move_row(hand + rows.copy, rows.values + row * rows.stride, rows.kept)
    for state in range(rows.states):
        place = rows.state + state * rows.state_stride + row * rows.stride
        move_row(hand + rows.copy + (state + 1) * rows.kept, place, rows.kept)
    store_release64(hand + at.HAND_ROW, row + 1)
    fence_release()


@inner
def _put_back(rows, hand, row):
    move(rows.values + row * rows.stride, hand + rows.copy, rows.kept)
    for state in range(rows.states):
        place = rows.state + state * rows.state_stride + row * rows.stride
        move(place, hand + rows.copy + (state + 1) * rows.kept, rows.kept)


@inner
def _take_over(rows, owner, hand, word, value):
    """The word's owner is dead: its copy goes into my hand first, then the word to me, then the row back."""
    address = word_at(rows, word)
    dead = rows.hands + rows.hand_bytes * hand_in(value)
    row = load_acquire64(dead + at.HAND_ROW) - 1  # of this word, if the swap below succeeds
    same = dead == hand  # an earlier life's of this very hand: the copy is there already
    if not same:
        name_word(hand, word)
        if row >= 0:
            move(hand + rows.copy, dead + rows.copy, rows.kept * (1 + rows.states))
            store_release64(hand + at.HAND_ROW, row + 1)
    if compare_swap64(address, value, (value & ~OWNER) | owner) != value:
        if not same:
            store_release64(hand + at.HAND_ROW, 0)
        return
    add64(rows.counts + at.TAKEN_OVER, 1)
    if row >= 0:
        fence_release()
        _put_back(rows, hand, row)
        add64(rows.counts + at.PUT_BACK, 1)
    store_release64(address, (value & ~OWNER) + VERSION)
    store_release64(hand + at.HAND_ROW, 0)


@inner
def settle_hands(rows, control, me):
    """A new life of a worker's number puts in order what earlier ones had in hand: one word a hand, no more."""
    life = life_of(control, me)
    for slot in range(rows.each):
        hand = rows.hands + rows.hand_bytes * (rows.each * me + slot)
        if abs(load_acquire64(hand + at.HAND_USER)) == life:
            continue  # a thread of this life is using it
        owner = owner_of(rows, control, me, hand)
        word = load_acquire64(hand + at.HAND_WORD) - 1
        if word >= 0:
            value = load_acquire64(word_at(rows, word))
            # of any earlier life: the last one may have been killed before it came here
            if hand_in(value) == hand_in(owner) and value & OWNER != owner:
                _take_over(rows, owner, hand, word, value)
        store_release64(hand + at.HAND_ROW, 0)
        store_release64(hand + at.HAND_WORD, 0)
        store_release64(hand + at.HAND_USER, 0)


# -- words ---------------------------------------------------------------------------------------------------------


@inner
def nap(rows, control, me, value, address, tries, began):
    """One turn of waiting for a word: DONE, or TIMED_OUT once a slice is over, to look at signals and deadlines."""
    if tries <= _PAUSES:
        pause()
    elif tries <= _PAUSES + YIELDS:
        sched_yield()
    else:
        if control != 0:
            publish_wait(control, me, at.FOR_WORD, rows.table, worker_of(rows, value), address - rows.words)
        now = monotonic_ns()
        if now >= slice_end(control, me, began):
            return TIMED_OUT
        futex_wait(address, load32(address), nap_nanoseconds(now - began))
    return DONE


@inner
def await_word(rows, control, me, hand, word):
    """Waits until nobody holds a word, taking it over from the dead: its value, or -TIMED_OUT."""
    address = word_at(rows, word)
    owner = owner_of(rows, control, me, hand)
    add64(rows.counts + at.WAITS, 1)
    began = monotonic_ns()
    tries = 0
    while True:
        value = load_acquire64(address)
        if value & OWNER == 0:
            if control != 0:
                add64(rows.counts + at.WAITED, end_wait(control, me))
            return value
        if is_dead(rows, control, value):
            _take_over(rows, owner, hand, word, value)
            continue
        tries += 1
        code = nap(rows, control, me, value, address, tries, began)
        if code != 0:
            return -code


@inner
def name_word(hand, word):
    """The hand says which word it is about to take, and that it keeps no row yet."""
    store_release64(hand + at.HAND_ROW, 0)
    store_release64(hand + at.HAND_WORD, word + 1)


@inner
def _hold_slowly(rows, control, me, owner, hand, word):
    address = word_at(rows, word)
    while True:
        value = await_word(rows, control, me, hand, word)
        if value < 0:
            return value
        if compare_swap64(address, value, value | owner) == value:
            return value


@inner
def hold(rows, control, me, owner, hand, word):
    """Takes a word with a hand of this worker's: its value before, or -TIMED_OUT."""
    address = word_at(rows, word)
    name_word(hand, word)
    value = load_acquire64(address)
    if value & OWNER != 0 or compare_swap64(address, value, value | owner) != value:
        value = _hold_slowly(rows, control, me, owner, hand, word)
        if value < 0:
            return value
    fence_release()  # readers must not see what is written before the word
    return value


@inner
def let_go(rows, word, value):
    """Gives a word back that was ``value`` before, with its next version: what it guards has changed."""
    store_release64(word_at(rows, word), value + VERSION)


@inner
def give_back(rows, word, value):
    """Gives a word back as it was: nothing has changed."""
    store_release64(word_at(rows, word), value)


@inner
def settled(rows, control, me, word):
    """Waits until nobody holds a word, for a caller that has no hand: its value, or -TIMED_OUT."""
    value = load_acquire64(word_at(rows, word))
    if value & OWNER == 0:
        return value
    hand = take_hand(rows, control, me, -1)
    if hand < 0:
        return hand
    value = await_word(rows, control, me, hand, word)
    drop_hand(hand)
    return value


@inner
def _read_held(rows, control, me, row, to, size):
    """Reads a row of a hot block under its word, which is given back unchanged: 0, or a code."""
    hand = take_hand(rows, control, me, -1)
    if hand < 0:
        return -hand
    word = row >> rows.shift
    value = hold(rows, control, me, owner_of(rows, control, me, hand), hand, word)
    if value >= 0:
        move(to, rows.values + row * rows.stride, size)
        give_back(rows, word, value)
    drop_hand(hand)
    return -min(value, 0)


@inner
def read_rows(rows, control, me, ids, out, size, first):
    """Copies ``size`` bytes of each row from ``ids[first]`` on; those below 0 are left out. ``(done << 16) | code``."""
    values, words, shift, stride = rows.values, rows.words, rows.shift, rows.stride
    spacing = rows.spacing
    for k in range(first, min(first + _AHEAD, ids.size)):
        for line in range(0, size, 64):
            prefetch(values + max(int(ids[k]), 0) * stride + line)
    for k in range(first, ids.size):
        if k + _AHEAD < ids.size:
            ahead = values + max(int(ids[k + _AHEAD]), 0) * stride
            for line in range(0, size, 64):
                prefetch(ahead + line)
        row = int(ids[k])
        if row < 0:
            continue
        place, to = values + row * stride, out + k * size
        address = words + ((row >> shift) << spacing)
        tries = 0
        while True:
            value = load_acquire64(address)
            if value & OWNER == 0:
                move_row(to, place, size)
                fence_acquire()
                if load_acquire64(address) == value:
                    break
            else:
                value = settled(rows, control, me, row >> shift)
                if value < 0:
                    return (k << 16) | -value
            tries += 1
            if tries > _TRIES:
                code = _read_held(rows, control, me, row, to, size)
                if code != 0:
                    return (k << 16) | code
                break
    return 0
