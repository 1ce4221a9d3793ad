"""Where each word of a keyed table lies, in bytes from its first.

A keyed table is one sparse piece of memory. What is not written takes no memory, so each part has room for as much as
the machine could ever hold, and nothing ever moves::

    header       64-bit words, written once, and two that grow: HINT, NEXT_ROW
    lines        one a worker: its incarnation and what it has done
    hands        one a worker: what it is about to change, for whoever takes over if it dies
    row words    one for each 16 KiB of rows: lock, version and owner at once
    segment words  one for each segment that could exist: existence, depth, lock, version and owner
    segments     16 KiB each, number s at s * 16 KiB: 128 buckets of 7 entries
    rows         [values | updater state], padded to a cache line

A word that is lock, version and owner::

    row word      [version 44 | incarnation 8 | worker + 1: 12]
    segment word  [version 38 | depth + 1: 6, 0: no such segment | incarnation 8 | worker + 1: 12]

A bucket::

    tags 7 x 8 bits: 0x80 | 7 bits of the hash, 0: free   far 8: how many buckets on its keys may lie
    8 bytes unused
    7 x (key 8, row 4, metadata 4)
"""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import numpy as np

from multiverso.layout import CACHE_LINE, MAX_WORKERS, PAGE, round_up

HEADER = np.dtype(
    [
        (name, np.int64)
        for name in (
            "MAGIC",
            "COLUMNS",  # numbers of a row that are values
            "DTYPE",  # FLOAT32, FLOAT64, INT32, INT64
            "ITEMSIZE",
            "STATES",  # further numbers for each value that the updater keeps
            "ROW_BYTES",  # from one row to the next
            "SHIFT",  # a row's word is number row >> SHIFT
            "CAPACITY",  # rows that there is room for
            "MOST_DEPTH",  # segments are numbered below 1 << MOST_DEPTH
            "HAND_BYTES",  # from one worker's hand to the next
            "HANDS",  # where each part begins
            "ROW_WORDS",
            "SEGMENT_WORDS",
            "SEGMENTS",
            "ROWS",
            "SEED",  # of the initial rows
            "KIND",  # of the initial rows: CONSTANT, UNIFORM, NORMAL
        )
    ]
    + [
        ("SCALE", np.float64),  # of the initial rows
        ("HYPER", np.float64, 8),  # the updater's hyperparameters, in the table's dtype, packed
        ("STATE_INITIAL", np.float64, 8),  # what each of the updater's numbers begins with
        ("_growing", np.uint8, 56),
        ("HINT", np.int64),  # at least the depth of the deepest segment, soon; only a hint
        ("_next", np.uint8, 56),
        ("NEXT_ROW", np.int64),  # rows handed out
    ]
)
LINE = np.dtype(
    [
        (name, np.int64)
        for name in (
            "INCARNATION",  # 1 .. 255, another one for each life of a worker's number
            "ADDS",  # calls
            "GETS",
            "ROWS_ADDED",
            "ROWS_READ",
            "KEYS_ADMITTED",
            "TAKEN_OVER",  # words of dead owners
            "PUT_BACK",  # rows that a dead owner had half written
            "SPLITS",
            "WAITS",
        )
    ]
)
HAND = np.dtype(
    [
        ("ROW_WORD", np.int64),  # 1 + number of the row word that is about to be held; 0: none
        ("ROW", np.int64),  # the row whose copy is in COPY; -1: none
        ("POSITION", np.int64),  # how far the call has come: rows before this are done
        ("SEGMENT", np.int64),  # 1 + number of the segment that is about to be held; 0: none
        ("KEY", np.int64),  # the key that CLAIMED_ROW is for
        ("CLAIMED_ROW", np.int64),
        ("CLAIMED", np.int64),  # 1 while CLAIMED_ROW is not known to be entered
        ("_to_line", np.int64),
        ("COPY", np.uint8),  # the row as it was
    ]
)


def _offsets(*records: np.dtype[np.void]) -> dict[str, int]:
    return {
        name: field[1]
        for record in records
        for name, field in (record.fields or {}).items()
        if name[0] != "_"
    }


_named = _offsets(HEADER, LINE, HAND)
assert len(_named) == sum(name[0] != "_" for r in (HEADER, LINE, HAND) for name in (r.names or ()))
at: Any = namedtuple("At", _named)(**_named)  # numbers that a compiled kernel takes as constants

MAGIC = 0x6D766B6579656431
LINES = round_up(HEADER.itemsize, CACHE_LINE)
LINE_BYTES = round_up(LINE.itemsize, CACHE_LINE)
BUCKETS = 128  # of a segment
BUCKET_BYTES = 128
SEGMENT_BYTES = BUCKETS * BUCKET_BYTES
ENTRIES = 7  # of a bucket
BLOCK_BYTES = 16 * 1024  # of rows under one word
PROBES = 15  # an insert looks into its home bucket and at most so many after it; then the segment is split
KEYED = -1  # what a wait for a word of a keyed table names as its table
CONSTANT, UNIFORM, NORMAL = range(3)
FLOAT32, FLOAT64, INT32, INT64 = range(4)

OWNER_BITS = 20
OWNER = (1 << OWNER_BITS) - 1
ROW_VERSION = 1 << OWNER_BITS
DEPTH_BIT = 1 << OWNER_BITS
SEGMENT_VERSION = 1 << 26
TAGS = 0x80808080808080  # set in the tag of an occupied entry


def places(row_bytes: int, capacity: int) -> dict[str, int]:
    """Returns where each part of a table with so many rows begins, as words of its header, and its size.

    Args:
        row_bytes: from one row to the next.
        capacity: rows that there is room for.
    """
    shift = max(0, (BLOCK_BYTES // row_bytes).bit_length() - 1)
    # a segment is half full just after its split; keys are not spread evenly, so four times as many, and twice again
    depth = max(3, (8 * capacity // (BUCKETS * ENTRIES // 2)).bit_length())
    hand = round_up(HAND.itemsize - 1 + row_bytes, CACHE_LINE)
    end = LINES + LINE_BYTES * MAX_WORKERS
    found = {
        "SHIFT": shift,
        "MOST_DEPTH": depth,
        "HAND_BYTES": hand,
        "CAPACITY": capacity,
        "ROW_BYTES": row_bytes,
    }
    for name, size in (
        ("HANDS", hand * MAX_WORKERS),
        ("ROW_WORDS", 8 * ((capacity >> shift) + 1)),
        ("SEGMENT_WORDS", 8 << depth),
        ("SEGMENTS", SEGMENT_BYTES << depth),
        ("ROWS", row_bytes * capacity),
    ):
        found[name] = round_up(end, PAGE)
        end = found[name] + size
    return found | {"size": round_up(end, PAGE)}
