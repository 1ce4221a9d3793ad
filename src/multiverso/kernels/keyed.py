"""Keys to rows: extendible hashing without a directory, in shared memory, through which nobody waits to read.

A segment's number is its hash pattern: with depth d, the keys whose hash has the lowest d bits of the number. So
nothing is allocated, doubled or followed, and which segments there are is told by their words alone. A full segment
s of depth d is *split*: segment ``s | 1 << d`` is cleared, gets copies of the keys that belong there, and its word is
published; then the copies' originals are removed from s, whose depth grows. Every state that a crash can leave is told
from the two words, so there is nothing to undo: whoever takes the word over finishes the split.

Within a segment a key lies in its home bucket or one of the next; the home knows how far one has to look. An entry's
key is written, then its value, then how far, then its tag, which alone makes it count: a reader that finds a key has
found it, whoever holds the segment. Only who finds *nothing* has to know that nothing was on the move.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,no-any-return"

from __future__ import annotations

from multiverso.kernels.atomics import (
    add64,
    compare_swap64,
    fence_acquire,
    fence_release,
    hash64,
    load_acquire64,
    load_double,
    monotonic_ns,
    prefetch,
    store_release64,
    trailing_zeros,
    words,
)
from multiverso.kernels.codes import FULL
from multiverso.kernels.declaring import Address, Int, Words, inner, kernel
from multiverso.kernels.initial_rows import store_number, write_initial
from multiverso.kernels.row_words import (
    add_to_rows,
    count_up,
    hand_of,
    is_dead,
    keyed_line,
    nap,
    owner_of,
    read_rows,
    settle_row,
)
from multiverso.kernels.waits import end_wait
from multiverso.keyed_layout import (
    BUCKET_BYTES,
    BUCKETS,
    DEPTH_BIT,
    ENTRIES,
    LINE_BYTES,
    LINES,
    OWNER,
    PROBES,
    SEGMENT_BYTES,
    SEGMENT_VERSION,
    TAGS,
    at,
)

_ABSENT = -1
_AHEAD = 16
_LOW_56 = 0xFFFFFFFFFFFFFF
_ONES = 0x01010101010101


@inner
def _home(key_hash):
    return (key_hash >> 40) & (BUCKETS - 1)


@inner
def _tag(key_hash):
    return ((key_hash >> 50) & 127) | 128


@inner
def _depth(word):
    """Depth of a segment by its word; -1: there is none."""
    return ((word >> 20) & 63) - 1


@inner
def _word_at(base, segment):
    return base + load_acquire64(base + at.SEGMENT_WORDS) + 8 * segment


@inner
def _segment_at(base, segment):
    return base + load_acquire64(base + at.SEGMENTS) + SEGMENT_BYTES * segment


@inner
def _resolve(base, key_hash):
    """The number of the segment that a hash belongs to; the hint only says where to begin to look."""
    depth = load_acquire64(base + at.HINT)
    while True:
        segment = key_hash & ((1 << depth) - 1)
        found = _depth(load_acquire64(_word_at(base, segment)))
        if found < 0:
            depth -= 1
        elif key_hash & ((1 << found) - 1) != segment:
            depth = found
        else:
            return segment


@inner
def _scan(place, key_hash, key):
    """Address of a key's entry in a segment, or 0."""
    home, tags = _home(key_hash), _tag(key_hash) * _ONES
    header = load_acquire64(place + home * BUCKET_BYTES)
    far = (header >> 56) & 127
    for n in range(far + 1):
        bucket = place + ((home + n) & (BUCKETS - 1)) * BUCKET_BYTES
        if n:
            header = load_acquire64(bucket)
        differ = (header ^ tags) & _LOW_56
        matches = (differ - _ONES) & ~differ & TAGS
        while matches:
            entry = bucket + 16 + 16 * (trailing_zeros(matches) >> 3)
            if load_acquire64(entry) == key:
                return entry
            matches &= matches - 1
    return 0


