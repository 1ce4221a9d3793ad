"""Passes over all of a keyed table, a segment at a time: its counts, its entries, and what snapshots need."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,no-any-return"

from __future__ import annotations

from multiverso.compiling.atomics import add64, compare_swap64, hash64, load_acquire64, store_release64
from multiverso.compiling.declaring import Address, Int, Words, kernel
from multiverso.kernels.keyed.buckets import counts_at, scan
from multiverso.kernels.keyed.index import depth_of, next_pattern, segment_at, word_at
from multiverso.kernels.keyed.row_words import await_row, owner_of
from multiverso.kernels.keyed.segments import SEGMENT_ENTRIES, free_segment, take_segment
from multiverso.layout.keyed import BUCKET_BYTES, BUCKETS, CANDIDATE, DEAD, ENTRIES, NO_ROW, OWNER, at

KEY, WAITING, GONE = 1, 2, 3  # kinds of entries


@kernel
def counts(control: Address, base: Address, me: Int, totals: Words, pattern: Int) -> Int:
    """Adds up keys with a row, candidates and dead entries: ``(pattern << 16) | code``, where to continue."""
    owner = owner_of(base, me)
    while pattern >= 0:
        segment, word, code = free_segment(control, base, owner, pattern)
        if code != 0:
            return (pattern << 16) | code
        found = load_acquire64(counts_at(base, segment_at(base, segment)))
        if load_acquire64(word_at(base, segment)) == word:
            for kind in range(3):
                totals[kind] += (found >> (16 * kind)) & 0xFFFF
            pattern = next_pattern(segment, depth_of(word))
    return 0


@kernel
def entries(control: Address, base: Address, me: Int, found: Words, keys: Words, values: Words, kinds: Words) -> Int:
    """Writes what stands in one segment after another, while there is room for another one: 0 or a code.

    Each key once, while others add and remove.

    Args:
        found: the hash pattern to continue at, -1 after the last; and how many entries there are.
        keys, values, kinds: of each: KEY, WAITING (a candidate) or GONE (a dead entry).
    """
    owner = owner_of(base, me)
    while found[0] >= 0 and found[1] + SEGMENT_ENTRIES <= keys.size:
        segment, word, code = free_segment(control, base, owner, int(found[0]))
        if code != 0:
            return code
        place, n = segment_at(base, segment), int(found[1])
        for b in range(BUCKETS):
            header = load_acquire64(place + b * BUCKET_BYTES)
            for slot in range(ENTRIES):
                tag = (header >> (8 * slot)) & 255
                if tag < DEAD:
                    continue
                entry = place + b * BUCKET_BYTES + 16 + 16 * slot
                value = load_acquire64(entry + 8)
                keys[n], values[n] = load_acquire64(entry), value
                kinds[n] = KEY
                if tag == DEAD:
                    kinds[n] = GONE
                elif value & CANDIDATE:
                    kinds[n] = WAITING
                n += 1
        if load_acquire64(word_at(base, segment)) == word:
            found[0], found[1] = next_pattern(segment, depth_of(word)), n
    return 0


@kernel
def pass_through(control: Address, base: Address, me: Int, progress: Int) -> Int:
    """Meets each word while nobody holds it: ``(done << 16) | code``.

    A worker that takes a word afterwards sees what this one stored before; one that took it before is done. So a
    snapshot that counts the generation up and comes through here sees all that is stamped with an earlier one.

    Args:
        progress: number of a row word, or -1 - the hash pattern of a segment.
    """
    owner = owner_of(base, me)
    word = load_acquire64(base + at.NEXT_ROW)
    while compare_swap64(base + at.NEXT_ROW, word, word) != word:  # a worker that gets a row afterwards has met it, too
        word = load_acquire64(base + at.NEXT_ROW)
    blocks = (word >> 16 >> load_acquire64(base + at.SHIFT)) + 1
    first = base + load_acquire64(base + at.ROW_WORDS)
    for word in range(max(progress, 0), blocks if progress >= 0 else 0):
        while True:
            value = load_acquire64(first + 8 * word)
            if value & OWNER:
                value = await_row(control, base, owner, word)
                if value < 0:
                    return (word << 16) | -value
            elif compare_swap64(first + 8 * word, value, value) == value:
                break
    pattern = max(-1 - progress, 0)
    while pattern >= 0:
        segment, word, code = free_segment(control, base, owner, pattern)
        if code != 0:
            return ((-1 - pattern) << 16) | code
        if compare_swap64(word_at(base, segment), word, word) == word:
            pattern = next_pattern(segment, depth_of(word))
    return 0


@kernel
def next_generation(base: Address) -> Int:
    """Counts the generation up and returns what it was: that of the snapshot that is being made."""
    return add64(base + at.GENERATION, 1)


@kernel
def note_use(control: Address, base: Address, me: Int, keys: Words, uses: Words, progress: Int) -> Int:
    """Writes when and how often ``keys[progress:]`` were used, as a saved table says it: ``(done << 16) | code``."""
    owner = owner_of(base, me)
    for k in range(progress, keys.size):
        key = int(keys[k])
        key_hash = hash64(key)
        segment, word, code = take_segment(control, base, owner, key_hash)
        if code != 0:
            return (k << 16) | code
        entry = scan(segment_at(base, segment), key_hash, key)
        if entry:
            row = load_acquire64(entry + 8) & (NO_ROW | CANDIDATE)
            store_release64(entry + 8, row | (int(uses[k]) & (CANDIDATE - 1) & ~NO_ROW))
        store_release64(word_at(base, segment), word)
    return 0
