"""Keys to rows: extendible hashing without a directory, in shared memory, through which nobody waits to read.

A segment's number is its hash pattern: with depth d, the keys whose hash has the lowest d bits of the number. So
nothing is allocated, doubled or followed, and which segments there are is told by their words alone. A full segment
s of depth d is *split*: segment ``s | 1 << d`` is cleared, gets copies of the keys that belong there, and its word is
published; then the copies' originals are removed from s, whose depth grows. Every state that a crash can leave is told
from the two words, so there is nothing to undo: whoever takes the word over finishes the split.

Within a segment a key lies in its home bucket or one of the next; the home knows how far one has to look. An entry's
key is written, then its value, then how far, then its tag, which alone makes it count: a reader that finds a key has
found it, whoever holds the segment. Only a caller that finds *nothing* has to know that nothing was on the move.

A key's entry comes to be *dead* by one store of its tag. It keeps its place and its row, which the next key that comes
there gets, once nobody can be about to use them: see ``keyed_rows``.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,no-any-return"

from __future__ import annotations

from multiverso.kernels.atomics import (
    compare_swap64,
    fence_acquire,
    hash64,
    load_acquire64,
    monotonic_ns,
    populate,
    prefetch,
    store_release64,
    trailing_zeros,
    words,
)
from multiverso.kernels.declaring import inner
from multiverso.kernels.row_words import count_up, hand_of, is_dead, keyed_line, rows_at
from multiverso.kernels.stripe_words import nap
from multiverso.kernels.waits import end_wait
from multiverso.keyed_layout import (
    BUCKET_BYTES,
    BUCKETS,
    CANDIDATE,
    CLAIMED,
    DEAD,
    DEPTH_BIT,
    EPOCHS,
    NO_ROW,
    OWNER,
    SEGMENT_BYTES,
    SEGMENT_VERSION,
    TAGS,
    UNCLAIMED,
    at,
)
from multiverso.layout import PAGE

ABSENT = -1
LOW_56 = 0xFFFFFFFFFFFFFF
ONES = 0x01010101010101
_NO_MEMORY = (12, 14)  # ENOMEM, EFAULT


@inner
def home_of(key_hash):
    """The bucket of its segment in which a key is looked for first."""
    return (key_hash >> 40) & (BUCKETS - 1)


@inner
def tag_of(key_hash):
    """0x82 .. 0xFF: `scan` may take a tag that differs in the lowest bit only for its own, and DEAD must not be one."""
    return max((key_hash >> 50) & 127, 2) | 128


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
    """The number of the segment that a hash belongs to; the hint only says where to begin to look."""
    depth = load_acquire64(base + at.HINT)
    while True:
        segment = key_hash & ((1 << depth) - 1)
        found = depth_of(load_acquire64(word_at(base, segment)))
        if found < 0:
            depth -= 1
        elif key_hash & ((1 << found) - 1) != segment:
            depth = found
        else:
            return segment


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
    bucket = segment_at(base, resolve(base, key_hash)) + home_of(key_hash) * BUCKET_BYTES
    prefetch(bucket)
    prefetch(bucket + 64)


@inner
def scan(place, key_hash, key):
    """Address of a key's entry in a segment, or 0."""
    home, tags = home_of(key_hash), tag_of(key_hash) * ONES
    header = load_acquire64(place + home * BUCKET_BYTES)
    far = (header >> 56) & 127
    for n in range(far + 1):
        bucket = place + ((home + n) & (BUCKETS - 1)) * BUCKET_BYTES
        if n:
            header = load_acquire64(bucket)
        differ = (header ^ tags) & LOW_56
        matches = (differ - ONES) & ~differ & TAGS
        while matches:
            entry = bucket + 16 + 16 * (trailing_zeros(matches) >> 3)
            if load_acquire64(entry) == key:
                return entry
            matches &= matches - 1
    return 0


@inner
def fill(place, home, n, slot, key, value, tag):
    """Writes an entry into a slot of the n-th bucket from its home; the tag, which is last, makes it count."""
    bucket = place + ((home + n) & (BUCKETS - 1)) * BUCKET_BYTES
    store_release64(bucket + 16 + 16 * slot, key)
    store_release64(bucket + 24 + 16 * slot, value)
    if n:
        at_home = load_acquire64(place + home * BUCKET_BYTES)
        if (at_home >> 56) & 127 < n:
            store_release64(place + home * BUCKET_BYTES, (at_home & LOW_56) | (n << 56))
    header = load_acquire64(bucket)
    store_release64(bucket, (header & ~(255 << (8 * slot))) | (tag << (8 * slot)))


