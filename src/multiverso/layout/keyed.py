"""Where each word of a keyed table lies, in bytes from its first.

A keyed table is one sparse piece of memory. What is not written takes no memory, so each part has room for as much as
the machine could ever hold, and nothing ever moves::

    header       64-bit words, written once, and a few that grow: HINT, NEXT_ROW, EPOCH ...
    lines        one a worker, and one for the node: its attachment, what it reads just now, and what it has done
    undo slots   likewise: what it is about to change, for the worker that takes over if it dies
    row words    one for each 16 KiB of rows: lock, version and owner at once
    stamps       one int32 a row: the generation in which it was last changed
    removals     the keys that were removed of late, as a ring: 64 bits each
    segment words  one for each segment that could exist: existence, depth, lock, version and owner
    segment counts how many entries of each are keys with a row, candidates, and dead: 16 bits each, under its word
    segments     16 KiB each, number s at s * 16 KiB: 128 buckets of 7 entries
    rows         [values | updater state], padded to a cache line

A word that is lock, version and owner::

    row word      [version 44 | attachment 8 | worker + 1: 12]
    segment word  [version 38 | depth + 1: 6, 0: no such segment | attachment 8 | worker + 1: 12]

A bucket::

    tags 7 x 8 bits: 0: free, DEAD: removed, else 0x80 | 7 bits of the hash, at least 2
    far 8: how many buckets on its keys may lie
    8 bytes unused
    7 x (key 8, value 8)

A value of a key is [0: 7 | candidate 1 | frequency 8 | last use 16 | row 32], of a dead entry [epoch 32 | row 32].

A *candidate* has been added to, but not often enough to get a row; its frequency is how often. A dead entry keeps the
row that its key had, for the next key that comes to this place: no list of free rows is needed, and none can be lost.
"""

from __future__ import annotations

from collections import namedtuple
from typing import Any

from multiverso.layout import words as layout
from multiverso.layout.records import Record
from multiverso.layout.words import CACHE_LINE, HUGE_PAGE, MAX_WORKERS, PAGE, round_up

MOST_STATES = 8
MOST_HYPER = 8

HEADER = Record(1024)
HEADER.int64("MAGIC")
for _name in (
    "COLUMNS",  # numbers of a row that are values
    "DTYPE",  # FLOAT32, FLOAT64, INT32, INT64
    "ITEMSIZE",
    "STATES",  # further numbers for each value that the updater keeps
    "ROW_STATES",  # further numbers for the whole row that it keeps, after those
    "ROW_BYTES",  # from one row to the next
    "SHIFT",  # a row's word is number row >> SHIFT
    "CAPACITY",  # rows that there is room for
    "MOST_DEPTH",  # segments are numbered below 1 << MOST_DEPTH
    "UNDO_BYTES",  # from one worker's undo slot to the next
    "UNDO_SLOTS",  # where each part begins
    "ROW_WORDS",
    "STAMPS",
    "REMOVALS",
    "RING",  # keys that there is room for in it, a power of two
    "SEGMENT_WORDS",
    "SEGMENT_COUNTS",
    "SEGMENTS",
    "ROWS",
    "SEED",  # of the initial rows
    "KIND",  # of the initial rows: CONSTANT, UNIFORM, NORMAL
    "ADMIT_AFTER",  # adds that a key needs before it gets a row; 1: at once
    "KEEPS_USE",  # whether entries say when and how often their keys are added to
    "IDLE_TICKS",  # keys that are not added to for so many ticks may be evicted; 0: none
    "MOST_KEYS",  # keys beyond so many are evicted; 0: none
    "BY_FREQUENCY",  # the least frequent ones first, else the least recent ones
):
    HEADER.int64(_name)
HEADER.float64("SCALE")  # of the initial rows
HEADER.float64("LEAST_NORM")  # rows whose L2 norm is less may be evicted; 0: none
HEADER.float64("STATE_INITIAL", MOST_STATES)  # what each of the updater's numbers begins with
HEADER.float64("HYPER_AT_FIRST", MOST_HYPER)  # the updater's hyperparameters, as the table was made with them
# set by whoever may: the updater's hyperparameters, in the table's dtype, packed
HEADER.float64("HYPER", MOST_HYPER, apart=True)  # everything before this is the same in all workers
# all writers, from here on
HEADER.int64("HINT", apart=True)  # at least the depth of the deepest segment, soon; only a hint
HEADER.int64("NEXT_ROW", apart=True)  # [rows handed out 48 | worker + 1 that got the last one 16]
HEADER.int64("EPOCH", apart=True)  # counted up after keys were removed
HEADER.int64("TICK")  # what entries call now
HEADER.int64("CONTINUES")  # the run whose snapshots it was loaded from, as they name it; 0: none, MIXED: several
HEADER.int64("EVICT_AT")  # the hash pattern at which the next eviction continues
HEADER.int64("GENERATION", apart=True)  # counted up by each snapshot; what changes is stamped with it
HEADER.int64("REMOVED", apart=True)  # keys that were ever written into the ring
# of copies, the node's: where in its memory the values lie that the next key's row begins with; 0: its initial row
HEADER.int64("GIVEN", apart=True)
HEADER.int64("IDENTITY", apart=True)  # a random number, written once: no other table has it