@inner
def _place(place, key_hash, key, value, probes):
    """Enters a key into a segment that is ours; how many buckets from its home, or -1."""
    home = _home(key_hash)
    for n in range(probes + 1):
        bucket = place + ((home + n) & (BUCKETS - 1)) * BUCKET_BYTES
        header = load_acquire64(bucket)
        free = ~header & TAGS
        if free:
            slot = trailing_zeros(free) >> 3
            store_release64(bucket + 16 + 16 * slot, key)
            store_release64(bucket + 24 + 16 * slot, value)
            if n:
                at_home = load_acquire64(place + home * BUCKET_BYTES)
                if (at_home >> 56) & 127 < n:
                    store_release64(place + home * BUCKET_BYTES, (at_home & _LOW_56) | (n << 56))
            store_release64(bucket, header | (_tag(key_hash) << (8 * slot)))
            return n
    return -1


@inner
def _remove_moved(place, depth):
    """Frees the entries of a segment that belong to its sibling."""
    for b in range(BUCKETS):
        bucket = place + b * BUCKET_BYTES
        header = load_acquire64(bucket)
        for slot in range(ENTRIES):
            moved = (hash64(load_acquire64(bucket + 16 + 16 * slot)) >> depth) & 1
            if (header >> (8 * slot)) & 128 and moved:
                header &= ~(255 << (8 * slot))
        store_release64(bucket, header)


