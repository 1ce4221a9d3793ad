"""The memory through which a worker asks its node for rows at other hosts: a desk for each worker, in two lanes.

In a lane lie a few words and room for what a question is about, keys and rows, which an answer takes the place of. The
worker writes them, counts ``ASKED`` up and rings the bell, on which the node sleeps; the node answers and sets ``DONE``
to the same number. Each table has its desks, a host one bell.
"""

from __future__ import annotations

from multiverso.layout.keyed import GROUPS
from multiverso.layout.records import Record
from multiverso.layout.words import CACHE_LINE, MAX_WORKERS

HEAD = Record(CACHE_LINE)
TROUBLE = HEAD.int64("trouble")  # the node's words: why adds do not reach a host, a code of the below
TROUBLE_HOST = HEAD.int64("trouble_host")
VIEW = HEAD.int64("view")  # counted up once HOMES have changed, or rows have gone to their new one
HOMES = HEAD.size  # the host of each group of keys: int16
HERE = HOMES + 2 * GROUPS  # whether that is this one: int64, as kernels read it once they have pinned what they find

LANE = Record(2 * CACHE_LINE)
ASKED = LANE.int64("asked")  # the worker's words
WHAT = LANE.int64("what")  # one of the below
COUNT = LANE.int64("count")  # keys
ARGUMENT = LANE.int64("argument")
DONE = LANE.int64("done", apart=True)  # the node's
CODE = LANE.int64("code")
RESULT = LANE.int64("result")  # a number, or the host that a code is about
FOUND = LANE.int64("found")  # rows in the room

# WHAT
FETCH, REMOVE, CONTAINS, COUNT_KEYS, SET_WORD, LIST, READ, OVERWRITE = range(1, 9)
PUSH_AGAIN, BACK_UP, REJOIN = 9, 10, 11  # only from node to node
# CODE
DONE_WELL, HOST_LOST, OTHER_TABLE, HOST_FULL, NO_TABLE, REFUSED, MOVED = range(7)

ROOM = 1 << 20  # bytes of keys and rows
LANES = 2  # of a worker: for what it waits for, and for what it wants later
LANE_BYTES = LANE.size + ROOM
_FIRST_LANE = HERE + 8 * GROUPS
BYTES = _FIRST_LANE + MAX_WORKERS * LANES * LANE_BYTES


BELL = "multiverso-bell"  # the name of this memory
BELL_WORDS = Record(CACHE_LINE)
RUNG = BELL_WORDS.int32("rung")  # counted up; the node sleeps on it
# 1 while the node does not look now and then whether rows were added to; the worker that adds makes it 0, and rings
RESTS = BELL_WORDS.int32("rests")


def lane_at(worker: int, lane: int) -> int:
    """Returns where a lane of a worker begins."""
    return _FIRST_LANE + (worker * LANES + lane) * LANE_BYTES
