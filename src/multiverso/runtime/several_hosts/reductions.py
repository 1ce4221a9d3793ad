"""A node's part in an all_reduce of the workers of several hosts.

Its workers put their parts side by side into memory of this host and say so; the node combines them, exchanges the
result with the other nodes, and says in that memory which pieces are done. What decides is `hosts.combining`. No thread
is woken for what another can do at once: small parts are combined by the thread that receives them, what other nodes
send by the one that receives it, and large parts, which take a while, by one of their own.

The memory has a line of words, which the node alone writes, and then for each of the pieces that may be under way a
slot for each worker of this host and one for the result. Small arrays have memory of their own, as most jobs reduce
nothing else.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from multiverso.errors import MultiversoError, ShapeMismatchError, StartupError
from multiverso.hosts.combining import COMBINE, PIECE_BYTES, PIECES, SMALL_BYTES, Combining, Piece
from multiverso.hosts.peer.frames import Body
from multiverso.hosts.peer.messages import Messages
from multiverso.hosts.peer.resources import Array
from multiverso.layout.records import Record
from multiverso.layout.words import MOST_WORKERS
from multiverso.layout.worker_index import masks_of
from multiverso.memory.segment import Segment
from multiverso.memory.words import load64, store64
from multiverso.node_log import log
from multiverso.runtime.several_hosts.this_host import ThisHost
from multiverso.spec.table import DTYPES
from multiverso.wire.requests import Combine

SMALL_NAME, LARGE_NAME = "multiverso-reduce-hosts-small", "multiverso-reduce-hosts"

LINE = Record(128 + MOST_WORKERS // 8)
DONE = LINE.int64("done")  # the last piece whose result is here
FAILED = LINE.int64("failed")  # why no other piece will be done: one of the below
MISSING = LINE.int64("missing", MOST_WORKERS // 64)  # the workers that the next piece waits for, a bit each
DIFFERENT, BROKEN = 1, 2

_CACHED_BYTES = 128 << 10  # combined of all workers at once, while they are in the cache


def slot_at(number: int, slot: int, nbytes: int, workers: int) -> tuple[str, int]:
    """Returns which memory has a slot of a piece, by its name, and where it begins there.

    Args:
        number: the piece's.
        slot: of a worker of this host; the last one is the result's.
        nbytes: how large the piece is.
        workers: how many this host has.
    """
    index = number % PIECES * (workers + 1) + slot
    return (SMALL_NAME, LINE.size + index * SMALL_BYTES) if nbytes <= SMALL_BYTES else (LARGE_NAME, index * PIECE_BYTES)


def memory_bytes(name: str, workers: int) -> int:
    """Returns how large the memory is."""
    slots = PIECES * (workers + 1)
    return LINE.size + slots * SMALL_BYTES if name == SMALL_NAME else slots * PIECE_BYTES


class Reductions:
    """Owner: the node, which calls `close`; `contribute` and `arrived` may be called by any thread.

    Args:
        here: this host.
        messages: the way to the other nodes.
    """

    def __init__(self, here: ThisHost, messages: Messages) -> None:
        self._here, self._messages = here, messages
        roster = here.roster
        self._local = list(roster.local)
        self._combining = Combining(roster.host, list(range(roster.hosts)), messages.send, messages.free)
        self._contributions: dict[int, dict[int, tuple[Any, ...]]] = {}
        self._segments: dict[str, Segment] = {}
        self._sums: list[Array] = []
        self._done = self._failed = 0
        self._closed = False
        self._lock = threading.Lock()
        self._events: queue.SimpleQueue[Callable[[], list[int]] | None] = queue.SimpleQueue()

    def contribute(self, worker: int, request: Combine) -> None:
        """A worker of this host has put its part of a piece into its slot.

        Raises:
            StartupError: that is not a piece.
        """
        number, nbytes, dtype, operation = request.number, request.nbytes, request.dtype, request.operation
        if dtype not in DTYPES or operation not in COMBINE or not 0 < nbytes <= PIECE_BYTES or number < 1:
            raise StartupError("that is not a piece of a reduction")
        said = (request.signature, operation, dtype, nbytes)
        self._messages.open()
        if nbytes <= SMALL_BYTES:
            self._do(lambda: self._note(worker, number, said))
        else:  # the node's thread has others to serve
            self._events.put(lambda: self._note(worker, number, said))

    def arrived(self, host: int, message: Body) -> None:
        """A message of another node: the thread that has received it combines it, and sends the result."""
        self._do(lambda: self._combining.arrived(host, message))

    def close(self) -> None:
        """Ends the thread; what still arrives is dropped."""
        with self._lock:
            self._closed = True
        self._events.put(None)

    def run(self) -> None:
        """Combines large parts, in a thread of its own."""
        while (event := self._events.get()) is not None:
            self._do(event)

    def _do(self, event: Callable[[], list[int]]) -> None:
        """Does what moves a reduction, and shows how far they are."""
        with self._lock:
            if self._closed:
                return
            try:
                if not self._failed:
                    for number in event():
                        self._done = number
                        del self._contributions[number]
                    self._show()
                    return
            except ShapeMismatchError:
                self._failed = DIFFERENT
            except (MultiversoError, ValueError, TypeError, OSError, MemoryError) as error:
                self._failed = BROKEN
                log(f"nothing more can be reduced between the hosts: {error}")
            self._fail()  # also for those that have come since

    def _note(self, worker: int, number: int, said: tuple[Any, ...]) -> list[int]:
        if number <= self._done:
            return []  # it was interrupted after it had reported, and reports again
        contributed = self._contributions.setdefault(number, {})
        if worker in contributed:
            return []
        contributed[worker] = said
        if len(contributed) < len(self._local):
            return []
        if len(set(contributed.values())) > 1:
            raise ShapeMismatchError("the workers of this host do not reduce the same things")
        signature, operation, dtype, nbytes = said
        piece = Piece(number, signature, operation, np.dtype(dtype), nbytes)
        *slots, result = [self._slot(piece, i) for i in range(len(self._local) + 1)]
        return self._combining.begin(piece, self._own(piece, slots), result)

    def _own(self, piece: Piece, slots: list[Array]) -> Array:
        """Returns what this host's workers give together; a worker may write its slot once more, with the same."""
        if len(slots) == 1:
            return slots[0]
        # as long in use as the slots are; fresh memory for each would cost more than the sum
        if not self._sums:
            self._sums = [np.empty(PIECE_BYTES, np.uint8) for _ in range(PIECES)]
        own = self._sums[piece.number % PIECES][: piece.nbytes].view(piece.dtype)
        combine, length = COMBINE[piece.operation], _CACHED_BYTES // piece.dtype.itemsize
        for low in range(0, own.size, length):
            part = slice(low, low + length)
            combine(slots[0][part], slots[1][part], out=own[part])
            for other in slots[2:]:
                combine(own[part], other[part], out=own[part])
        return own

    def _slot(self, piece: Piece, index: int) -> Array:
        name, begin = slot_at(piece.number, index, piece.nbytes, len(self._local))
        return self._segment(name).array(begin, piece.nbytes, np.uint8).view(piece.dtype)

    def _segment(self, name: str) -> Segment:
        if name not in self._segments:
            segment = self._here.catalogue.whole_memory(name)
            if segment is None:
                raise MultiversoError(f"no worker shares memory by the name {name}")
            self._segments[name] = segment
        return self._segments[name]

    def _show(self) -> None:
        """Publishes in shared memory how far the reductions are, and wakes those that wait for that."""
        if not self._contributions and SMALL_NAME not in self._segments:
            return  # only other hosts have begun
        number = self._done + 1
        missing = set(self._local).difference(self._contributions.get(number, ()))
        for host in self._combining.missing(number):
            missing.update(self._here.roster.workers_of(host))
        line = self._segment(SMALL_NAME).address
        before = load64(line + DONE)
        for place, mask in enumerate(masks_of(missing, self._here.roster.workers_num)):
            store64(line + MISSING + 8 * place, mask)
        store64(line + DONE, self._done)
        if self._done != before:
            self._here.control.notify()

    def _fail(self) -> None:
        with contextlib.suppress(MultiversoError):  # no worker of this host has come yet
            store64(self._segment(SMALL_NAME).address + FAILED, self._failed)
            self._here.control.notify()
