"""Rows under words: 8 bytes for each 16 KiB of rows are lock, version and owner at once.

A writer takes the word by one compare-and-swap and lets it go by one store that counts its version up; a reader
copies the row and looks whether the word is free and still the same. Nobody who reads writes shared memory.

Each worker has a *hand*, which says which word it is about to take and keeps the row as it was before the change.
Whoever meets the word of a dead owner takes that copy into its own hand, takes the word over, puts the row back, and
goes on: a row is changed wholly or not at all, and a killed call has changed an exact prefix of its rows. An owner
that is alive and stopped is waited for until the caller's deadline.

The order of the stores is the whole correctness: the hand names the word before the word is taken, the copy is
complete before the hand names the row, and the row is named before its first byte changes.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,no-any-return"

from __future__ import annotations

from multiverso import layout
from multiverso.kernels.atomics import (
    call_update,
    compare_swap64,
    fence_acquire,
    fence_release,
    futex_wait,
    load32,
    load_acquire64,
    monotonic_ns,
    move,
    pause,
    prefetch,
    prefetch_to_write,
    sched_yield,
    store32,
    store_release64,
)
from multiverso.kernels.codes import DONE, TIMED_OUT
from multiverso.kernels.declaring import inner
from multiverso.kernels.waits import block_of, end_wait, nap_nanoseconds, publish_wait, slice_end
from multiverso.keyed_layout import KEYED, LINE_BYTES, LINES, OWNER, ROW_VERSION, at

_PAUSES, _YIELDS = 20, 50
_AHEAD = 16  # rows that are on their way from memory meanwhile
_TRIES = 64  # of a read without the word


@inner
def keyed_line(base, owner):
    return base + LINES + LINE_BYTES * ((owner & 4095) - 1)


@inner
def hand_of(base, owner):
    return (
        base + load_acquire64(base + at.HANDS) + load_acquire64(base + at.HAND_BYTES) * ((owner & 4095) - 1)
    )


@inner
def owner_of(base, me):
    """What stands in a word that worker ``me`` holds, in this life of its."""
    return (load_acquire64(base + LINES + LINE_BYTES * me + at.INCARNATION) << 12) | (me + 1)


@inner
def is_dead(control, owner):
    """Returns whether the owner of a word will never let it go: its number has another life, or none."""
    block = block_of(control, (owner & 4095) - 1)
    # the node's word for the life, and not the table's: a new life of the number may never come to this table
    if load_acquire64(block + layout.LIFE_NUMBER) != (owner >> 12) & 255:
        return True
    return load32(block + layout.LIVENESS) != layout.ALIVE


@inner
def count_up(line, what, by):
    store_release64(line + what, load_acquire64(line + what) + by)


@inner
def _take_over_row(base, owner, word, value):
    """The word's owner is dead: its copy goes into my hand first, then the word to me, then the row back."""
    address = base + load_acquire64(base + at.ROW_WORDS) + 8 * word
    size = load_acquire64(base + at.ROW_BYTES)
    dead, mine = hand_of(base, value), hand_of(base, owner)
    same = (value & 4095) == (owner & 4095)  # my own number's earlier life: its copy is in my hand already
    row = load_acquire64(dead + at.ROW)
    if load_acquire64(dead + at.ROW_WORD) != word + 1:
        row = -1
    if not same:
        store_release64(mine + at.ROW, -1)
        store_release64(mine + at.ROW_WORD, word + 1)
        if row >= 0:
            move(mine + at.COPY, dead + at.COPY, size)
            store_release64(mine + at.ROW, row)
    if compare_swap64(address, value, (value & ~OWNER) | owner) != value:
        if not same:
            store_release64(mine + at.ROW, -1)
        return
    line = keyed_line(base, owner)
    count_up(line, at.TAKEN_OVER, 1)
    if row >= 0:
        fence_release()
        move(base + load_acquire64(base + at.ROWS) + row * size, mine + at.COPY, size)
        count_up(line, at.PUT_BACK, 1)
    store_release64(address, (value & ~OWNER) + ROW_VERSION)
    store_release64(mine + at.ROW, -1)


@inner
def nap(control, owner, value, address, tries, began):
    """One turn of waiting for a word: DONE, or TIMED_OUT once a slice is over, to look at signals and deadlines."""
    if tries <= _PAUSES:
        pause()
    elif tries <= _PAUSES + _YIELDS:
        sched_yield()
    else:
        publish_wait(control, (owner & 4095) - 1, layout.FOR_WORD, KEYED, (value & 4095) - 1, 0)
        now = monotonic_ns()
        if now >= slice_end(control, (owner & 4095) - 1, began):
            return TIMED_OUT
        futex_wait(address, load32(address), nap_nanoseconds(now - began))
    return DONE


