"""How keys come to rows, and how rows come back.

A new key's row is either a fresh one, claimed in the worker's hand first, or the one that a *dead* entry of its segment
still has. A row that was found may be in use until the call that found it ends, so each call *pins* the epoch in
which it begins, and the row of a key that was removed in an epoch goes to another key only when every call that is
under way began later (epoch-based reclamation: Fraser, Practical lock-freedom, 2004). A call of a worker that died
counts no longer; one of a worker that was stopped keeps rows from being used again, and nobody from anything else.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,no-any-return"

from __future__ import annotations

from multiverso.kernels.atomics import (
    compare_swap64,
    fence_all,
    fence_release,
    hash64,
    load32,
    load_acquire64,
    load_double,
    prefetch_to_write,
    store32,
    store_release64,
    trailing_zeros,
)
from multiverso.kernels.codes import FULL
from multiverso.kernels.declaring import inner
from multiverso.kernels.initial_rows import store_number, write_initial
from multiverso.kernels.keyed_index import (
    ABSENT,
    LOW_56,
    ONES,
    await_segment,
    count,
    counts_at,
    depth_of,
    fill,
    home_of,
    put,
    resolve,
    scan,
    segment_at,
    split,
    tag_of,
    word_at,
)
from multiverso.kernels.row_words import count_up, hand_of, hold_row, is_dead
from multiverso.keyed_layout import (
    BUCKET_BYTES,
    BUCKETS,
    CANDIDATE,
    CLAIMED,
    CLAIMING,
    DEAD,
    EPOCHS,
    FREQUENCY_SHIFT,
    LINE_BYTES,
    LINES,
    NO_ROW,
    OWNER,
    PROBES,
    ROW_VERSION,
    SEGMENT_VERSION,
    TAGS,
    UNCLAIMED,
    USED_SHIFT,
    at,
)
from multiverso.layout import CACHE_LINE, MAX_WORKERS

_LATER = 16  # rows: how long before they are written fresh ones are sent for
_EXACT = 16  # frequencies below this are counted one by one, then each four double


# -- epochs ----------------------------------------------------------------------------------------------------


@inner
def pin(base, line):
    """A call begins: rows that it finds stay as they are until it ends. A call that goes on keeps its epoch."""
    if load_acquire64(line + at.PIN) == 0:
        store_release64(line + at.PIN, load_acquire64(base + at.EPOCH) + 1)
        fence_all()  # whoever does not see it yet has removed what this call cannot find any more


@inner
def unpin(line):
    """A call has ended: what it has found may go."""
    store_release64(line + at.PIN, 0)


@inner
def safe_epoch(control, base):
    """What was removed before this epoch is in no call's hands any more."""
    fence_all()
    safe = load_acquire64(base + at.EPOCH)
    for worker in range(MAX_WORKERS):
        line = base + LINES + LINE_BYTES * worker
        pinned = load_acquire64(line + at.PIN)
        if pinned != 0 and pinned - 1 < safe:
            owner = (load_acquire64(line + at.INCARNATION) << 12) | (worker + 1)
            if not is_dead(control, owner):
                safe = pinned - 1
    return safe


# -- fresh rows ------------------------------------------------------------------------------------------------


@inner
def begin_row(base, row, key):
    """Writes a row that nobody can see yet: the key's initial values, and the updater's."""
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
    """Notes that a row changes in this generation; under the word of the row, or of its key's segment."""
    generation = load_acquire64(base + at.GENERATION)
    place = base + load_acquire64(base + at.STAMPS) + 4 * row
    if load32(place) != generation:
        store32(place, generation)


@inner
def settle_next(base, last):
    """Whoever got the last row may have died before it could note that: then it is noted for it."""
    if last & 0xFFFF:
        row = (last >> 16) - 1
        claim = hand_of(base, last & 0xFFFF) + at.CLAIM
        if load_acquire64(claim) == (row << 2) | CLAIMING:
            compare_swap64(claim, (row << 2) | CLAIMING, (row << 2) | CLAIMED)


@inner
def _send_for_later(base, row):
    """Sends for a fresh row that will be written soon: until it is there, the next word could not be taken."""
    size = load_acquire64(base + at.ROW_BYTES)
    place = base + load_acquire64(base + at.ROWS) + row * size
    for line in range(0, size, CACHE_LINE):
        prefetch_to_write(place + line)
    prefetch_to_write(base + load_acquire64(base + at.STAMPS) + 4 * row)


