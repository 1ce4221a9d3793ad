"""A keyed table in synchronous rounds: each worker logs what it adds, and the members of a round fold all logs.

The rounds are those of ``kernels/rounds``, gone through on a small table beside the keyed one, whose elements stand for
parts of the hashes: who folds an element folds the keys of that part. A key's deltas are summed in its worker's log;
its row gets one step, in place, with the sum of all logs in worker order. Beside each row stands the last round that it
was changed in: it is changed, and kept by an undo slot, together with the row. So whoever does a part again, in the
place of one that has died, leaves out the rows that are done.

No row changes between two reads of a worker that takes part, since no round ends without it.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,no-any-return"

from __future__ import annotations

from typing import NamedTuple

from multiverso.compiling.atomics import (
    array_at,
    call_update,
    fence_release,
    hash64,
    load32,
    load64,
    move,
    store64,
    store_release64,
    words,
)
from multiverso.compiling.declaring import Address, Data, Int, Words, inner, kernel
from multiverso.kernels.codes import DONE, FULL
from multiverso.kernels.dense import add_into, copy_into, end_call
from multiverso.kernels.keyed.fresh import stamp
from multiverso.kernels.keyed.index import ABSENT, fetch_to_enter, seek
from multiverso.kernels.keyed.row_words import count_up, hold_row, keyed_line, owner_of, undo_slot_of
from multiverso.kernels.keyed.rows import enter_key
from multiverso.kernels.rounds.folding import NOTHING, WHOLE, divide_by
from multiverso.kernels.rounds.steps import STAGED, finish, go_through, members_in
from multiverso.kernels.waits import header_of, line_of
from multiverso.layout import words as table
from multiverso.layout.keyed import NO_ROW, ROW_VERSION, at

PARTS = 1024  # of the hashes: elements of the table whose rounds these are, one chunk
# all logs begin with these words: from one log to the next; where keys and deltas begin in a log; keys that have room
STRIDE, KEYS, DELTAS, CAPACITY = 0, 8, 16, 24
FIRST = table.PAGE  # where the first log begins
# a log begins with: how many keys it has; places of its index, which follows: 1 + number of a key, 0: none
_COUNT, _PLACES = 0, 8
INDEX = table.CACHE_LINE
_FEWEST_PLACES = 512
_AHEAD = 16  # keys whose entries are on their way from memory meanwhile
_MOST_MEMBERS = table.MAX_WORKERS  # a constant of this module is one for the compiler, too


class _Fold(NamedTuple):
    """What folding needs: addresses, and who does it."""

    control: int
    keyed: int
    logs: int
    update: int  # 0: plain addition
    me: int


@inner
def places_for(keys: int) -> int:
    """Returns how many places the index of a log with so many keys has."""
    places = _FEWEST_PLACES
    while places < 2 * keys:
        places *= 2
    return places


@inner
def _log_of(logs, worker):
    return logs + FIRST + load64(logs + STRIDE) * worker


@inner
def _find(logs, log, key):
    """(place in the index, number) of a key in a log; its number is -1 where it is not there."""
    keys, last = log + load64(logs + KEYS), load64(log + _PLACES) - 1
    place = (hash64(key) >> 16) & last
    while True:
        number = load64(log + INDEX + 8 * place) - 1
        if number < 0 or load64(keys + 8 * number) == key:
            return place, number
        place = (place + 1) & last


@inner
def _make_index(logs, log, count, places):
    for place in range(places):
        store64(log + INDEX + 8 * place, 0)
    store64(log + _PLACES, places)
    for number in range(count):
        place, _ = _find(logs, log, load64(log + load64(logs + KEYS) + 8 * number))
        store64(log + INDEX + 8 * place, number + 1)


@kernel
def stage(keyed: Address, logs: Address, me: Int, progress: Words, keys: Words, delta: Data, call: Address) -> Int:
    """Adds a delta for each key to what this worker's log has of the round: DONE, or FULL and nothing is changed."""
    log, columns = _log_of(logs, me), load64(keyed + at.COLUMNS)
    count = load64(log + _COUNT) if progress[STAGED] else 0
    if count + keys.size > load64(logs + CAPACITY):
        return FULL
    places = places_for(count + keys.size)
    if progress[STAGED] == 0 or places > load64(log + _PLACES):
        _make_index(logs, log, count, places)
    for k in range(keys.size):
        key = int(keys[k])
        place, number = _find(logs, log, key)
        part = delta[k * columns : (k + 1) * columns]
        if number < 0:
            copy_into(_delta_at(logs, log, count, columns, delta), part)
            store64(log + load64(logs + KEYS) + 8 * count, key)
            count += 1
            store64(log + INDEX + 8 * place, count)
        else:
            add_into(_delta_at(logs, log, number, columns, delta), part)
    store64(log + _COUNT, count)
    progress[STAGED] = 1
    line = keyed_line(keyed, owner_of(keyed, me))
    count_up(line, at.ADDS, 1)
    count_up(line, at.ROWS_ADDED, keys.size)
    end_call(call)
    return DONE


