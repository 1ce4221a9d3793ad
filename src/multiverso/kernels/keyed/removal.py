"""Keys that go: removed by name, or evicted, a segment at a time."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,no-any-return"

from __future__ import annotations

from multiverso.compiling.atomics import (
    add64,
    compare_swap64,
    fence_all,
    hash64,
    load_acquire64,
    load_double,
    load_float32,
    monotonic_ns,
    store_release64,
    words,
)
from multiverso.compiling.declaring import Address, Int, Words, inner, kernel
from multiverso.kernels.keyed.buckets import count, scan
from multiverso.kernels.keyed.fresh import oldest_epoch
from multiverso.kernels.keyed.index import (
    depth_of,
    fetch,
    next_pattern,
    resolve,
    segment_at,
    take_over_segment,
    word_at,
)
from multiverso.kernels.keyed.row_words import count_up, hold_row, is_dead, keyed_line, owner_of, undo_slot_of
from multiverso.kernels.keyed.segments import SEGMENT_ENTRIES, take_segment
from multiverso.layout.keyed import (
    BUCKET_BYTES,
    BUCKETS,
    CANDIDATE,
    DEAD,
    ENTRIES,
    EPOCHS,
    FLOAT32,
    FREQUENCY_SHIFT,
    LINE_BYTES,
    LINES,
    NO_ROW,
    OWNER,
    OWNERS,
    SEGMENT_VERSION,
    USED_SHIFT,
    at,
)

_AHEAD = 16
WHOLE = 1 << 48  # of the hash patterns, as `evict` counts what it has seen


@inner
def _bury(base, place, entry, line, what):
    """A key goes: its entry keeps its row until no call can be using it; under the word of its segment.

    Args:
        line: of this worker, which counts there what has become of keys with a row.
        what: what has.
    """
    value = load_acquire64(entry + 8)
    if value & CANDIDATE == 0 and load_acquire64(base + at.GENERATION) > 1:  # a snapshot keeps increments
        number = add64(base + at.REMOVED, 1)
        ring = base + load_acquire64(base + at.REMOVALS)
        store_release64(ring + 8 * (number & (load_acquire64(base + at.RING) - 1)), load_acquire64(entry))
    bucket = entry - (entry - place) % BUCKET_BYTES
    shift = 8 * ((entry - bucket - 16) // 16)
    header = load_acquire64(bucket)
    store_release64(bucket, (header & ~(255 << shift)) | (DEAD << shift))
    fence_all()  # the epoch in which it can no longer be found, or a later one
    epoch = load_acquire64(base + at.EPOCH) & EPOCHS
    store_release64(entry + 8, (value & NO_ROW) | (epoch << 32))
    if value & CANDIDATE:
        count(base, place, 0, -1, 1)
    else:
        count(base, place, -1, 0, 1)
        count_up(line, what, 1)


@kernel
def remove(control: Address, base: Address, me: Int, keys: Words, removed: Words, progress: Int) -> Int:
    """Removes ``keys[progress:]``; writes 1 for those that had a row, else 0: ``(done << 16) | code``."""
    owner = owner_of(base, me)
    line = keyed_line(base, owner)
    for k in range(progress, keys.size):
        if k + _AHEAD < keys.size:
            fetch(base, int(keys[k + _AHEAD]))
        key = int(keys[k])
        key_hash = hash64(key)
        segment, word, code = take_segment(control, base, owner, key_hash)
        if code != 0:
            add64(base + at.EPOCH, 1)
            return (k << 16) | code
        address, place = word_at(base, segment), segment_at(base, segment)
        entry = scan(place, key_hash, key)
        removed[k] = 0
        if entry == 0:
            store_release64(address, word)
            continue
        if load_acquire64(entry + 8) & CANDIDATE == 0:
            removed[k] = 1
        _bury(base, place, entry, line, at.KEYS_REMOVED)
        store_release64(address, word + SEGMENT_VERSION)
    add64(base + at.EPOCH, 1)
    return 0


@kernel
def are_through(control: Address, base: Address, me: Int, epoch: Int) -> Int:
    """Whether no call but ``me``'s own is under way that began before an epoch, which has been the current one."""
    return int(oldest_epoch(control, base, me) >= epoch)


# -- eviction --------------------------------------------------------------------------------------------------


@inner
def _total(base):
    """Keys that have a row, by what the workers have counted: a killed one may have counted one less."""
    total = 0
    for worker in range(OWNERS):
        line = base + LINES + LINE_BYTES * worker
        total += load_acquire64(line + at.KEYS_ADMITTED)
        total -= load_acquire64(line + at.KEYS_REMOVED) + load_acquire64(line + at.KEYS_EVICTED)
    return total


@inner
def _is_small(control, base, owner, row, least):
    """Whether the L2 norm of a row's values is less than some number; not of one that is being changed for long."""
    word = row >> load_acquire64(base + at.SHIFT)
    address = base + load_acquire64(base + at.ROW_WORDS) + 8 * word
    value = hold_row(control, base, owner, word)
    if value < 0:
        return False
    place = base + load_acquire64(base + at.ROWS) + row * load_acquire64(base + at.ROW_BYTES)
    total = 0.0
    single = load_acquire64(base + at.DTYPE) == FLOAT32
    for column in range(load_acquire64(base + at.COLUMNS)):
        number = load_float32(place + 4 * column) if single else load_double(place + 8 * column)
        part = number / least  # the squares of both may be beyond a double, or 0
        total += part * part
    store_release64(address, value)
    return total < 1.0


