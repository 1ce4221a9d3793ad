"""Fresh rows of a keyed table, and how long a row that was found stays as it is.

A new key's row is claimed in the worker's undo slot first, with a few more for the next keys, so that no other worker
gets it and none is lost with a worker: the next process with its number continues with them. A row that was found may
be in use until the call that found it ends, so each call *pins* the epoch in which it begins; no call can be using what
was removed before every pinned epoch (epoch-based reclamation: Fraser, Practical lock-freedom, 2004). A call of a
worker that died counts no longer; one of a worker that was stopped only keeps rows from being used again.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,no-any-return"

from __future__ import annotations

from multiverso.compiling.atomics import (
    compare_swap64,
    fence_all,
    load32,
    load_acquire64,
    load_double,
    prefetch_to_write,
    store_int32,
    store_release64,
)
from multiverso.compiling.declaring import inner
from multiverso.kernels.keyed.initial_rows import store_number, write_initial
from multiverso.kernels.keyed.row_words import is_dead, undo_slot_of
from multiverso.kernels.stripe_words import owner_word, undo_slot_in
from multiverso.layout.keyed import (
    CLAIMED,
    CLAIMING,
    LINE_BYTES,
    LINES,
    MORE_SHIFT,
    NO_ROW,
    OWNERS,
    ROWS_AT_ONCE,
    UNCLAIMED,
    at,
)
from multiverso.layout.words import CACHE_LINE

_LATER = 16  # rows: how long before they are written fresh ones are sent for


# -- epochs ----------------------------------------------------------------------------------------------------


@inner
def pin(base, line):
    """A call begins: rows that it finds stay as they are until it ends. A call that continues keeps its epoch."""
    if load_acquire64(line + at.PIN) == 0:
        store_release64(line + at.PIN, load_acquire64(base + at.EPOCH) + 1)
        fence_all()  # a remover that does not see it yet has removed what this call can no longer find


@inner
def unpin(line):
    """A call has ended: what it has found may go."""
    store_release64(line + at.PIN, 0)


@inner
def safe_epoch(control, base):
    """What was removed before this epoch is in no call's undo slots any more."""
    return oldest_epoch(control, base, -1)


@inner
def oldest_epoch(control, base, but):
    """In which epoch the oldest call began that is under way in a worker other than ``but``; the current one: none."""
    fence_all()
    oldest = load_acquire64(base + at.EPOCH)
    for worker in range(OWNERS):
        line = base + LINES + LINE_BYTES * worker
        pinned = load_acquire64(line + at.PIN)
        if worker != but and pinned != 0 and pinned - 1 < oldest:
            owner = owner_word(load_acquire64(line + at.ATTACHMENT), worker)
            if not is_dead(control, owner):
                oldest = pinned - 1
    return oldest


# -- fresh rows ------------------------------------------------------------------------------------------------


@inner
def begin_row(base, row, key):
    """Writes a row that is not visible yet: the key's initial values, and the updater's."""
    columns, itemsize = load_acquire64(base + at.COLUMNS), load_acquire64(base + at.ITEMSIZE)
    dtype = load_acquire64(base + at.DTYPE)
    place = base + load_acquire64(base + at.ROWS) + row * load_acquire64(base + at.ROW_BYTES)
    write_initial(base, key, place)
    place += columns * itemsize
    wide = load_acquire64(base + at.STATES)
    for state in range(wide + load_acquire64(base + at.ROW_STATES)):
        initial = load_double(base + at.STATE_INITIAL + 8 * state)
        for column in range(columns if state < wide else 1):
            store_number(dtype, place + column * itemsize, initial)
        place += (columns if state < wide else 1) * itemsize


@inner
def stamp(base, row):
    """Notes that a row, not a new copy, changes in this generation; under the word of the row, or its key's segment."""
    generation = load_acquire64(base + at.GENERATION) if load_acquire64(base + at.GIVEN) == 0 else 0
    place = base + load_acquire64(base + at.STAMPS) + 4 * row
    if load32(place) != generation:
        store_int32(place, generation)  # no locked instruction: a reader of it has met that word since


@inner
def _end_of(claim):
    """The number after those of the rows that a claim names."""
    return ((claim >> 2) & NO_ROW) + (claim >> MORE_SHIFT) + 1


@inner
def claim_after(claim):
    """What is left of a claim once a key has got its row."""
    return claim + (1 << 2) - (1 << MORE_SHIFT) if claim >> MORE_SHIFT else UNCLAIMED


@inner
def give_claimed(base, owner):
    """A key has got the row that this worker has claimed."""
    claim = undo_slot_of(base, owner) + at.CLAIM
    store_release64(claim, claim_after(load_acquire64(claim)))


@inner
def settle_next(base, last):
    """The worker that got the last rows may have died before it could note that: then this does."""
    if last & 0xFFFF:
        place = undo_slot_of(base, last & 0xFFFF) + at.CLAIM
        claim = load_acquire64(place)
        if claim & 3 == CLAIMING and _end_of(claim) == last >> 16:
            compare_swap64(place, claim, claim - CLAIMING + CLAIMED)


@inner
def _send_for_later(base, row):
    """Sends for a fresh row that will be written soon: until it is there, the next word could not be taken."""
    size = load_acquire64(base + at.ROW_BYTES)
    place = base + load_acquire64(base + at.ROWS) + row * size
    for line in range(0, size, CACHE_LINE):
        prefetch_to_write(place + line)
    prefetch_to_write(base + load_acquire64(base + at.STAMPS) + 4 * row)


@inner
def claim_row(base, owner, undo, key):
    """Returns the row that the next key of this worker gets, written already, or -1: there is none."""
    claim = load_acquire64(undo + at.CLAIM)
    if claim & 3 != CLAIMED:  # a few at once, or each key would cost one more locked instruction
        while True:
            last = load_acquire64(base + at.NEXT_ROW)
            if (last & 0xFFFF) - 1 != undo_slot_in(owner):
                settle_next(base, last)
            row = last >> 16
            more = min(ROWS_AT_ONCE, load_acquire64(base + at.CAPACITY) - row) - 1
            if more < 0:
                return -1
            claim = (more << MORE_SHIFT) | (row << 2)
            store_release64(undo + at.CLAIM, claim | CLAIMING)
            taken = (_end_of(claim) << 16) | (undo_slot_in(owner) + 1)
            if compare_swap64(base + at.NEXT_ROW, last, taken) == last:
                break
        claim |= CLAIMED
        store_release64(undo + at.CLAIM, claim)
    store_release64(undo + at.KEY, key)
    row = (claim >> 2) & NO_ROW
    _send_for_later(base, row + _LATER)
    begin_row(base, row, key)
    return row


@inner
def settle_claim(base, owner):
    """A new attachment finds out whether the rows that an earlier one tried to get are its own."""
    place = undo_slot_of(base, owner) + at.CLAIM
    claim = load_acquire64(place)
    if claim & 3 == CLAIMING:
        last = load_acquire64(base + at.NEXT_ROW)
        mine = (last & 0xFFFF) - 1 == undo_slot_in(owner) and last >> 16 == _end_of(claim)
        # another worker may find it out at the same time
        compare_swap64(place, claim, claim - CLAIMING + CLAIMED if mine else UNCLAIMED)
