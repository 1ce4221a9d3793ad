"""Keys to rows: extendible hashing without a directory, in shared memory, with readers that never wait.

A segment's number is its hash pattern: with depth d, the keys whose hash has the lowest d bits of the number. So
nothing is allocated, doubled or followed, and their words alone say which segments there are. A full segment
s of depth d is *split*: segment ``s | 1 << d`` is cleared, gets copies of the keys that belong there, and its word is
published; then the copies' originals are removed from s, whose depth grows. Every state that a crash can leave is told
from the two words, so there is nothing to undo: the worker that takes the word over finishes the split.

Within a segment a reader that finds a key has found it, whoever holds the segment (`keyed.buckets`). Only a caller
that finds *nothing* has to know that nothing was on the move.

A key's entry comes to be *dead* by one store of its tag. It keeps its place and its row, which the next key that comes
there gets, once no call can be about to use them: see `keyed.rows`.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,no-any-return"

from __future__ import annotations

from multiverso.compiling.atomics import (
    compare_swap64,
    hash64,
    load_acquire64,
    monotonic_ns,
    populate,
    prefetch,
    store_release64,
    trailing_zeros,
    words,
)
from multiverso.compiling.declaring import inner
from multiverso.kernels.keyed.buckets import bring_nearer, counts_at, home_of, put, recount, remove_moved, scan, survey
from multiverso.kernels.keyed.fresh import claim_after
from multiverso.kernels.keyed.row_words import count_up, is_dead, keyed_line, rows_at, undo_slot_of
from multiverso.kernels.stripe_words import nap, undo_slot_in
from multiverso.kernels.waits import end_wait
from multiverso.layout.keyed import (
    BUCKET_BYTES,
    BUCKETS,
    CANDIDATE,
    CLAIMED,
    DEPTH_BIT,
    NO_ROW,
    OWNER,
    SEGMENT_BYTES,
    SEGMENT_VERSION,
    at,
)
from multiverso.layout.words import PAGE

ABSENT = -1
_NO_MEMORY = (12, 14)  # ENOMEM, EFAULT


@inner
def depth_of(word):
    """Depth of a segment by its word; -1: there is none."""
    return ((word >> 20) & 63) - 1


@inner
def word_at(base, segment):
    """Address of a segment's word."""
    return base + load_acquire64(base + at.SEGMENT_WORDS) + 8 * segment


@inner
def segment_at(base, segment):
    """Address of a segment's buckets."""
    return base + load_acquire64(base + at.SEGMENTS) + SEGMENT_BYTES * segment


@inner
def resolve(base, key_hash):
    """The number of the segment that a hash belongs to, and its word; the hint only says where to begin to look."""
    depth = load_acquire64(base + at.HINT)
    while True:
        segment = key_hash & ((1 << depth) - 1)
        word = load_acquire64(word_at(base, segment))
        found = depth_of(word)
        if found < 0:
            depth -= 1
        elif key_hash & ((1 << found) - 1) != segment:
            depth = found
        else:
            return segment, word


@inner
def next_pattern(segment, depth):
    """The hash pattern after a segment, in the order of the reversed hash: what splits later splits into what was met.

    -1 after the last.
    """
    bit = (1 << depth) >> 1
    while bit and segment & bit:
        segment &= ~bit
        bit >>= 1
    return segment | bit if bit else -1


@inner
def fetch(base, key):
    """Sends for the bucket in which a key will be looked for."""
    key_hash = hash64(key)
    segment, _ = resolve(base, key_hash)
    bucket = segment_at(base, segment) + home_of(key_hash) * BUCKET_BYTES
    prefetch(bucket)
    prefetch(bucket + 64)


@inner
def fetch_to_enter(base, key):
    """As ``fetch``, and for what else entering the key will look at: the next bucket, and the segment's counts."""
    key_hash = hash64(key)
    segment, _ = resolve(base, key_hash)
    home, place = home_of(key_hash), segment_at(base, segment)
    prefetch(place + home * BUCKET_BYTES)
    prefetch(place + home * BUCKET_BYTES + 64)
    prefetch(place + ((home + 1) & (BUCKETS - 1)) * BUCKET_BYTES)
    prefetch(counts_at(base, place))


@inner
def _finish(base, segment, word):
    """Ends what the dead owner of a segment had begun, and lets it go; the word is mine."""
    depth, free = depth_of(word), word & ~OWNER
    place = segment_at(base, segment)
    if depth < load_acquire64(base + at.MOST_DEPTH):
        sibling = load_acquire64(word_at(base, segment | (1 << depth)))
        if sibling != 0:  # it is out: the split counts
            moving, astray = words(BUCKETS), words(BUCKETS)
            survey(place, depth, moving, astray)
            remove_moved(place, moving)
            bring_nearer(place, astray)
            free += DEPTH_BIT
    recount(base, place, True)
    store_release64(word_at(base, segment), free + SEGMENT_VERSION)