@inner
def _sort(numbers, size):
    """Sorts the first numbers, the largest first (D. L. Shell, 1959)."""
    gap = 364  # of the sequence (3**k - 1) / 2
    while gap > 0:
        for i in range(gap, size):
            number = numbers[i]
            j = i
            while j >= gap and numbers[j - gap] < number:
                numbers[j] = numbers[j - gap]
                j -= gap
            numbers[j] = number
        gap //= 3


@inner
def _worth_less(base, value):
    """How much rather an entry goes than another: the longer unused, or the rarer used and then the longer unused."""
    age = (load_acquire64(base + at.TICK) - (value >> USED_SHIFT)) & 0xFFFF
    if load_acquire64(base + at.BY_FREQUENCY):
        return ((255 - ((value >> FREQUENCY_SHIFT) & 255)) << 16) | age
    return age


@inner
def _evict_beyond(base, place, line, most, excess, candidates):
    """Buries the worst entries of a segment beyond ``most``, but not more than the table's ``excess``: how many."""
    order = words(1024)
    size = 0
    for b in range(BUCKETS):
        header = load_acquire64(place + b * BUCKET_BYTES)
        for slot in range(ENTRIES):
            if (header >> (8 * slot)) & 255 <= DEAD:
                continue
            entry = place + b * BUCKET_BYTES + 16 + 16 * slot
            value = load_acquire64(entry + 8)
            if (value & CANDIDATE != 0) == candidates:
                order[size] = (_worth_less(base, value) << 16) | (b * 8 + slot)
                size += 1
    going = min(size - most, excess)
    if going <= 0:
        return 0
    _sort(order, size)
    for i in range(going):
        number = int(order[i]) & 0xFFFF
        entry = place + (number >> 3) * BUCKET_BYTES + 16 + 16 * (number & 7)
        _bury(base, place, entry, line, at.KEYS_EVICTED)
    return going


@inner
def _evict_segment(control, base, owner, line, segment, depth, total):
    """Evicts what the table's policy says from a segment that is ours: how many keys."""
    place = segment_at(base, segment)
    idle, least = load_acquire64(base + at.IDLE_TICKS), load_double(base + at.LEAST_NORM)
    now = load_acquire64(base + at.TICK)
    gone = 0
    if idle > 0 or least > 0:
        for b in range(BUCKETS):
            header = load_acquire64(place + b * BUCKET_BYTES)
            for slot in range(ENTRIES):
                if (header >> (8 * slot)) & 255 <= DEAD:
                    continue
                entry = place + b * BUCKET_BYTES + 16 + 16 * slot
                value = load_acquire64(entry + 8)
                candidate = value & CANDIDATE != 0
                old = idle > 0 and (now - (value >> USED_SHIFT)) & 0xFFFF >= idle
                if old or (not candidate and least > 0 and _is_small(control, base, owner, value & NO_ROW, least)):
                    _bury(base, place, entry, line, at.KEYS_EVICTED)
                    gone += 0 if candidate else 1
    most = load_acquire64(base + at.MOST_KEYS)
    if most > 0:
        share = most >> depth
        if total - gone > most:
            gone += _evict_beyond(base, place, line, share, total - gone - most, False)
        _evict_beyond(base, place, line, share, SEGMENT_ENTRIES, True)
    return gone


@kernel
def evict(control: Address, base: Address, me: Int, seen: Words, until_ns: Int) -> Int:
    """Evicts keys by the table's policy, one segment after another, from where the last one stopped.

    A segment that another worker holds is left out this time.

    Args:
        seen: what it has come through so far: WHOLE means all; and how many keys went.
        until_ns: CLOCK_MONOTONIC; at least one segment is looked at.
    """
    owner = owner_of(base, me)
    line, undo = keyed_line(base, owner), undo_slot_of(base, owner)
    total = _total(base)
    while seen[0] < WHOLE:
        pattern = load_acquire64(base + at.EVICT_AT)
        segment, word = resolve(base, pattern)
        address, depth = word_at(base, segment), depth_of(word)
        store_release64(base + at.EVICT_AT, max(next_pattern(segment, depth), 0))
        seen[0] += WHOLE >> depth
        if word & OWNER:
            if is_dead(control, word):
                take_over_segment(base, owner, segment, word)
            continue
        store_release64(undo + at.SEGMENT, segment + 1)
        if compare_swap64(address, word, word | owner) == word:
            gone = _evict_segment(control, base, owner, line, segment, depth, total)
            store_release64(address, word + SEGMENT_VERSION)
            seen[1] += gone
            total -= gone
        if monotonic_ns() >= until_ns:
            break
    add64(base + at.EPOCH, 1)
    return 0


@kernel
def excess(base: Address) -> Int:
    """How many keys there are beyond what the table's policy allows, roughly."""
    most = load_acquire64(base + at.MOST_KEYS)
    return _total(base) - most if most > 0 else 0
