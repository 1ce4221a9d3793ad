"""What a worker calls on a keyed table: find and admit keys, read rows and add to them.

Each call is one of ``find`` or ``admit``, which pins the rows that it finds, and then one of ``read`` or ``add``, which
unpins them when it is done. A call that does not get that far calls ``release``.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,no-any-return"

from __future__ import annotations

from multiverso.compiling.atomics import hash64, load_acquire64, store_release64
from multiverso.compiling.declaring import Address, Int, Words, inner, kernel
from multiverso.kernels.keyed.fresh import pin, settle_claim, unpin
from multiverso.kernels.keyed.index import ABSENT, fetch, fetch_to_enter, find_row, seek, take_over_segment, word_at
from multiverso.kernels.keyed.initial_rows import write_initial
from multiverso.kernels.keyed.row_words import (
    add_to_rows,
    count_up,
    keyed_line,
    owner_of,
    rows_at,
    settle_row,
    undo_slot_of,
)
from multiverso.kernels.keyed.rows import enter_key, used
from multiverso.kernels.stripe_words import read_rows, undo_slot_in
from multiverso.layout.keyed import CANDIDATE, ELSEWHERE, GROUP_SHIFT, GROUPS, LINE_BYTES, LINES, NO_ROW, OWNER, at

_AHEAD = 16
_TOGETHER = 8


@kernel
def find(control: Address, base: Address, me: Int, keys: Words, rows: Words, progress: Int) -> Int:
    """Writes the rows of ``keys[progress:]`` (-1: they have none): ``(done << 16) | code``."""
    owner = owner_of(base, me)
    pin(base, keyed_line(base, owner))
    for k in range(progress, min(progress + _AHEAD, keys.size)):
        fetch(base, int(keys[k]))
    for k in range(progress, keys.size):
        if k + _AHEAD < keys.size:
            fetch(base, int(keys[k + _AHEAD]))
        key = int(keys[k])
        row = find_row(control, base, owner, hash64(key), key)
        if row < ABSENT:
            return (k << 16) | -row
        rows[k] = row
    return 0


@kernel
def find_either(
    control: Address, own: Address, copies: Address, me: Int, is_here: Words, keys: Words, rows: Words, progress: Int
) -> Int:
    """As `find`, of keys of which some live here and the others on other hosts, in two tables.

    Args:
        own, copies: the table of those that live here, and of copies of the others.
        is_here: of each group of keys.
        rows: (2 n + 3): first the rows of those that live here, then of copies; ELSEWHERE: the other table's. Behind
            them zeros at first, which become: how many keys live elsewhere, of how many of those there is no copy, and
            how many live here without a row.
    """
    owner = owner_of(own, me)
    pin(own, keyed_line(own, owner))
    pin(copies, keyed_line(copies, owner))
    n = keys.size
    away, no_copy, no_row = 2 * n, 2 * n + 1, 2 * n + 2
    for k in range(progress, n):
        if k + _AHEAD < n:
            later = int(keys[k + _AHEAD])
            fetch(own if is_here[(hash64(later) >> GROUP_SHIFT) & (GROUPS - 1)] else copies, later)
        key = int(keys[k])
        key_hash = hash64(key)
        here = is_here[(key_hash >> GROUP_SHIFT) & (GROUPS - 1)] != 0
        row = find_row(control, own if here else copies, owner, key_hash, key)
        if row < ABSENT:
            return (k << 16) | -row
        rows[k] = row if here else ELSEWHERE
        rows[n + k] = ELSEWHERE if here else row
        rows[no_row if here else no_copy] += row == ABSENT
        rows[away] += not here
    return 0


@inner
def _admit(control, base, me, is_here, keys, rows, call, given, progress):
    """As `admit`; ``given``: where the values of the first key's row lie, or 0."""
    size = load_acquire64(base + at.COLUMNS) * load_acquire64(base + at.ITEMSIZE)
    owner = owner_of(base, me)
    line = keyed_line(base, owner)
    pin(base, line)
    for k in range(progress, min(progress + _AHEAD, keys.size)):
        fetch_to_enter(base, int(keys[k]))
    for k in range(progress, keys.size):
        # several in a row: walks through the page tables overlap, but none overlaps the locked instruction of a key
        if (k - progress) % _TOGETHER == 0:
            for later in range(k + _AHEAD, min(k + _AHEAD + _TOGETHER, keys.size)):
                fetch_to_enter(base, int(keys[later]))
        key = int(keys[k])
        key_hash = hash64(key)
        if is_here != 0 and load_acquire64(is_here + 8 * ((key_hash >> GROUP_SHIFT) & (GROUPS - 1))) == 0:
            rows[k] = ELSEWHERE
            continue
        value, segment, word = seek(control, base, owner, key_hash, key)
        if value >= 0 and value & CANDIDATE == 0 and used(base, value, line, key, k) == value:
            rows[k] = value & NO_ROW
            continue
        row = value
        if value >= ABSENT:
            segment = segment if value == ABSENT else -1
            if given != 0:
                store_release64(base + at.GIVEN, given + k * size)
            row = enter_key(control, base, owner, key_hash, key, line, call, k, segment, word)
        if row < ABSENT:
            return (k << 16) | -row
        rows[k] = row
    return 0


