"""What is within one segment of a keyed table's index: buckets of seven entries, and which key is in which.

A key lies in its home bucket or one of the next; the home knows how far one has to look. An entry's key is written,
then its value, then how far, then its tag, which alone makes it count: a reader that finds a key has found it, whoever
holds the segment.

A segment is changed under its word; `keyed.index` knows which segments there are, and who holds them.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,no-any-return"

from __future__ import annotations

from multiverso.compiling.atomics import hash64, load_acquire64, store_release64, trailing_zeros, words
from multiverso.compiling.declaring import inner
from multiverso.layout.keyed import BUCKET_BYTES, BUCKETS, CANDIDATE, DEAD, EPOCHS, NO_ROW, SEGMENT_BYTES, TAGS, at

LOW_56 = 0xFFFFFFFFFFFFFF
ONES = 0x01010101010101


@inner
def home_of(key_hash):
    """The bucket of its segment in which a key is looked for first."""
    return (key_hash >> 40) & (BUCKETS - 1)


@inner
def tag_of(key_hash):
    """0x82 .. 0xFF: `scan` may take a tag that differs in the lowest bit only for its own, and DEAD must not be one."""
    return max((key_hash >> 50) & 127, 2) | 128


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
def recount(base, place, restamp):
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
def survey(place, depth, moving, astray):
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
def remove_moved(place, moving):
    """Frees the entries of a segment that belong to its sibling."""
    for b in range(BUCKETS):
        bucket = place + b * BUCKET_BYTES
        if moving[b]:
            store_release64(bucket, load_acquire64(bucket) & ~((int(moving[b]) >> 7) * 255))


@inner
def bring_nearer(place, astray):
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