@inner
def await_row(control, base, owner, word):
    """Waits until nobody holds a row word, taking it over from the dead: its value, or -TIMED_OUT."""
    address = base + load_acquire64(base + at.ROW_WORDS) + 8 * word
    count_up(keyed_line(base, owner), at.WAITS, 1)
    began = monotonic_ns()
    tries = 0
    while True:
        value = load_acquire64(address)
        if value & OWNER == 0:
            end_wait(control, (owner & 4095) - 1)
            return value
        if is_dead(control, value):
            _take_over_row(base, owner, word, value)
            continue
        tries += 1
        code = nap(control, owner, value, address, tries, began)
        if code != 0:
            return -code


@inner
def _name_word(hand, word):
    store_release64(hand + at.ROW, -1)
    store_release64(hand + at.ROW_WORD, word + 1)


@inner
def hold_row(control, base, owner, hand, word, address):
    """Takes a row word: its value before, or -TIMED_OUT."""
    _name_word(hand, word)
    value = load_acquire64(address)
    while value & OWNER != 0 or compare_swap64(address, value, value | owner) != value:
        value = await_row(control, base, owner, word)
        if value < 0:
            return value
        _name_word(hand, word)  # a take-over may have used the hand
    fence_release()  # readers must not see what is written before the word
    return value


@inner
def _send_for(values, words, stamps, shift, size, row):
    """Sends for a row that is going to be changed, and for its word, which another worker may have had last."""
    if row >= 0:
        prefetch_to_write(words + 8 * (row >> shift))
        prefetch(stamps + 4 * row)
        for line in range(0, size, 64):
            prefetch_to_write(values + row * size + line)


@inner
def add_to_rows(control, base, updater, me, rows, delta, progress):
    """Gives ``delta``, row by row, to the updater; rows numbered below 0 are left out. ``(done << 16) | code``"""
    columns, size = load_acquire64(base + at.COLUMNS), load_acquire64(base + at.ROW_BYTES)
    wanted = columns * load_acquire64(base + at.ITEMSIZE)
    values, words = base + load_acquire64(base + at.ROWS), base + load_acquire64(base + at.ROW_WORDS)
    shift, owner = load_acquire64(base + at.SHIFT), owner_of(base, me)
    stamps, hand = base + load_acquire64(base + at.STAMPS), hand_of(base, owner)
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
        store_release64(hand + at.POSITION, k)
        value = hold_row(control, base, owner, hand, word, address)
        if value < 0:
            return (k << 16) | -value
        place = values + row * size
        generation = load_acquire64(
            base + at.GENERATION
        )  # under the word: see `pass_through` in keyed_snapshots
        if load32(stamps + 4 * row) != generation:
            store32(stamps + 4 * row, generation)
        move(hand + at.COPY, place, size)
        store_release64(hand + at.ROW, row)
        fence_release()
        part = delta + k * wanted
        call_update(updater, place, part, place + wanted, columns, base + at.HYPER, columns)
        store_release64(address, value + ROW_VERSION)
    store_release64(hand + at.ROW, -1)
    store_release64(hand + at.POSITION, rows.size)
    return 0


@inner
def read_rows(control, base, me, rows, out, wanted, progress):
    """Copies ``wanted`` bytes of rows; those numbered below 0 are left as they are. ``(done << 16) | code``"""
    size = load_acquire64(base + at.ROW_BYTES)
    values, words = base + load_acquire64(base + at.ROWS), base + load_acquire64(base + at.ROW_WORDS)
    shift, owner = load_acquire64(base + at.SHIFT), owner_of(base, me)
    for k in range(progress, min(progress + _AHEAD, rows.size)):
        for line in range(0, wanted, 64):
            prefetch(values + max(int(rows[k]), 0) * size + line)
    for k in range(progress, rows.size):
        if k + _AHEAD < rows.size:
            ahead = values + max(int(rows[k + _AHEAD]), 0) * size
            for line in range(0, wanted, 64):
                prefetch(ahead + line)
        row = int(rows[k])
        if row < 0:
            continue
        word = row >> shift
        address = words + 8 * word
        tries = 0
        while True:
            value = load_acquire64(address)
            if value & OWNER == 0:
                move(out + k * wanted, values + row * size, wanted)
                fence_acquire()
                if load_acquire64(address) == value:
                    break
            else:
                value = await_row(control, base, owner, word)
                if value < 0:
                    return (k << 16) | -value
            tries += 1
            if tries > _TRIES:  # a hot block: read under the word, which is given back unchanged
                value = hold_row(control, base, owner, hand_of(base, owner), word, address)
                if value < 0:
                    return (k << 16) | -value
                move(out + k * wanted, values + row * size, wanted)
                store_release64(address, value)
                break
    return 0


@inner
def settle_row(base, owner):
    """A new life of a worker's number puts in order what an earlier one had in hand. One word: the rest is free."""
    hand = hand_of(base, owner)
    word = load_acquire64(hand + at.ROW_WORD) - 1
    if word >= 0:
        value = load_acquire64(base + load_acquire64(base + at.ROW_WORDS) + 8 * word)
        # of any earlier life: the last one may have been killed before it came here
        if value & 4095 == owner & 4095 and value & OWNER != owner:
            _take_over_row(base, owner, word, value)
    store_release64(hand + at.ROW, -1)
    store_release64(hand + at.ROW_WORD, 0)
