"""Reading tables from outside their job: nothing is written, not even that somebody reads.

A row counts if its word was free and the same before and after the copy. Of a row by key one has to know, too, that it
was still the key's: it is found, copied, and found again while its word has not changed; a row that goes to another key
is written under its word. Where a word is held, one waits: whoever takes part in the job sees to it.
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
from multiverso.kernels.initial_rows import write_initial
from multiverso.kernels.keyed_buckets import scan
from multiverso.kernels.keyed_index import ABSENT, depth_of, fetch, segment_at, word_at
from multiverso.keyed_layout import CANDIDATE, NO_ROW, OWNER, at
from multiverso.layout import WORD_SPACING

_AHEAD = 16
_PAUSES = 100
_DEPTHS = 64  # as many tries find every segment that there is; memory that was given back has none
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
def _segment_of(base, key_hash):
    """As ``resolve``, also in memory in which there is no index any more: then -1."""
    depth = load_acquire64(base + at.HINT)
    for _ in range(_DEPTHS):
        if depth < 0 or depth >= _DEPTHS:
            return -1
        segment = key_hash & ((1 << depth) - 1)
        found = depth_of(load_acquire64(word_at(base, segment)))
        if found < 0:
            depth -= 1
        elif key_hash & ((1 << found) - 1) != segment:
            depth = found
        else:
            return segment
    return -1


@inner
def _row_of(base, key_hash, key):
    """Row of a key, ABSENT, or _AGAIN: something is on the move."""
    segment = _segment_of(base, key_hash)
    if segment < 0:
        return _AGAIN
    address = word_at(base, segment)
    word = load_acquire64(address)
    depth = depth_of(word)
    if depth < 0 or key_hash & ((1 << depth) - 1) != segment:
        return _AGAIN
    entry = scan(segment_at(base, segment), key_hash, key)
    if entry:
        value = load_acquire64(entry + 8)
        fence_acquire()
        if load_acquire64(entry) != key:
            return _AGAIN
        return ABSENT if value & CANDIDATE else value & NO_ROW
    if word & OWNER:
        return _AGAIN
    fence_acquire()
    return ABSENT if load_acquire64(address) == word else _AGAIN


@inner
def _read_key(base, key, to):
    """Writes a key's row, or its initial one: DONE, or _AGAIN."""
    key_hash = hash64(key)
    row = _row_of(base, key_hash, key)
    if row == _AGAIN:
        return _AGAIN
    if row == ABSENT:
        write_initial(base, key, to)
        return DONE
    word = base + load_acquire64(base + at.ROW_WORDS) + 8 * (row >> load_acquire64(base + at.SHIFT))
    value = load_acquire64(word)
    if value & OWNER:
        return _AGAIN
    place = base + load_acquire64(base + at.ROWS) + row * load_acquire64(base + at.ROW_BYTES)
    move(to, place, load_acquire64(base + at.COLUMNS) * load_acquire64(base + at.ITEMSIZE))
    fence_acquire()
    if _row_of(base, key_hash, key) != row:
        return _AGAIN
    fence_acquire()
    return DONE if load_acquire64(word) == value else _AGAIN


@kernel
def look_up(base: Address, keys: Words, out: Address, size: Int, progress: Int, until: Int) -> Int:
    """Writes rows of ``size`` bytes by key, from ``keys[progress]`` on, until a moment: ``(done << 16) | code``."""
    for k in range(progress, keys.size):
        if k + _AHEAD < keys.size and _segment_of(base, hash64(int(keys[k + _AHEAD]))) >= 0:
            fetch(base, int(keys[k + _AHEAD]))
        tries = 0
        while _read_key(base, int(keys[k]), out + k * size) != DONE:
            tries += 1
            if not _wait(tries, until):
                return (k << 16) | TIMED_OUT
    return 0


@inner
def _copy(word, to, place, size, until):
    """Copies what a word guards: DONE, or TIMED_OUT."""
    tries = 0
    while True:
        value = load_acquire64(word)
        if value & OWNER == 0:
            move(to, place, size)
            fence_acquire()
            if load_acquire64(word) == value:
                return DONE
        tries += 1
        if not _wait(tries, until):
            return TIMED_OUT


@kernel
def look_at_rows(
    words: Address,
    shift: Int,
    values: Address,
    stride: Int,
    ids: Words,
    out: Address,
    progress: Int,
    until: Int,
) -> Int:
    """Copies rows of a matrix: ``(done << 16) | code``."""
    for k in range(progress, ids.size):
        if k + _AHEAD < ids.size:
            for line in range(0, stride, 64):
                prefetch(values + int(ids[k + _AHEAD]) * stride + line)
        row = int(ids[k])
        word = words + ((row >> shift) << WORD_SPACING)
        if _copy(word, out + k * stride, values + row * stride, stride, until) != DONE:
            return (k << 16) | TIMED_OUT
    return 0


@kernel
def look_at_all(
    words: Address, stripe: Int, values: Address, size: Int, out: Address, progress: Int, until: Int
) -> Int:
    """Copies a whole table of ``size`` bytes, ``stripe`` of them under each word: ``(done << 16) | code``."""
    for k in range(progress, (size + stripe - 1) // stripe):
        start = k * stripe
        part = min(stripe, size - start)
        if _copy(words + (k << WORD_SPACING), out + start, values + start, part, until) != DONE:
            return (k << 16) | TIMED_OUT
    return 0
