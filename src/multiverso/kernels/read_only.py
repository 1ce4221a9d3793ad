"""Reading keyed tables from outside their job: nothing is written, not even that they are read.

A row counts if its word was free and the same before and after the copy. One has to know, too, that it was still the
key's: it is found, copied, and found again while its word has not changed; a row that goes to another key is written
under its word. Where a word is held, the reader waits: the job's workers take over from the dead.

The memory may be given to another table at any moment, and a reader learns of it only afterwards. So nothing that is
read there says where to read or how much to write: that stands in a copy of the header, taken when the table was there.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,no-any-return"

from __future__ import annotations

from multiverso.compiling.atomics import (
    fence_acquire,
    hash64,
    load_acquire64,
    monotonic_ns,
    move,
    pause,
    prefetch,
    sched_yield,
)
from multiverso.compiling.declaring import Address, Int, Words, inner, kernel
from multiverso.kernels.codes import DONE, TIMED_OUT
from multiverso.kernels.keyed.buckets import home_of, scan
from multiverso.kernels.keyed.index import ABSENT, depth_of
from multiverso.kernels.keyed.initial_rows import write_initial
from multiverso.layout.keyed import BUCKET_BYTES, CANDIDATE, NO_ROW, OWNER, SEGMENT_BYTES, at

_AHEAD = 16
_PAUSES = 100
_DEPTHS = 64  # as many tries find every segment that there is
_AGAIN = -2


@inner
def _wait(tries, until):
    """One turn of waiting: whether there is time left."""
    if tries <= _PAUSES:
        pause()
        return True
    sched_yield()
    return monotonic_ns() < until


@inner
def _word_at(base, header, segment):
    """Address of a segment's word."""
    return base + load_acquire64(header + at.SEGMENT_WORDS) + 8 * segment


@inner
def _segment_at(base, header, segment):
    """Address of a segment's buckets."""
    return base + load_acquire64(header + at.SEGMENTS) + SEGMENT_BYTES * segment


@inner
def _segment_of(base, header, key_hash):
    """As ``resolve``; -1 in memory in which there is no index any more."""
    most = load_acquire64(header + at.MOST_DEPTH)
    depth = load_acquire64(base + at.HINT)
    for _ in range(_DEPTHS):
        if depth < 0 or depth > most:
            return -1
        segment = key_hash & ((1 << depth) - 1)
        found = depth_of(load_acquire64(_word_at(base, header, segment)))
        if found < 0:
            depth -= 1
        elif key_hash & ((1 << found) - 1) != segment:
            depth = found
        else:
            return segment
    return -1


@inner
def _fetch(base, header, key):
    """Sends for the bucket in which a key will be looked for."""
    key_hash = hash64(key)
    segment = _segment_of(base, header, key_hash)
    if segment >= 0:
        bucket = _segment_at(base, header, segment) + home_of(key_hash) * BUCKET_BYTES
        prefetch(bucket)
        prefetch(bucket + 64)


@inner
def _row_of(base, header, key_hash, key):
    """Row of a key, ABSENT, or _AGAIN: something is on the move."""
    segment = _segment_of(base, header, key_hash)
    if segment < 0:
        return _AGAIN
    address = _word_at(base, header, segment)
    word = load_acquire64(address)
    depth = depth_of(word)
    if depth < 0 or key_hash & ((1 << depth) - 1) != segment:
        return _AGAIN
    entry = scan(_segment_at(base, header, segment), key_hash, key)
    if entry:
        value = load_acquire64(entry + 8)
        if load_acquire64(entry) != key:
            return _AGAIN
        if value & CANDIDATE:
            return ABSENT
        row = value & NO_ROW
        return row if row < load_acquire64(header + at.CAPACITY) else _AGAIN
    if word & OWNER:
        return _AGAIN
    return ABSENT if load_acquire64(address) == word else _AGAIN


@inner
def _read_key(base, header, key, to, size):
    """Writes a key's row, or its initial one: DONE, or _AGAIN."""
    key_hash = hash64(key)
    row = _row_of(base, header, key_hash, key)
    if row == _AGAIN:
        return _AGAIN
    if row == ABSENT:
        write_initial(header, key, to)
        return DONE
    word = base + load_acquire64(header + at.ROW_WORDS) + 8 * (row >> load_acquire64(header + at.SHIFT))
    value = load_acquire64(word)
    if value & OWNER:
        return _AGAIN
    move(to, base + load_acquire64(header + at.ROWS) + row * load_acquire64(header + at.ROW_BYTES), size)
    fence_acquire()
    if _row_of(base, header, key_hash, key) != row:
        return _AGAIN
    return DONE if load_acquire64(word) == value else _AGAIN


@kernel
def look_up(base: Address, header: Address, keys: Words, out: Address, size: Int, progress: Int, until: Int) -> Int:
    """Writes rows of ``size`` bytes by key, from ``keys[progress]`` on, until a moment: ``(done << 16) | code``.

    Args:
        base: where the table lies.
        header: a copy of its header.
        keys, out, size: what is wanted, and where to.
        progress, until: where to begin, and CLOCK_MONOTONIC nanoseconds.
    """
    for k in range(progress, keys.size):
        if k + _AHEAD < keys.size:
            _fetch(base, header, int(keys[k + _AHEAD]))
        tries = 0
        while _read_key(base, header, int(keys[k]), out + k * size, size) != DONE:
            tries += 1
            if not _wait(tries, until):
                return (k << 16) | TIMED_OUT
    return 0