@inner
def _claim(base, owner, hand, key):
    """Returns the row that the next key of this worker gets, written already, or -1: there is none."""
    claim = load_acquire64(hand + at.CLAIM)
    if claim & 3 != CLAIMED:
        while True:
            last = load_acquire64(base + at.NEXT_ROW)
            if last & 0xFFFF != owner & 4095:
                settle_next(base, last)
            row = last >> 16
            if row >= load_acquire64(base + at.CAPACITY):
                return -1
            store_release64(hand + at.CLAIM, (row << 2) | CLAIMING)
            taken = ((row + 1) << 16) | (owner & 4095)
            if compare_swap64(base + at.NEXT_ROW, last, taken) == last:
                break
        claim = (row << 2) | CLAIMED
        store_release64(hand + at.CLAIM, claim)
    store_release64(hand + at.KEY, key)
    row = claim >> 2
    _send_for_later(base, row + _LATER)
    begin_row(base, row, key)
    return row


@inner
def settle_claim(base, owner):
    """A new life of a worker's number finds out whether the row that an earlier one tried to get is its own."""
    claim = load_acquire64(hand_of(base, owner) + at.CLAIM)
    if claim & 3 == CLAIMING:
        last = load_acquire64(base + at.NEXT_ROW)
        mine = last & 0xFFFF == owner & 4095 and (last >> 16) - 1 == claim >> 2
        # somebody else may find it out at the same time
        becomes = (claim & ~3) | CLAIMED if mine else UNCLAIMED
        compare_swap64(hand_of(base, owner) + at.CLAIM, claim, becomes)


# -- rows of dead entries --------------------------------------------------------------------------------------


@inner
def _reusable(place, home, safe):
    """A dead entry near a home that nobody can be using: ``(how many buckets from there << 3) | slot``, or -1."""
    for n in range(PROBES + 1):
        bucket = place + ((home + n) & (BUCKETS - 1)) * BUCKET_BYTES
        header = load_acquire64(bucket)
        differ = (header ^ TAGS) & LOW_56
        matches = (differ - ONES) & ~differ & TAGS
        while matches:
            slot = trailing_zeros(matches) >> 3
            age = (safe - (load_acquire64(bucket + 24 + 16 * slot) >> 32)) & EPOCHS
            if (header >> (8 * slot)) & 255 == DEAD and 0 < age <= EPOCHS >> 1:
                return (n << 3) | slot
            matches &= matches - 1
    return -1


@inner
def _begin_again(control, base, owner, row, key):
    """Writes a row that another key had: under its word, since a dead worker may still have a change of it in hand."""
    word = row >> load_acquire64(base + at.SHIFT)
    value = hold_row(control, base, owner, word)
    if value < 0:
        return -value
    begin_row(base, row, key)
    store_release64(base + load_acquire64(base + at.ROW_WORDS) + 8 * word, value + ROW_VERSION)
    return 0


# -- keys ------------------------------------------------------------------------------------------------------


@inner
def _chance(line, key, k):
    """Random bits for the k-th key of a call."""
    return hash64(hash64(key) ^ (load_acquire64(line + at.ROWS_ADDED) + k)) & 0xFFFFFFFFFFFF


