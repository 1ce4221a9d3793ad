"""How keys come to rows, and how rows come back.

A new key's row is either a fresh one, or the one that a *dead* entry of its segment still has. The row of a key that
was removed in an epoch goes to another key only when every call that is under way began later (`keyed.fresh`).
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,no-any-return"

from __future__ import annotations

from multiverso.compiling.atomics import compare_swap64, hash64, load_acquire64, store_release64, trailing_zeros
from multiverso.compiling.declaring import inner
from multiverso.kernels.codes import FULL
from multiverso.kernels.keyed.buckets import LOW_56, ONES, count, counts_at, fill, home_of, put, scan, tag_of
from multiverso.kernels.keyed.fresh import begin_row, claim_row, give_claimed, safe_epoch, stamp
from multiverso.kernels.keyed.index import ABSENT, segment_at, split, word_at
from multiverso.kernels.keyed.row_words import count_up, hold_row, undo_slot_of
from multiverso.kernels.keyed.segments import free_segment
from multiverso.layout.keyed import (
    BUCKET_BYTES,
    BUCKETS,
    CANDIDATE,
    DEAD,
    EPOCHS,
    FREQUENCY_SHIFT,
    NO_ROW,
    PROBES,
    ROW_VERSION,
    SEGMENT_VERSION,
    TAGS,
    USED_SHIFT,
    at,
)

_EXACT = 16  # frequencies below this are counted one by one, then each four double


# -- rows of dead entries --------------------------------------------------------------------------------------


@inner
def _reusable(place, home, safe):
    """A dead entry near a home that no call can be using: ``(how many buckets from there << 3) | slot``, or -1."""
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
def _release(base, address, word, place, keys, candidates, dead):
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
        give_claimed(base, owner)
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
    undo = undo_slot_of(base, owner)
    at_once = call[2] <= 1
    must_claim = False
    while True:
        segment, word, code = free_segment(control, base, owner, key_hash)
        if code != 0:
            return -code
        address, place = word_at(base, segment), segment_at(base, segment)
        claimed = -1
        # a fresh row is written before the word is taken, unless a dead entry's may do
        if must_claim or (at_once and load_acquire64(counts_at(base, place)) >> 32 == 0):
            claimed = claim_row(base, owner, undo, key)
            if claimed < 0:
                return -FULL
        store_release64(undo + at.SEGMENT, segment + 1)
        if compare_swap64(address, word, word | owner) != word:
            continue
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
                _release(base, address, word, place, 1, -1, 0)
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
                give_claimed(base, owner)
            _release(base, address, word, place, 0 if candidate else 1, 1 if candidate else 0, 0)
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