@inner
def split(base, segment, word, line):
    """A full segment, which is mine, becomes two, and is released; False: there is no room, and it is still mine."""
    depth = depth_of(word)
    if depth >= load_acquire64(base + at.MOST_DEPTH):
        return False
    new = segment | (1 << depth)
    place, sibling = segment_at(base, segment), segment_at(base, new)
    for memory in (word_at(base, new), counts_at(base, sibling)):
        if populate(memory & ~(PAGE - 1), PAGE) in _NO_MEMORY:
            return False
    if populate(sibling, SEGMENT_BYTES) in _NO_MEMORY:  # or a signal would end each that tries it in turn
        return False
    for offset in range(0, SEGMENT_BYTES, 8):  # a dead owner may have left something here
        if load_acquire64(sibling + offset) != 0:
            store_release64(sibling + offset, 0)
    moving, astray = words(BUCKETS), words(BUCKETS)
    survey(place, depth, moving, astray)
    for b in range(BUCKETS):
        bucket = place + b * BUCKET_BYTES
        header, left = load_acquire64(bucket), int(moving[b])
        while left:
            slot = trailing_zeros(left) >> 3
            entry = bucket + 16 + 16 * slot
            key = load_acquire64(entry)
            tag = (header >> (8 * slot)) & 255
            put(sibling, hash64(key), key, load_acquire64(entry + 8), BUCKETS - 1, tag)
            left &= left - 1
    recount(base, sibling, False)
    # who begins too shallow ends in `segment`, where finding nothing does not count while it is held
    while True:
        hint = load_acquire64(base + at.HINT)
        if hint >= depth + 1 or compare_swap64(base + at.HINT, hint, depth + 1) == hint:
            break
    store_release64(word_at(base, new), SEGMENT_VERSION | ((depth + 2) << 20))
    remove_moved(place, moving)
    bring_nearer(place, astray)
    recount(base, place, False)
    store_release64(word_at(base, segment), (word & ~OWNER) + DEPTH_BIT + SEGMENT_VERSION)
    count_up(line, at.SPLITS, 1)
    return True


@inner
def _settle_claim(base, dead, segment):
    """Drops the claim of a dead owner of a segment if its row has been entered there."""
    undo = undo_slot_of(base, dead)
    claim = load_acquire64(undo + at.CLAIM)
    if claim & 3 != CLAIMED:
        return
    key = load_acquire64(undo + at.KEY)
    entry = scan(segment_at(base, segment), hash64(key), key)
    if entry and load_acquire64(entry + 8) & NO_ROW == (claim >> 2) & NO_ROW:
        compare_swap64(undo + at.CLAIM, claim, claim_after(claim))


@inner
def take_over_segment(base, owner, segment, value):
    """The owner of a segment's word is dead: the word becomes mine, and what it had begun is finished."""
    mine = (value & ~OWNER) | owner
    store_release64(undo_slot_of(base, owner) + at.SEGMENT, segment + 1)
    # before the word is mine: if I die then, its owner is unknown
    _settle_claim(base, value, segment)
    if compare_swap64(word_at(base, segment), value, mine) == value:
        count_up(keyed_line(base, owner), at.TAKEN_OVER, 1)
        _finish(base, segment, mine)


@inner
def await_segment(control, base, owner, segment):
    """Waits until nobody holds a segment, taking it over from the dead: 0 or TIMED_OUT."""
    address = word_at(base, segment)
    me = undo_slot_in(owner)
    count_up(keyed_line(base, owner), at.WAITS, 1)
    began = monotonic_ns()
    tries = 0
    while True:
        value = load_acquire64(address)
        if value & OWNER == 0:
            count_up(keyed_line(base, owner), at.WAITED, end_wait(control, me))
            return 0
        if is_dead(control, value):
            take_over_segment(base, owner, segment, value)
            continue
        tries += 1
        code = nap(rows_at(base, me), control, me, value, address, tries, began)
        if code != 0:
            return code


@inner
def seek(control, base, owner, key_hash, key):
    """What stands beside a key, ABSENT, or -TIMED_OUT; if it is absent, also the segment and its word.

    For as long as that word is the same, the key is not there.
    """
    tries = 0
    while True:
        segment, word = resolve(base, key_hash)
        entry = scan(segment_at(base, segment), key_hash, key)
        if entry:
            value = load_acquire64(entry + 8)
            if load_acquire64(entry) == key:  # a slot's key changes before its value does
                return value, segment, word
        elif word & OWNER:  # something is on the move: look again, then wait until it has come to rest
            tries += 1
            if tries > 2:
                code = await_segment(control, base, owner, segment)
                if code != 0:
                    return -code, segment, word
        elif load_acquire64(word_at(base, segment)) == word:
            return ABSENT, segment, word


@inner
def find_row(control, base, owner, key_hash, key):
    """Row of a key, ABSENT (also of a candidate), or -TIMED_OUT."""
    value, _, _ = seek(control, base, owner, key_hash, key)
    if value < 0:
        return value
    return ABSENT if value & CANDIDATE else value & NO_ROW