@inner
def _bring_nearer(place):
    """Moves entries nearer to their homes, where they fit, and says in each home how far one has to look.

    May be cut off and done again anywhere: an entry that a dead owner had moved is there twice, equal.
    """
    far = words(128)
    for b in range(BUCKETS):
        bucket = place + b * BUCKET_BYTES
        for slot in range(ENTRIES):
            if not (load_acquire64(bucket) >> (8 * slot)) & 128:
                continue
            here = bucket + 16 + 16 * slot
            key = load_acquire64(here)
            key_hash = hash64(key)
            home = _home(key_hash)
            distance = (b - home) & (BUCKETS - 1)
            if distance:
                found = _scan(place, key_hash, key)
                twice = found not in (0, here)
                nearer = -1 if twice else _place(place, key_hash, key, load_acquire64(here + 8), distance - 1)
                if twice or nearer >= 0:
                    store_release64(bucket, load_acquire64(bucket) & ~(255 << (8 * slot)))
                if twice:
                    distance = (((found - place) // BUCKET_BYTES) - home) & (BUCKETS - 1)
                elif nearer >= 0:
                    distance = nearer
            far[home] = max(far[home], distance)
    for b in range(BUCKETS):
        bucket = place + b * BUCKET_BYTES
        store_release64(bucket, (load_acquire64(bucket) & _LOW_56) | (int(far[b]) << 56))


@inner
def _finish(base, segment, word):
    """Ends what the (dead or living) owner of a segment had begun, and lets it go; the word is mine."""
    depth, free = _depth(word), word & ~OWNER
    if depth < load_acquire64(base + at.MOST_DEPTH):
        sibling = load_acquire64(_word_at(base, segment | (1 << depth)))
        if sibling != 0:  # it is out: the split counts
            place = _segment_at(base, segment)
            _remove_moved(place, depth)
            _bring_nearer(place)
            free += DEPTH_BIT
    store_release64(_word_at(base, segment), free + SEGMENT_VERSION)


@inner
def _split(base, segment, word, line):
    """A full segment, which is mine, becomes two; False: there is no room for another."""
    depth = _depth(word)
    if depth >= load_acquire64(base + at.MOST_DEPTH):
        return False
    new = segment | (1 << depth)
    place, sibling = _segment_at(base, segment), _segment_at(base, new)
    for offset in range(0, SEGMENT_BYTES, 8):  # a dead owner may have left something here
        if load_acquire64(sibling + offset) != 0:
            store_release64(sibling + offset, 0)
    for b in range(BUCKETS):
        header = load_acquire64(place + b * BUCKET_BYTES)
        for slot in range(ENTRIES):
            entry = place + b * BUCKET_BYTES + 16 + 16 * slot
            key = load_acquire64(entry)
            key_hash = hash64(key)
            if (header >> (8 * slot)) & 128 and (key_hash >> depth) & 1:
                _place(sibling, key_hash, key, load_acquire64(entry + 8), BUCKETS - 1)
    while (
        True
    ):  # who begins too shallow ends in `segment`, where finding nothing does not count while it is held
        hint = load_acquire64(base + at.HINT)
        if hint >= depth + 1 or compare_swap64(base + at.HINT, hint, depth + 1) == hint:
            break
    store_release64(_word_at(base, new), SEGMENT_VERSION | ((depth + 2) << 20))
    _finish(base, segment, word)
    count_up(line, at.SPLITS, 1)
    return True


@inner
def _take_over_segment(base, owner, segment, value):
    """The owner of a segment's word is dead: the word becomes mine, and what it had begun is finished."""
    mine = (value & ~OWNER) | owner
    store_release64(hand_of(base, owner) + at.SEGMENT, segment + 1)
    if compare_swap64(_word_at(base, segment), value, mine) == value:
        count_up(keyed_line(base, owner), at.TAKEN_OVER, 1)
        _finish(base, segment, mine)


@inner
def _await_segment(control, base, owner, segment):
    """Waits until nobody holds a segment, taking it over from the dead: 0 or TIMED_OUT."""
    address = _word_at(base, segment)
    count_up(keyed_line(base, owner), at.WAITS, 1)
    began = monotonic_ns()
    tries = 0
    while True:
        value = load_acquire64(address)
        if value & OWNER == 0:
            end_wait(control, (owner & 4095) - 1)
            return 0
        if is_dead(control, base, value):
            _take_over_segment(base, owner, segment, value)
            continue
        tries += 1
        code = nap(control, owner, address, tries, began)
        if code != 0:
            return code


@inner
def _find_one(control, base, owner, key_hash, key):
    """Row of a key, ABSENT, or -TIMED_OUT."""
    tries = 0
    while True:
        segment = _resolve(base, key_hash)
        address = _word_at(base, segment)
        word = load_acquire64(address)
        depth = _depth(word)
        if depth < 0 or key_hash & ((1 << depth) - 1) != segment:
            continue
        entry = _scan(_segment_at(base, segment), key_hash, key)
        if entry:
            value = load_acquire64(entry + 8)
            fence_acquire()
            if load_acquire64(entry) == key:  # a slot's key changes before its value does
                return value & 0xFFFFFFFF
        elif word & OWNER:  # something is on the move: look again, then wait until it has come to rest
            tries += 1
            if tries > 2:
                code = _await_segment(control, base, owner, segment)
                if code != 0:
                    return -code
        else:
            fence_acquire()
            if load_acquire64(address) == word:
                return _ABSENT


@inner
def _fetch(base, key):
    """Sends for the bucket in which a key will be looked for."""
    key_hash = hash64(key)
    bucket = _segment_at(base, _resolve(base, key_hash)) + _home(key_hash) * BUCKET_BYTES
    prefetch(bucket)
    prefetch(bucket + 64)


@inner
def _begin_row(base, row, key):
    """Writes a row that nobody can see yet: the key's initial values, and the updater's."""
    columns, itemsize = load_acquire64(base + at.COLUMNS), load_acquire64(base + at.ITEMSIZE)
    place = base + load_acquire64(base + at.ROWS) + row * load_acquire64(base + at.ROW_BYTES)
    write_initial(base, key, place)
    for state in range(load_acquire64(base + at.STATES)):
        place += columns * itemsize
        initial = load_double(base + at.STATE_INITIAL + 8 * state)
        for column in range(columns):
            store_number(load_acquire64(base + at.DTYPE), place + column * itemsize, initial)


@inner
def _claim(base, hand, key):
    """Returns the row that the next key of this worker gets, written already, or -1: there is none."""
    if load_acquire64(hand + at.CLAIMED) == 0:
        row = add64(base + at.NEXT_ROW, 1)
        if row >= load_acquire64(base + at.CAPACITY):
            return -1
        store_release64(hand + at.CLAIMED_ROW, row)
        store_release64(hand + at.CLAIMED, 1)
    row = load_acquire64(hand + at.CLAIMED_ROW)
    store_release64(hand + at.KEY, key)
    _begin_row(base, row, key)
    return row


@inner
def _enter_key(control, base, owner, key_hash, key, line):
    """Row of a key, which is entered unless it is there; -TIMED_OUT or -FULL."""
    hand = hand_of(base, owner)
    while True:
        row = _find_one(control, base, owner, key_hash, key)
        if row != _ABSENT:
            return row
        row = _claim(base, hand, key)
        if row < 0:
            return -FULL
        segment = _resolve(base, key_hash)
        address = _word_at(base, segment)
        word = load_acquire64(address)
        depth = _depth(word)
        if depth < 0 or key_hash & ((1 << depth) - 1) != segment:
            continue
        if word & OWNER:
            code = _await_segment(control, base, owner, segment)
            if code != 0:
                return -code
            continue
        store_release64(hand + at.SEGMENT, segment + 1)
        if compare_swap64(address, word, word | owner) != word:
            continue
        fence_release()
        place = _segment_at(base, segment)
        entry = _scan(place, key_hash, key)
        if entry:
            row = load_acquire64(entry + 8) & 0xFFFFFFFF
            store_release64(address, word)
            return row
        if _place(place, key_hash, key, row, PROBES) >= 0:
            store_release64(address, word + SEGMENT_VERSION)
            store_release64(hand + at.CLAIMED, 0)
            count_up(line, at.KEYS_ADMITTED, 1)
            return row
        if not _split(base, segment, word | owner, line):
            store_release64(address, word)
            return -FULL


@kernel
def find(control: Address, base: Address, me: Int, keys: Words, rows: Words, progress: Int) -> Int:
    """Writes the rows of ``keys[progress:]`` (-1: absent): ``(done << 16) | code``."""
    owner = owner_of(base, me)
    for k in range(progress, keys.size):
        if k + _AHEAD < keys.size:
            _fetch(base, int(keys[k + _AHEAD]))
        key = int(keys[k])
        row = _find_one(control, base, owner, hash64(key), key)
        if row < _ABSENT:
            return (k << 16) | -row
        rows[k] = row
    return 0


@kernel
def admit(control: Address, base: Address, me: Int, keys: Words, rows: Words, progress: Int) -> Int:
    """Like :func:`find`, but a key that is not there is entered, with its initial row."""
    owner = owner_of(base, me)
    line = keyed_line(base, owner)
    for k in range(progress, keys.size):
        if k + _AHEAD < keys.size:
            _fetch(base, int(keys[k + _AHEAD]))
        key = int(keys[k])
        row = _enter_key(control, base, owner, hash64(key), key, line)
        if row < 0:
            return (k << 16) | -row
        rows[k] = row
    return 0


@kernel
def read(
    control: Address, base: Address, me: Int, keys: Words, rows: Words, out: Address, progress: Int
) -> Int:
    """Writes the values of rows, and for those below 0 the initial values of their keys: ``(done << 16) | code``."""
    code = read_rows(control, base, me, rows, out, progress)
    if code != 0:
        return code
    size = load_acquire64(base + at.COLUMNS) * load_acquire64(base + at.ITEMSIZE)
    for k in range(rows.size):
        if rows[k] < 0:
            write_initial(base, int(keys[k]), out + k * size)
    line = base + LINES + LINE_BYTES * me
    count_up(line, at.GETS, 1)
    count_up(line, at.ROWS_READ, rows.size)
    return 0


@kernel
def add(
    control: Address, base: Address, updater: Address, me: Int, rows: Words, delta: Address, progress: Int
) -> Int:
    """Gives a delta for each row to the updater, one after another: ``(done << 16) | code``."""
    code = add_to_rows(control, base, updater, me, rows, delta, progress)
    if code == 0:
        line = base + LINES + LINE_BYTES * me
        count_up(line, at.ADDS, 1)
        count_up(line, at.ROWS_ADDED, rows.size)
    return code


@kernel
def enter(control: Address, base: Address, me: Int) -> Int:
    """A new life of a worker's number: ends what an earlier one had in hand, and keeps its claimed row. 0 or a code."""
    owner = owner_of(base, me)
    settle_row(base, owner)
    hand = hand_of(base, owner)
    segment = load_acquire64(hand + at.SEGMENT) - 1
    if segment >= 0:
        value = load_acquire64(_word_at(base, segment))
        if value & 4095 == owner & 4095 and value & OWNER != owner:
            _take_over_segment(base, owner, segment, value)
    if load_acquire64(hand + at.CLAIMED):
        key = load_acquire64(hand + at.KEY)
        row = _find_one(control, base, owner, hash64(key), key)
        if row < _ABSENT:
            return -row
        if row == load_acquire64(hand + at.CLAIMED_ROW):
            store_release64(hand + at.CLAIMED, 0)
    return 0


@kernel
def rest(control: Address, base: Address, me: Int, segment: Int) -> Int:
    """Waits until nobody holds a segment: 0 or a code."""
    return _await_segment(control, base, owner_of(base, me), segment)