@inner
def _delta_at(logs, log, number, columns, like):
    """A log's delta of a key by its number; behind the last is room for a sum."""
    return array_at(log + load64(logs + DELTAS) + number * columns * like.itemsize, columns, like)


@inner
def _row_of(how, owner, key, entering):
    """Row of a key, which is entered unless it is there; or -TIMED_OUT, -FULL."""
    key_hash = hash64(key)
    value, segment, word = seek(how.control, how.keyed, owner, key_hash, key)
    if value == ABSENT:
        line = keyed_line(how.keyed, owner)
        return enter_key(how.control, how.keyed, owner, key_hash, key, line, entering, 0, segment, word)
    return value & NO_ROW if value >= 0 else value


@inner
def _step(base, how, place, ids, first, key, like):
    """One step of a row, with the sum of what the logs from the first one on have of its key."""
    columns = load64(how.keyed + at.COLUMNS)
    values = array_at(place, columns, like)
    mine = _log_of(how.logs, how.me)
    total = _delta_at(how.logs, mine, load64(how.logs + CAPACITY), columns, like)
    for i in range(first, ids.size):
        log = _log_of(how.logs, ids[i])
        _, number = _find(how.logs, log, key)
        if number < 0:
            continue
        delta = _delta_at(how.logs, log, number, columns, like)
        if how.update == 0:
            add_into(values, delta)
        elif i == first:
            copy_into(total, delta)
        else:
            add_into(total, delta)
    if how.update != 0:
        if header_of(base).mean:
            divide_by(total, ids.size)
        state = place + columns * like.itemsize
        call_update(how.update, place, total.ctypes.data, state, columns, how.keyed + at.HYPER, columns)


@inner
def _fold_key(base, how, number, ids, first, key, entering, like):
    """Changes a key's row, under its word, unless that is done: DONE, or why it stopped."""
    keyed, owner = how.keyed, owner_of(how.keyed, how.me)
    row = _row_of(how, owner, key, entering)
    if row < 0:
        return -row
    word = row >> load64(keyed + at.SHIFT)
    value = hold_row(how.control, keyed, owner, word)
    if value < 0:
        return -value
    size = load64(keyed + at.ROW_BYTES)
    place = keyed + load64(keyed + at.ROWS) + row * size
    changed_in = place + size - 8
    if load64(changed_in) != number:
        undo = undo_slot_of(keyed, owner)
        stamp(keyed, row)
        move(undo + at.COPY, place, size)
        store_release64(undo + at.UNDO_ROW, row + 1)
        fence_release()
        _step(base, how, place, ids, first, key, like)
        store_release64(changed_in, number)
    store_release64(keyed + load64(keyed + at.ROW_WORDS) + 8 * word, value + ROW_VERSION)
    return DONE


@inner
def _is_in_earlier(how, ids, first, key):
    for i in range(first):
        _, number = _find(how.logs, _log_of(how.logs, ids[i]), key)
        if number >= 0:
            return True
    return False


@inner
def fold_keys(base, how, number, chunk, members, lo, hi, like):
    """As ``rounds.folding.fold``: the keys of the parts lo to hi of all logs. DONE, or why it stopped.

    Without members the round is one that all who took part in it have left unfinished: it is finished, as rows may be
    changed already, if it had begun.
    """
    if members == 0:
        members = members_in(base, load64(base + table.DECISIONS + 8 * (number & 1)), number)
    found, entering = words(_MOST_MEMBERS), words(3)
    entering[2] = 1
    n = 0
    for worker in range(table.MAX_WORKERS):
        source = line_of(base, worker) + table.SOURCES + 4 * (number & 1)
        if (members >> worker) & 1 and load32(source) != NOTHING:
            found[n] = worker
            n += 1
    ids = found[:n]
    for i in range(n):
        log = _log_of(how.logs, ids[i])
        keys = log + load64(how.logs + KEYS)
        count = load64(log + _COUNT)
        for k in range(count):
            if k + _AHEAD < count:
                later = load64(keys + 8 * (k + _AHEAD))
                if lo <= hash64(later) & (PARTS - 1) < hi:
                    fetch_to_enter(how.keyed, later)
            key = load64(keys + 8 * k)
            if lo <= hash64(key) & (PARTS - 1) < hi and not _is_in_earlier(how, ids, i, key):
                code = _fold_key(base, how, number, ids, i, key, entering, like)
                if code != DONE:
                    return code
    return DONE


@kernel
def go(
    control: Address,
    base: Address,
    keyed: Address,
    logs: Address,
    update: Address,
    me: Int,
    progress: Words,
    like: Data,
) -> Int:
    """Goes through a round with what is in this worker's log, or with nothing: DONE, or why it stopped.

    Until `end` it has not returned from there, and may be called again.
    """
    source = WHOLE if progress[STAGED] else NOTHING
    how = _Fold(control, keyed, logs, update, me)
    return go_through(control, base, how, me, source, progress, like, like, like, fold_keys)


@kernel
def end(base: Address, me: Int, progress: Words, size: Int, call: Address) -> Int:
    """The round is over for this worker, which has read what it wanted."""
    finish(base, me, progress, table.GETS, size, call)
    return DONE
