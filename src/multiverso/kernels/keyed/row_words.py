"""A keyed table's rows under their words: ``stripe_words`` has the protocol.

This says where the words and undo slots lie. Each worker has one undo slot in a keyed table. The updater's numbers of a
row lie behind its values and are kept and put back with them.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,no-any-return"

from __future__ import annotations

from multiverso.compiling.atomics import (
    call_update,
    load32,
    load_acquire64,
    prefetch,
    prefetch_to_write,
    store_int32,
    store_release64,
)
from multiverso.compiling.declaring import inner
from multiverso.kernels.stripe_words import (
    Rows,
    attachment_in,
    await_word,
    change_rows,
    has_died,
    hold,
    owner_word,
    settle_undo_slots,
    undo_slot_in,
)
from multiverso.layout.keyed import KEYED, LINE_BYTES, LINES, at

_SPACING = 3  # words lie side by side: a large table has thousands of cache lines of them
_AHEAD = 16  # rows that are on their way from memory meanwhile


@inner
def keyed_line(base, owner):
    """Returns the address of an owner's line in a keyed table."""
    return base + LINES + LINE_BYTES * undo_slot_in(owner)


@inner
def undo_slot_of(base, owner):
    """Returns the address of an owner's undo slot."""
    return base + load_acquire64(base + at.UNDO_SLOTS) + load_acquire64(base + at.UNDO_BYTES) * undo_slot_in(owner)


@inner
def owner_of(base, me):
    """What stands in a word that worker ``me`` holds, in its current attachment."""
    return owner_word(load_acquire64(base + LINES + LINE_BYTES * me + at.ATTACHMENT), me)


@inner
def is_dead(control, owner):
    """Returns whether the owner of a word will never let it go."""
    return has_died(control, undo_slot_in(owner), attachment_in(owner))


@inner
def count_up(line, what, by):
    """Adds to a count of this worker's line, which only it writes."""
    store_release64(line + what, load_acquire64(line + what) + by)


@inner
def rows_at(base, me):
    """The words of a keyed table's rows, as worker ``me`` uses them."""
    size = load_acquire64(base + at.ROW_BYTES)
    return Rows(
        KEYED,
        base + LINES + LINE_BYTES * me + at.TAKEN_OVER,
        base + load_acquire64(base + at.ROW_WORDS),
        _SPACING,
        load_acquire64(base + at.SHIFT),
        base + load_acquire64(base + at.UNDO_SLOTS),
        load_acquire64(base + at.UNDO_BYTES),
        1,
        at.COPY,
        base + load_acquire64(base + at.ROWS),
        size,
        size,
        0,
        0,
        0,
    )


@inner
def await_row(control, base, owner, word):
    """Waits until nobody holds a row word, taking it over from the dead: its value, or -TIMED_OUT."""
    me = undo_slot_in(owner)
    return await_word(rows_at(base, me), control, me, undo_slot_of(base, owner), word)


@inner
def hold_row(control, base, owner, word):
    """Takes a row word: its value before, or -TIMED_OUT."""
    me = undo_slot_in(owner)
    return hold(rows_at(base, me), control, me, owner, undo_slot_of(base, owner), word)


@inner
def _send_for(rows, row, what):
    """Sends for a row that is going to be changed, and for its word, which another worker may have had last."""
    stamps = what[0]
    if row >= 0:
        prefetch_to_write(rows.words + 8 * (row >> rows.shift))
        prefetch(stamps + 4 * row)
        for line in range(0, rows.stride, 64):
            prefetch_to_write(rows.values + row * rows.stride + line)


@inner
def _add(row, k, what):
    stamps, stamped, base, updater, values, size, columns, delta, wanted = what
    generation = load_acquire64(base + at.GENERATION)  # under the word: see `pass_through` in `keyed.passes`
    if stamped and load32(stamps + 4 * row) != generation:
        store_int32(stamps + 4 * row, generation)
    place = values + row * size
    call_update(updater, place, delta + k * wanted, place + wanted, columns, base + at.HYPER, columns)


@inner
def add_to_rows(control, base, updater, me, rows, delta, stamped, progress):
    """Gives ``delta``, row by row, to the updater; rows numbered below 0 are left out. ``(done << 16) | code``.

    ``stamped``: whether that is a change of the rows, for whoever looks for those.
    """
    words, undo = rows_at(base, me), undo_slot_of(base, owner_of(base, me))
    stamps = base + load_acquire64(base + at.STAMPS)
    columns = load_acquire64(base + at.COLUMNS)
    wanted = columns * load_acquire64(base + at.ITEMSIZE)
    what = stamps, stamped, base, updater, words.values, words.stride, columns, delta, wanted
    code = change_rows(words, control, me, undo, rows, progress, _AHEAD, _send_for, _add, what)
    if code == 0:
        store_release64(undo + at.UNDO_ROW, 0)
    return code


@inner
def settle_row(control, base, me):
    """A new attachment settles what an earlier one had begun."""
    settle_undo_slots(rows_at(base, me), control, me)
