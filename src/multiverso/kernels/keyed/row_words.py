"""A keyed table's rows under their words: ``stripe_words`` has the protocol.

This says where the words and undo slots lie. Each worker has one undo slot in a keyed table. The updater's numbers of a
row lie behind its values and are kept and put back with them. The loop that adds to many rows does the quick half of
``hold`` itself.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,no-any-return"

from __future__ import annotations

from multiverso.compiling.atomics import (
    call_update,
    compare_swap64,
    fence_release,
    load32,
    load_acquire64,
    move,
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
    has_died,
    hold,
    name_word,
    owner_word,
    settle_undo_slots,
    undo_slot_in,
)
from multiverso.layout.keyed import KEYED, LINE_BYTES, LINES, OWNER, ROW_VERSION, at

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
def _send_for(values, words, stamps, shift, size, row):
    """Sends for a row that is going to be changed, and for its word, which another worker may have had last."""
    if row >= 0:
        prefetch_to_write(words + 8 * (row >> shift))
        prefetch(stamps + 4 * row)
        for line in range(0, size, 64):
            prefetch_to_write(values + row * size + line)


@inner
def add_to_rows(control, base, updater, me, rows, delta, stamped, progress):
    """Gives ``delta``, row by row, to the updater; rows numbered below 0 are left out. ``(done << 16) | code``.

    ``stamped``: whether that is a change of the rows, for whoever looks for those.
    """
    columns, size = load_acquire64(base + at.COLUMNS), load_acquire64(base + at.ROW_BYTES)
    wanted = columns * load_acquire64(base + at.ITEMSIZE)
    values, words = base + load_acquire64(base + at.ROWS), base + load_acquire64(base + at.ROW_WORDS)
    shift, owner = load_acquire64(base + at.SHIFT), owner_of(base, me)
    stamps, undo = base + load_acquire64(base + at.STAMPS), undo_slot_of(base, owner)
    for k in range(progress, min(progress + _AHEAD, rows.size)):
        _send_for(values, words, stamps, shift, size, int(rows[k]))
    for k in range(progress, rows.size):
        if k + _AHEAD < rows.size:
            _send_for(values, words, stamps, shift, size, int(rows[k + _AHEAD]))
        row = int(rows[k])
        if row < 0:
            continue
        word = row >> shift
        address = words + 8 * word
        store_release64(undo + at.UNDO_POSITION, k)
        name_word(undo, word)
        value = load_acquire64(address)
        if value & OWNER != 0 or compare_swap64(address, value, value | owner) != value:
            value = hold_row(control, base, owner, word)
            if value < 0:
                return (k << 16) | -value
        fence_release()  # readers must not see what is written before the word
        place = values + row * size
        generation = load_acquire64(base + at.GENERATION)  # under the word: see `pass_through` in keyed_snapshots
        if stamped and load32(stamps + 4 * row) != generation:
            store_int32(stamps + 4 * row, generation)
        move(undo + at.COPY, place, size)
        store_release64(undo + at.UNDO_ROW, row + 1)
        fence_release()
        part = delta + k * wanted
        call_update(updater, place, part, place + wanted, columns, base + at.HYPER, columns)
        store_release64(address, value + ROW_VERSION)
    store_release64(undo + at.UNDO_ROW, 0)
    store_release64(undo + at.UNDO_POSITION, rows.size)
    return 0


@inner
def settle_row(control, base, me):
    """A new attachment settles what an earlier one had begun."""
    settle_undo_slots(rows_at(base, me), control, me)
