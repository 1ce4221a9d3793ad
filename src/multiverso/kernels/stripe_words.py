"""Rows under words: 8 bytes for each block of rows are lock, version and owner at once.

Words of arrays and matrices, and of rows of keyed tables (`kernels/keyed/row_words.py`), follow this one protocol.

A writer takes the word by one compare-and-swap and releases it by one store that counts its version up; a reader
copies what it wants and looks whether the word is free and still the same. Readers write no shared memory::

    word   [version 44 | owner's attachment 8 | owner's undo slot + 1: 12]     the low 20 bits are 0: it is free

Each thread that writes has an *undo slot*, which says which word it is about to take and keeps the row as it was before
the change. A worker that meets the word of a dead owner takes that copy into its own undo slot, takes the word over,
puts the row back, and continues: a row is changed wholly or not at all, and a killed call has changed an exact prefix
of its rows. An owner that is alive and stopped is waited for until the caller's deadline.

A worker's number has an *attachment* number, a new one for each process that attaches with it, so that the words of a
dead process are told from those of its replacement.

Correctness rests on the order of the stores: the undo slot names the word before the word is taken, the copy is
complete before the undo slot names the row, and the row is named before its first byte changes. An operation on a whole
table takes the same words and keeps no copies: what a worker had added to a block when it was killed stays as it is.
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
_UNDO_SLOT = (1 << at.UNDO_BITS) - 1
_ATTACHMENT = (1 << at.ATTACHMENT_BITS) - 1

_PAUSES, YIELDS = 20, 50
_AHEAD = 16  # rows that are on their way from memory meanwhile
_TRIES = 64  # of a read without the word


class Rows(NamedTuple):
    """Where a table's rows lie, and the words and undo slots that guard them: addresses in this process, and bytes."""

    table: int  # the table's number, to show in waits
    counts: int  # this worker's counters of what happens to words
    words: int
    spacing: int  # word w lies at words + (w << spacing)
    shift: int  # row r is guarded by word r >> shift
    undo_slots: int
    undo_bytes: int  # from one undo slot to the next
    each: int  # undo slots of a worker; with 1, an undo slot's number is its worker's
    copy: int  # where an undo slot's copy begins
    values: int
    stride: int  # from one row to the next
    kept: int  # bytes of a row that an undo slot keeps; 0: none
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
def owner_word(attachment, undo):
    """What stands in a word that an undo slot holds, by its number, in an attachment of its worker's number."""
    return (attachment << at.UNDO_BITS) | (undo + 1)


@inner
def undo_slot_in(word):
    """Returns the number of the undo slot that holds a word; -1: none does."""
    return (word & _UNDO_SLOT) - 1


@inner
def attachment_in(word):
    """Returns the attachment that holds a word."""
    return (word >> at.UNDO_BITS) & _ATTACHMENT


# -- undo slots ------------------------------------------------------------------------------------------------


@inner
def attachment_of(control, me):
    """Which attachment a worker is; the node, which may know of no control segment, has only one."""
    return load_acquire64(block_of(control, me) + at.ATTACHMENT) if control != 0 else 1


@inner
def take_undo_slot(rows, control, me, position):
    """Address of an undo slot of this worker's that no other thread of it uses, or -TIMED_OUT.

    ``position`` is how far a call that changes rows has come; -1: this one changes none. It is in the slot before the
    slot says which attachment uses it: where a worker is killed between the two stores, the slot must not vouch for the
    position that the call before it had reached.

    Where a worker has only one, it makes one call at a time: the slot is that call's already, with its position.
    """
    attachment = attachment_of(control, me)
    first = rows.undo_slots + rows.undo_bytes * rows.each * me
    if rows.each == 1:
        return first
    began = 0
    tries = 0
    while True:
        for slot in range(rows.each):
            undo = first + rows.undo_bytes * slot
            user = undo + at.UNDO_USER
            if load_acquire64(user) == 0 and compare_swap64(user, 0, -attachment) == 0:
                store_release64(undo + at.UNDO_POSITION, position)
                store_release64(user, attachment)
                return undo
        tries += 1
        if tries <= YIELDS:
            sched_yield()
            continue
        now = monotonic_ns()
        if began == 0:
            began = now
        if now >= slice_end(control, me, began):
            return -TIMED_OUT
        futex_wait(first + at.UNDO_USER, load32(first + at.UNDO_USER), nap_nanoseconds(now - began))