@inner
def put(place, key_hash, key, value, probes, tag):
    """Enters a key into a free slot of a segment that is ours; how many buckets from its home, or -1."""
    home = home_of(key_hash)
    for n in range(probes + 1):
        free = ~load_acquire64(place + ((home + n) & (BUCKETS - 1)) * BUCKET_BYTES) & TAGS
        if free:
            fill(place, home, n, trailing_zeros(free) >> 3, key, value, tag)
            return n
    return -1


@inner
def counts_at(base, place):
    """Address of a segment's counts, by the segment's: not beside its entries, where they would be one miss more."""
    segment = (place - base - load_acquire64(base + at.SEGMENTS)) // SEGMENT_BYTES
    return base + load_acquire64(base + at.SEGMENT_COUNTS) + 8 * segment


@inner
def count(base, place, keys, candidates, dead):
    """Notes that a segment, which is ours, has so many more of each."""
    more = keys + (candidates << 16) + (dead << 32)
    address = counts_at(base, place)
    store_release64(address, load_acquire64(address) + more)


@inner
def _bytes_set(tags):
    """How many of seven tags are set, of which nothing but the highest bits is left."""
    return (((tags >> 7) * ONES) >> 48) & 255


@inner
def _dead_tags(header):
    """The highest bits of those tags that are DEAD, and of no others."""
    differ = (header ^ TAGS) & LOW_56
    return ~((differ & ~TAGS) + (TAGS - ONES) | differ) & TAGS


@inner
def _recount(base, place, restamp):
    """Counts what is in a segment; ``restamp``: its owner died, and may have left dead entries without an epoch."""
    entries, candidates, dead = 0, 0, 0
    epoch = load_acquire64(base + at.EPOCH) & EPOCHS
    admits = load_acquire64(base + at.ADMIT_AFTER) > 1
    for b in range(BUCKETS):
        bucket = place + b * BUCKET_BYTES
        header = load_acquire64(bucket)
        buried = _dead_tags(header)
        entries += _bytes_set(header & TAGS)
        dead += _bytes_set(buried)
        left = buried if restamp else 0
        while left:
            value = bucket + 24 + 16 * (trailing_zeros(left) >> 3)
            store_release64(value, (load_acquire64(value) & NO_ROW) | (epoch << 32))
            left &= left - 1
        left = header & TAGS & ~buried if admits else 0
        while left:
            value = load_acquire64(bucket + 24 + 16 * (trailing_zeros(left) >> 3))
            candidates += (value & CANDIDATE) != 0
            left &= left - 1
    keys = entries - dead - candidates
    store_release64(counts_at(base, place), keys + (candidates << 16) + (dead << 32))


@inner
def _survey(place, depth, moving, astray):
    """Notes which entries of a segment belong to its sibling, and which of the others are not in their home buckets.

    Args:
        moving, astray: of each bucket, the highest bits of such entries' tags; written.
    """
    for b in range(BUCKETS):
        bucket = place + b * BUCKET_BYTES
        left = load_acquire64(bucket) & TAGS
        gone, away = 0, 0
        while left:
            tag = left & -left
            key_hash = hash64(load_acquire64(bucket + 16 + 16 * (trailing_zeros(left) >> 3)))
            gone |= tag & -((key_hash >> depth) & 1)  # no branches: either is as likely
            away |= tag & -int(home_of(key_hash) != b)
            left ^= tag
        moving[b], astray[b] = gone, away & ~gone


@inner
def _remove_moved(place, moving):
    """Frees the entries of a segment that belong to its sibling."""
    for b in range(BUCKETS):
        bucket = place + b * BUCKET_BYTES
        if moving[b]:
            store_release64(bucket, load_acquire64(bucket) & ~((int(moving[b]) >> 7) * 255))