@inner
def used(base, value, line, key, k):
    """What stands beside a key after another add: when it was used, and how often, roughly; mostly the same as before.

    A frequency of 16 and more counts up with a probability that falls as it grows (R. Morris, Counting large numbers
    of events in small registers, 1978).

    Args:
        line: this worker's.
        key, k: the key, and which one of its call it is: chance is made of them.
    """
    if load_acquire64(base + at.KEEPS_USE) == 0:
        return value
    frequency = (value >> FREQUENCY_SHIFT) & 255
    often = (1 << min((frequency - _EXACT) // 4 + 1, 48)) - 1 if frequency >= _EXACT else 0
    if frequency < 255 and _chance(line, key, k) & often == 0:
        frequency += 1
    now = load_acquire64(base + at.TICK) & 0xFFFF
    kept = value & (NO_ROW | CANDIDATE)
    return kept | (now << USED_SHIFT) | (frequency << FREQUENCY_SHIFT)


@inner
def _let_go(base, address, word, place, keys, candidates, dead):
    count(base, place, keys, candidates, dead)
    store_release64(address, word + SEGMENT_VERSION)


@inner
def _admit_candidate(control, base, owner, place, entry, claimed, after):
    """One more add of a candidate, under its segment's word: its row, ABSENT, -FULL (claim a row), or -TIMED_OUT."""
    value = load_acquire64(entry + 8)
    frequency = min(((value >> FREQUENCY_SHIFT) & 255) + 1, 255)
    now = load_acquire64(base + at.TICK) & 0xFFFF
    row = value & NO_ROW
    beside = (now << USED_SHIFT) | (frequency << FREQUENCY_SHIFT)
    if frequency < after:
        store_release64(entry + 8, row | beside | CANDIDATE)
        return ABSENT
    if row == NO_ROW:
        if claimed < 0:
            return -FULL
        row = claimed
    else:
        code = _begin_again(control, base, owner, row, load_acquire64(entry))
        if code != 0:
            return -code
    stamp(base, row)
    store_release64(entry + 8, row | beside)
    if row == claimed:
        store_release64(hand_of(base, owner) + at.CLAIM, UNCLAIMED)
    return row


@inner
def _enter_new(control, base, owner, place, key_hash, key, claimed, call):
    """Enters a key that is not there, under its segment's word: ``value``, ABSENT (a row has to be claimed, or no
    place), or -TIMED_OUT.
    """
    after = int(call[2])
    now = load_acquire64(base + at.TICK) & 0xFFFF
    beside = (now << USED_SHIFT) | (1 << FREQUENCY_SHIFT)
    if load_acquire64(base + at.KEEPS_USE) == 0 and after <= 1:
        beside = 0
    if after > 1:
        beside |= CANDIDATE
    home, tag = home_of(key_hash), tag_of(key_hash)
    if (load_acquire64(counts_at(base, place)) >> 32) & 0xFFFF:
        if call[0] == 0:
            call[0], call[1] = 1, safe_epoch(control, base)
        found = _reusable(place, home, int(call[1]))
        if found >= 0:
            n, slot = found >> 3, found & 7
            bucket = place + ((home + n) & (BUCKETS - 1)) * BUCKET_BYTES
            row = load_acquire64(bucket + 24 + 16 * slot) & NO_ROW
            if after <= 1:
                if row == NO_ROW:
                    if claimed < 0:
                        return ABSENT
                    row = claimed
                    # free first: a dead entry must not come to have a row that is still claimed
                    store_release64(bucket, load_acquire64(bucket) & ~(255 << (8 * slot)))
                else:
                    code = _begin_again(control, base, owner, row, key)
                    if code != 0:
                        return -code
                stamp(base, row)
            fill(place, home, n, slot, key, row | beside, tag)
            count(base, place, 0, 0, -1)
            return row | beside
    if after > 1:
        claimed = NO_ROW
    elif claimed < 0:
        return ABSENT
    else:
        stamp(base, claimed)
    if put(place, key_hash, key, claimed | beside, PROBES, tag) < 0:
        return ABSENT
    return claimed | beside


@inner
def enter_key(control, base, owner, key_hash, key, line, call, k, absent_from, absent_word):
    """Row of a key, which is entered unless it is there, and noted as used; ABSENT (a candidate), -TIMED_OUT, -FULL.

    Args:
        call: whether the safe epoch of this call is known, it, and how many adds a key needs to get a row.
        k: which key of its call it is.
        absent_from, absent_word: a segment in which the key is not for as long as this is the segment's word.
    """
    hand = hand_of(base, owner)
    at_once = call[2] <= 1
    must_claim = False
    while True:
        segment = resolve(base, key_hash)
        address = word_at(base, segment)
        word = load_acquire64(address)
        depth = depth_of(word)
        if depth < 0 or key_hash & ((1 << depth) - 1) != segment:
            continue
        if word & OWNER:
            code = await_segment(control, base, owner, segment)
            if code != 0:
                return -code
            continue
        place = segment_at(base, segment)
        claimed = -1
        # a fresh row is written before the word is taken, unless a dead entry's may do
        if must_claim or (at_once and load_acquire64(counts_at(base, place)) >> 32 == 0):
            claimed = _claim(base, owner, hand, key)
            if claimed < 0:
                return -FULL
        store_release64(hand + at.SEGMENT, segment + 1)
        if compare_swap64(address, word, word | owner) != word:
            continue
        fence_release()
        known = segment == absent_from and word == absent_word
        entry = 0 if known else scan(place, key_hash, key)
        if entry:
            value = load_acquire64(entry + 8)
            if value & CANDIDATE == 0:
                changed = used(base, value, line, key, k)
                if changed != value:
                    store_release64(entry + 8, changed)
                store_release64(address, word)
                return value & NO_ROW
            row = _admit_candidate(control, base, owner, place, entry, claimed, int(call[2]))
            if row >= 0:
                _let_go(base, address, word, place, 1, -1, 0)
                count_up(line, at.KEYS_ADMITTED, 1)
                return row
            store_release64(address, word)
            if row != -FULL:
                return row
            must_claim = True
            continue
        value = _enter_new(control, base, owner, place, key_hash, key, claimed, call)
        if value >= 0:
            candidate = value & CANDIDATE != 0
            if not candidate and value & NO_ROW == claimed:
                store_release64(hand + at.CLAIM, UNCLAIMED)
            _let_go(base, address, word, place, 0 if candidate else 1, 1 if candidate else 0, 0)
            if candidate:
                return ABSENT
            count_up(line, at.KEYS_ADMITTED, 1)
            return value & NO_ROW
        if value < ABSENT:
            store_release64(address, word)
            return value
        if at_once and claimed < 0:
            store_release64(address, word)
            must_claim = True
            continue
        if not split(base, segment, word | owner, line):
            store_release64(address, word)
            return -FULL