@inner
def release_undo_slot(undo):
    """Releases an undo slot that ``take_undo_slot`` returned."""
    store_release64(undo + at.UNDO_USER, 0)


@inner
def owner_of(rows, control, me, undo):
    """What stands in a word that an undo slot of worker ``me`` holds, in its current attachment."""
    attachment = attachment_of(control, me)
    return owner_word(attachment, (undo - rows.undo_slots) // rows.undo_bytes)


@inner
def worker_of(rows, owner):
    """Returns the number of the worker whose undo slot an owner names."""
    return undo_slot_in(owner) // rows.each


@inner
def has_died(control, worker, attachment):
    """Whether an attachment is over: its worker's number has another one, or none."""
    block = block_of(control, worker)
    # the node's word for it: a new process with the number may never come to this table
    if load_acquire64(block + at.ATTACHMENT) != attachment:
        return True
    return load32(block + at.LIVENESS) != at.ALIVE


@inner
def is_dead(rows, control, owner):
    """Whether the owner of a word will never release it."""
    return control != 0 and has_died(control, worker_of(rows, owner), attachment_in(owner))


@inner
def keep(rows, undo, row):
    """The undo slot keeps a row as it is, before its first byte changes."""
    if rows.kept == 0:
        return
    move_row(undo + rows.copy, rows.values + row * rows.stride, rows.kept)
    for state in range(rows.states):
        place = rows.state + state * rows.state_stride + row * rows.stride
        move_row(undo + rows.copy + (state + 1) * rows.kept, place, rows.kept)
    store_release64(undo + at.UNDO_ROW, row + 1)
    fence_release()


@inner
def _put_back(rows, undo, row):
    move(rows.values + row * rows.stride, undo + rows.copy, rows.kept)
    for state in range(rows.states):
        place = rows.state + state * rows.state_stride + row * rows.stride
        move(place, undo + rows.copy + (state + 1) * rows.kept, rows.kept)


@inner
def _take_over(rows, owner, undo, word, value):
    """The word's owner is dead: its copy goes into my undo slot first, then the word to me, then the row back."""
    address = word_at(rows, word)
    dead = rows.undo_slots + rows.undo_bytes * undo_slot_in(value)
    row = load_acquire64(dead + at.UNDO_ROW) - 1  # of this word, if the swap below succeeds
    same = dead == undo  # an earlier attachment's, of this very slot: the copy is there already
    if not same:
        name_word(undo, word)
        if row >= 0:
            move(undo + rows.copy, dead + rows.copy, rows.kept * (1 + rows.states))
            store_release64(undo + at.UNDO_ROW, row + 1)
    if compare_swap64(address, value, (value & ~OWNER) | owner) != value:
        if not same:
            store_release64(undo + at.UNDO_ROW, 0)
        return
    add64(rows.counts + at.TAKEN_OVER, 1)
    if row >= 0:
        fence_release()
        _put_back(rows, undo, row)
        add64(rows.counts + at.PUT_BACK, 1)
    store_release64(address, (value & ~OWNER) + VERSION)
    store_release64(undo + at.UNDO_ROW, 0)


@inner
def settle_undo_slots(rows, control, me):
    """A new attachment settles what earlier ones had begun: one word for each undo slot, no more."""
    attachment = attachment_of(control, me)
    for slot in range(rows.each):
        undo = rows.undo_slots + rows.undo_bytes * (rows.each * me + slot)
        if abs(load_acquire64(undo + at.UNDO_USER)) == attachment:
            continue  # a thread of this attachment is using it
        owner = owner_of(rows, control, me, undo)
        word = load_acquire64(undo + at.UNDO_WORD) - 1
        if word >= 0:
            value = load_acquire64(word_at(rows, word))
            # of any earlier attachment: the last one may have been killed before it came here
            if undo_slot_in(value) == undo_slot_in(owner) and value & OWNER != owner:
                _take_over(rows, owner, undo, word, value)
        store_release64(undo + at.UNDO_ROW, 0)
        store_release64(undo + at.UNDO_WORD, 0)
        store_release64(undo + at.UNDO_USER, 0)


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
def await_word(rows, control, me, undo, word):
    """Waits until nobody holds a word, taking it over from the dead: its value, or -TIMED_OUT."""
    address = word_at(rows, word)
    owner = owner_of(rows, control, me, undo)
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
            _take_over(rows, owner, undo, word, value)
            continue
        tries += 1
        code = nap(rows, control, me, value, address, tries, began)
        if code != 0:
            return -code


@inner
def name_word(undo, word):
    """The undo slot says which word it is about to take, and that it keeps no row yet."""
    store_release64(undo + at.UNDO_ROW, 0)
    store_release64(undo + at.UNDO_WORD, word + 1)


@inner
def _hold_slowly(rows, control, me, owner, undo, word):
    address = word_at(rows, word)
    while True:
        value = await_word(rows, control, me, undo, word)
        if value < 0:
            return value
        if compare_swap64(address, value, value | owner) == value:
            return value


@inner
def hold(rows, control, me, owner, undo, word):
    """Takes a word with an undo slot of this worker's: its value before, or -TIMED_OUT."""
    address = word_at(rows, word)
    name_word(undo, word)
    value = load_acquire64(address)
    if value & OWNER != 0 or compare_swap64(address, value, value | owner) != value:
        value = _hold_slowly(rows, control, me, owner, undo, word)
        if value < 0:
            return value
    fence_release()  # readers must not see what is written before the word
    return value


@inner
def release(rows, word, value):
    """Releases a word that was ``value`` before, with its next version: what it guards has changed."""
    store_release64(word_at(rows, word), value + VERSION)


@inner
def release_unchanged(rows, word, value):
    """Releases a word as it was: nothing has changed."""
    store_release64(word_at(rows, word), value)


@inner
def change_rows(rows, control, me, undo, ids, first, ahead, send_for, change, what):
    """Changes one row after another, from ``ids[first]`` on, each under its word; those below 0 are left out.

    Args:
        ahead: how many rows are sent for before they are needed.
        send_for: ``send_for(rows, row, what)`` does so.
        change: ``change(row, k, what)`` changes what the k-th id names.

    Returns:
        ``(done << 16) | code``.
    """
    owner, words, spacing, shift = owner_of(rows, control, me, undo), rows.words, rows.spacing, rows.shift
    values, stride, kept, states = rows.values, rows.stride, rows.kept, rows.states
    for k in range(first, min(first + ahead, ids.size)):
        send_for(rows, int(ids[k]), what)
    for k in range(first, ids.size):
        if k + ahead < ids.size:
            send_for(rows, int(ids[k + ahead]), what)
        row = int(ids[k])
        if row < 0:
            continue
        # `rows` is large to hand on for each row, so what is quick of `hold`, `keep` and `release` is here
        address = words + ((row >> shift) << spacing)
        store_release64(undo + at.UNDO_POSITION, k)
        name_word(undo, row >> shift)
        value = load_acquire64(address)
        if value & OWNER != 0 or compare_swap64(address, value, value | owner) != value:
            value = hold(rows, control, me, owner, undo, row >> shift)
            if value < 0:
                return (k << 16) | -value
        fence_release()  # readers must not see what is written before the word
        if states > 0:
            keep(rows, undo, row)
        elif kept > 0:
            move_row(undo + rows.copy, values + row * stride, kept)
            store_release64(undo + at.UNDO_ROW, row + 1)
            fence_release()
        change(row, k, what)
        store_release64(address, value + VERSION)
    store_release64(undo + at.UNDO_POSITION, ids.size)
    return 0


@inner
def settled(rows, control, me, word):
    """Waits until nobody holds a word, for a caller that has no undo slot: its value, or -TIMED_OUT."""
    value = load_acquire64(word_at(rows, word))
    if value & OWNER == 0:
        return value
    undo = take_undo_slot(rows, control, me, -1)
    if undo < 0:
        return undo
    value = await_word(rows, control, me, undo, word)
    release_undo_slot(undo)
    return value


@inner
def _read_held(rows, control, me, row, to, size):
    """Reads a row of a hot block under its word, which is released unchanged: 0, or a code."""
    undo = take_undo_slot(rows, control, me, -1)
    if undo < 0:
        return -undo
    word = row >> rows.shift
    value = hold(rows, control, me, owner_of(rows, control, me, undo), undo, word)
    if value >= 0:
        move(to, rows.values + row * rows.stride, size)
        release_unchanged(rows, word, value)
    release_undo_slot(undo)
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