LINE = Record(3 * CACHE_LINE)
LINE.int64("ATTACHMENT")  # the worker's attachment that came here last
LINE.int64("PIN")  # 1 + the epoch in which the call that is under way began; 0: none is
for _name in (
    "ADDS",  # calls
    "GETS",
    "ROWS_ADDED",
    "ROWS_READ",
    "KEYS_ADMITTED",
    "KEYS_REMOVED",
    "KEYS_EVICTED",
    "SPLITS",
    "TAKEN_OVER",  # words of dead owners; this and the next three are a table's COUNTS, see layout/words.py
    "PUT_BACK",  # rows that a dead owner had half written
    "WAITS",
    "WAITED",  # nanoseconds
):
    LINE.int64(_name)

UNDO = Record(2 * CACHE_LINE)
for _name in layout.UNDO.offsets:  # what every undo slot begins with: word, row, position, user
    UNDO.int64(_name.upper())
UNDO.int64("SEGMENT")  # 1 + number of the segment that is about to be held; 0: none
UNDO.int64("KEY")  # the key that the claimed row is for
UNDO.int64("CLAIM")  # [more rows after it 30 | row 32 | UNCLAIMED, CLAIMED or CLAIMING 2]
UNDO.int64("COPY", apart=True)  # the row as it was, from here on

_named = {**HEADER.offsets, **LINE.offsets, **UNDO.offsets}
assert len(_named) == sum(len(record.offsets) for record in (HEADER, LINE, UNDO))
at: Any = namedtuple("At", _named)(**_named)  # numbers that a compiled kernel takes as constants
# what kernels of all tables take from undo slots and counts lies there as in theirs
assert all(UNDO.offsets[name.upper()] == offset for name, offset in layout.UNDO.offsets.items())
assert all(getattr(at, name) - at.TAKEN_OVER == getattr(layout, name) for name in ("PUT_BACK", "WAITS", "WAITED"))

# words that are set on all hosts at once
EVERYWHERE = (at.TICK, at.CONTINUES, *range(at.HYPER, at.HYPER + 8 * MOST_HYPER, 8))

KEYED_MEMORY = "multiverso-keyed-"  # how the names of their memory begin
COPIES = "copies of "  # and then, of copies of rows that live on other hosts; what the job calls the table follows
KEPT = "kept for "  # likewise, of rows of others whose backup a host is
OWNERS = MAX_WORKERS + 1  # who may hold a word: the workers, and the node, which comes after them
MAGIC = 0x6D766B6579656432
LINES = HEADER.size
LINE_BYTES = LINE.size
BUCKETS = 128  # of a segment
BUCKET_BYTES = 128
SEGMENT_BYTES = BUCKETS * BUCKET_BYTES
ENTRIES = 7  # of a bucket
BLOCK_BYTES = 16 * 1024  # of rows under one word
PROBES = 15  # an insert looks into its home bucket and at most so many after it; then the segment is split
MOST_RING = 1 << 22  # keys in the ring of removed ones
MIXED = -1
KEYED = -1  # what a wait for a word of a keyed table names as its table
CONSTANT, UNIFORM, NORMAL = range(3)
FLOAT32, FLOAT64, INT32, INT64 = range(4)
UNCLAIMED, CLAIMED, CLAIMING = range(3)
MORE_SHIFT = 34  # in a claim
GROUPS = 4096  # of keys, on several hosts: each lives on one of them
GROUP_SHIFT = 28  # of a key's hash: neither a segment's number nor a bucket's or a tag
ELSEWHERE = -2  # in place of a row, of a key that lives on another host
ROWS_AT_ONCE = 16  # fresh ones that a worker gets: their stamps share a cache line

OWNER = layout.OWNER  # words of rows and of segments name their owner as those of stripes do
ROW_VERSION = layout.VERSION
DEPTH_BIT = 1 << layout.OWNER_BITS
SEGMENT_VERSION = 1 << 26
TAGS = 0x80808080808080  # set in the tag of an entry that is not free
DEAD = 0x80
NO_ROW = 0xFFFFFFFF  # of a candidate, mostly
CANDIDATE = 1 << 56
USED_SHIFT, FREQUENCY_SHIFT = 32, 48
EPOCHS = 0x7FFFFFFF  # of an epoch, as a dead entry notes it


def places(row_bytes: int, capacity: int) -> dict[str, int]:
    """Returns where each part of a table with so many rows begins, as words of its header, and its size.

    Args:
        row_bytes: from one row to the next.
        capacity: rows that there is room for.
    """
    shift = max(0, (BLOCK_BYTES // row_bytes).bit_length() - 1)
    # a segment is half full just after its split; keys are not spread evenly, so four times as many, and twice again
    depth = max(3, (8 * capacity // (BUCKETS * ENTRIES // 2)).bit_length())
    undo = round_up(at.COPY + row_bytes, CACHE_LINE)
    end = LINES + LINE_BYTES * OWNERS
    found = {
        "SHIFT": shift,
        "MOST_DEPTH": depth,
        "UNDO_BYTES": undo,
        "CAPACITY": capacity,
        "ROW_BYTES": row_bytes,
        "RING": min(MOST_RING, 1 << capacity.bit_length()),
    }
    for name, size in (
        ("UNDO_SLOTS", undo * OWNERS),
        ("ROW_WORDS", 8 * ((capacity >> shift) + 1)),
        ("STAMPS", 4 * capacity),
        ("REMOVALS", 8 * found["RING"]),
        ("SEGMENT_WORDS", 8 << depth),
        ("SEGMENT_COUNTS", 8 << depth),
        ("SEGMENTS", SEGMENT_BYTES << depth),
        ("ROWS", row_bytes * capacity),
    ):
        found[name] = round_up(end, HUGE_PAGE if size >= HUGE_PAGE else PAGE)  # costs addresses, no memory
        end = found[name] + size
    return found | {"size": round_up(end, PAGE)}