@kernel
def admit(
    control: Address, base: Address, me: Int, is_here: Address, keys: Words, rows: Words, call: Words, progress: Int
) -> Int:
    """Like `find`, but a key that is not there is entered, with its initial row, or as a candidate for one.

    Args:
        is_here: a word for each group of keys: whether this table has it, the row of others being ELSEWHERE; 0: all.
        call: two zeros at first, which the call uses; and how many adds a key needs to get a row, or 1: at once.
    """
    return _admit(control, base, me, is_here, keys, rows, call, 0, progress)


@kernel
def admit_copies(
    control: Address, base: Address, me: Int, keys: Words, rows: Words, given: Address, call: Words, progress: Int
) -> Int:
    """Like `admit`, of copies of rows that other hosts have, by the node: they begin with the values that are given."""
    code = _admit(control, base, me, 0, keys, rows, call, given, progress)
    store_release64(base + at.GIVEN, 0)
    return code


@inner
def _in_this(rows):
    """How many rows of a call are this table's."""
    number = 0
    for k in range(rows.size):
        number += rows[k] != ELSEWHERE
    return number


@kernel
def read(control: Address, base: Address, me: Int, keys: Words, rows: Words, out: Address, progress: Int) -> Int:
    """Writes the values of rows, and for those ABSENT the initial values of their keys: ``(done << 16) | code``."""
    size = load_acquire64(base + at.COLUMNS) * load_acquire64(base + at.ITEMSIZE)
    code = read_rows(rows_at(base, me), control, me, rows, out, size, progress)
    if code != 0:
        return code
    for k in range(rows.size):
        if rows[k] == ABSENT:
            write_initial(base, int(keys[k]), out + k * size)
    line = base + LINES + LINE_BYTES * me
    unpin(line)
    count_up(line, at.GETS, 1)
    count_up(line, at.ROWS_READ, _in_this(rows))
    return 0


@kernel
def read_whole(control: Address, base: Address, me: Int, rows: Words, out: Address, size: Int, progress: Int) -> Int:
    """Writes the first ``size`` bytes of rows, values and state: ``(done << 16) | code``. Leaves them pinned."""
    return read_rows(rows_at(base, me), control, me, rows, out, size, progress)


@kernel
def add(control: Address, base: Address, updater: Address, me: Int, rows: Words, delta: Address, progress: Int) -> Int:
    """Gives a delta for each row to the updater, one after another: ``(done << 16) | code``."""
    code = add_to_rows(control, base, updater, me, rows, delta, 1, progress)
    if code == 0:
        line = base + LINES + LINE_BYTES * me
        unpin(line)
        count_up(line, at.ADDS, 1)
        count_up(line, at.ROWS_ADDED, _in_this(rows))
    return code


@kernel
def apply_to_copies(
    control: Address, base: Address, loop: Address, me: Int, rows: Words, delta: Address, progress: Int
) -> Int:
    """As `add`, by the node, to copies of rows that other hosts have: none of them counts as changed here."""
    code = add_to_rows(control, base, loop, me, rows, delta, 0, progress)
    if code == 0:
        unpin(base + LINES + LINE_BYTES * me)
    return code


@kernel
def hold(base: Address, me: Int) -> Int:
    """Pins the rows that are found from here on, until `release`."""
    pin(base, base + LINES + LINE_BYTES * me)
    return 0


@kernel
def release(base: Address, me: Int) -> Int:
    """Unpins the rows that a call has found."""
    unpin(base + LINES + LINE_BYTES * me)
    return 0


@kernel
def enter(control: Address, base: Address, me: Int) -> Int:
    """A new attachment ends what an earlier one had begun, and keeps its claimed row. 0 or a code."""
    owner = owner_of(base, me)
    unpin(keyed_line(base, owner))
    settle_row(control, base, me)
    undo = undo_slot_of(base, owner)
    segment = load_acquire64(undo + at.SEGMENT) - 1
    if segment >= 0:
        value = load_acquire64(word_at(base, segment))
        if undo_slot_in(value) == undo_slot_in(owner) and value & OWNER != owner:
            take_over_segment(base, owner, segment, value)
        store_release64(undo + at.SEGMENT, 0)
    settle_claim(base, owner)
    return 0