@inner
def _bring_nearer(place, astray):
    """Moves entries nearer to their homes, where they fit, and says in each home how far one has to look.

    May be cut off and done again anywhere: an entry that a dead owner had moved is there twice, equal.
    """
    far = words(128)
    for b in range(BUCKETS):
        bucket = place + b * BUCKET_BYTES
        left = int(astray[b])
        while left:
            slot = trailing_zeros(left) >> 3
            left &= left - 1
            tag = (load_acquire64(bucket) >> (8 * slot)) & 255
            if tag <= DEAD:
                continue
            here = bucket + 16 + 16 * slot
            key = load_acquire64(here)
            key_hash = hash64(key)
            home = home_of(key_hash)
            distance = (b - home) & (BUCKETS - 1)
            found = scan(place, key_hash, key)
            twice = found not in (0, here)
            nearer = -1 if twice else put(place, key_hash, key, load_acquire64(here + 8), distance - 1, tag)
            if twice or nearer >= 0:
                store_release64(bucket, load_acquire64(bucket) & ~(255 << (8 * slot)))
            if twice:
                distance = (((found - place) // BUCKET_BYTES) - home) & (BUCKETS - 1)
            elif nearer >= 0:
                distance = nearer
            far[home] = max(far[home], distance)
    for b in range(BUCKETS):
        bucket = place + b * BUCKET_BYTES
        header = load_acquire64(bucket)
        exact = (header & LOW_56) | (int(far[b]) << 56)
        if exact != header:
            store_release64(bucket, exact)


@inner
def _finish(base, segment, word):
    """Ends what the dead owner of a segment had begun, and lets it go; the word is mine."""
    depth, free = depth_of(word), word & ~OWNER
    place = segment_at(base, segment)
    if depth < load_acquire64(base + at.MOST_DEPTH):
        sibling = load_acquire64(word_at(base, segment | (1 << depth)))
        if sibling != 0:  # it is out: the split counts
            moving, astray = words(BUCKETS), words(BUCKETS)
            _survey(place, depth, moving, astray)
            _remove_moved(place, moving)
            _bring_nearer(place, astray)
            free += DEPTH_BIT
    _recount(base, place, True)
    store_release64(word_at(base, segment), free + SEGMENT_VERSION)


@inner
def split(base, segment, word, line):
    """A full segment, which is mine, becomes two, and is let go; False: there is no room, and it is still mine."""
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
    _survey(place, depth, moving, astray)
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
    _recount(base, sibling, False)
    # who begins too shallow ends in `segment`, where finding nothing does not count while it is held
    while True:
        hint = load_acquire64(base + at.HINT)
        if hint >= depth + 1 or compare_swap64(base + at.HINT, hint, depth + 1) == hint:
            break
    store_release64(word_at(base, new), SEGMENT_VERSION | ((depth + 2) << 20))
    _remove_moved(place, moving)
    _bring_nearer(place, astray)
    _recount(base, place, False)
    store_release64(word_at(base, segment), (word & ~OWNER) + DEPTH_BIT + SEGMENT_VERSION)
    count_up(line, at.SPLITS, 1)
    return True


@inner
def _settle_claim(base, dead, segment):
    """Drops the claim of a dead owner of a segment if its row has been entered there."""
    hand = hand_of(base, dead)
    claim = load_acquire64(hand + at.CLAIM)
    if claim & 3 != CLAIMED:
        return
    key = load_acquire64(hand + at.KEY)
    entry = scan(segment_at(base, segment), hash64(key), key)
    if entry and load_acquire64(entry + 8) & NO_ROW == claim >> 2:
        compare_swap64(hand + at.CLAIM, claim, UNCLAIMED)


@inner
def take_over_segment(base, owner, segment, value):
    """The owner of a segment's word is dead: the word becomes mine, and what it had begun is finished."""
    mine = (value & ~OWNER) | owner
    store_release64(hand_of(base, owner) + at.SEGMENT, segment + 1)
    # before the word is mine: if I die then, nobody knows any more whose it was
    _settle_claim(base, value, segment)
    if compare_swap64(word_at(base, segment), value, mine) == value:
        count_up(keyed_line(base, owner), at.TAKEN_OVER, 1)
        _finish(base, segment, mine)


@inner
def await_segment(control, base, owner, segment):
    """Waits until nobody holds a segment, taking it over from the dead: 0 or TIMED_OUT."""
    address = word_at(base, segment)
    me = (owner & 4095) - 1
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
        segment = resolve(base, key_hash)
        address = word_at(base, segment)
        word = load_acquire64(address)
        depth = depth_of(word)
        if depth < 0 or key_hash & ((1 << depth) - 1) != segment:
            continue
        entry = scan(segment_at(base, segment), key_hash, key)
        if entry:
            value = load_acquire64(entry + 8)
            fence_acquire()
            if load_acquire64(entry) == key:  # a slot's key changes before its value does
                return value, segment, word
        elif word & OWNER:  # something is on the move: look again, then wait until it has come to rest
            tries += 1
            if tries > 2:
                code = await_segment(control, base, owner, segment)
                if code != 0:
                    return -code, segment, word
        else:
            fence_acquire()
            if load_acquire64(address) == word:
                return ABSENT, segment, word


@inner
def find_row(control, base, owner, key_hash, key):
    """Row of a key, ABSENT (also of a candidate), or -TIMED_OUT."""
    value, _, _ = seek(control, base, owner, key_hash, key)
    if value < 0:
        return value
    return ABSENT if value & CANDIDATE else value & NO_ROW
