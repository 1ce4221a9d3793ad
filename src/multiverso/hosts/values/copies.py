"""A host's copy of a table as the fabric reaches it: chunks, and what is done to one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from ctypes import addressof, c_int64
from dataclasses import dataclass

import numpy as np

from multiverso.compiling.declaring import Kernel
from multiverso.errors import ClosedError, MultiversoError
from multiverso.hosts.peer.resources import Array
from multiverso.kernels.between_hosts import agreeing
from multiverso.kernels.codes import DONE, TIMED_OUT
from multiverso.shards.shard import Shard

CHUNK_BYTES = 1 << 20
_UNIT_BYTES = 64 << 10
_STEPS = (agreeing.push, agreeing.serve, agreeing.land, agreeing.catch_up, agreeing.begin, agreeing.differ)
_Record = c_int64 * 3  # of a kernel: how far it is, what it has found, and whether the table is convex


@dataclass(frozen=True)
class Chunk:
    """Consecutive elements of a table that travel in one frame.

    Attributes:
        number: from 0, in the order of the elements.
        low: the first element.
        high: the one after the last.
    """

    number: int
    low: int
    high: int

    @property
    def size(self) -> int:
        """Elements in it."""
        return self.high - self.low


def chunks_of(elements: int, stripe: int, itemsize: int, chunk_bytes: int = CHUNK_BYTES) -> list[Chunk]:
    """Cuts a table into chunks of whole stripes, or a stripe that is larger than a chunk into several."""
    most = max(1, chunk_bytes // itemsize)
    length = most // stripe * stripe if stripe <= most else most
    return [Chunk(i, low, min(elements, low + length)) for i, low in enumerate(range(0, elements, length))]


def chunk_bytes_of(nbytes: int, hosts: int) -> int:
    """Returns the most of a table that travels in one frame: one host's part of it, or an equal piece of that."""
    part = -(-nbytes // hosts)
    pieces = -(-part // CHUNK_BYTES)
    return -(-part // (pieces * _UNIT_BYTES)) * _UNIT_BYTES


def homes_of(table_id: int, chunks: int, hosts: list[int]) -> list[int]:
    """Returns each chunk's home: consecutive chunks together, small tables' spread by their numbers."""
    count = len(hosts)
    if chunks < count:
        return [hosts[(table_id + i) % count] for i in range(chunks)]
    return [hosts[i * count // chunks] for i in range(chunks)]


def rehomed(homes: list[int], live: list[int]) -> list[int]:
    """Returns the homes when some hosts are no more: only what lived there moves, spread over all that are left."""
    return [home if home in live else live[chunk % len(live)] for chunk, home in enumerate(homes)]


class Copy:
    """This host's copy of a table, as the links change it. One thread at a time for each chunk and link.

    Args:
        shard: the table, all of it mapped.
        chunk_bytes: the most that travels in one frame; the same on all hosts.
        control: address of the job's control segment, which tells which owners of stripes are dead; 0: none are.
    """

    def __init__(self, shard: Shard, chunk_bytes: int = CHUNK_BYTES, control: int = 0) -> None:
        self.shard = shard
        self._control = control
        self.chunk_bytes = chunk_bytes
        self.convex = shard.spec.convex
        self.dtype = np.dtype(shard.spec.dtype)
        self.elements = shard.spec.elements
        self.chunks = chunks_of(self.elements, int(shard.header["stripe_size"]), self.dtype.itemsize, chunk_bytes)
        self._closed = False
        self._inside = 0  # calls that are in the table's memory now
        self._gate = threading.Lock()
        self._left = threading.Condition(self._gate)
        self._advance = agreeing.advance.compiled(shard.spec.dtype)
        for step in _STEPS:  # what takes long is done here, and not in the middle of a frame
            step.compiled(shard.spec.dtype)
        self._versions = agreeing.versions.compiled()
        self._bases, self._version = np.array([shard.base], np.int64), np.zeros(1, np.int64)

    def close(self) -> None:
        """Ends calls that wait for a lock, and refuses all that follow. The memory may be freed afterwards."""
        with self._gate:
            self._closed = True
            while self._inside:  # a kernel that waits for a lock gives up by itself
                self._left.wait()

    def advance(self, agreed: Array, frame: Array) -> None:
        """Adds what is sent to S."""
        self._advance(agreed, frame)

    def version(self) -> int:
        """Returns how often this host's workers have changed it; of a closed table what was read last."""
        with self._gate:
            if not self._closed:
                self._versions(self._bases, self._version)
            return int(self._version[0])

    def run(self, kernel: Kernel[..., int], chunk: Chunk, agreed: Array, frame: Array) -> int:
        """Does a step of ``kernels/between_hosts/agreeing.py`` to a chunk.

        Args:
            kernel: one of ``push``, ``serve``, ``land``, ``catch_up``, ``begin`` and ``differ``.
            chunk: where.
            agreed: S of that chunk.
            frame: what came, or where goes what is to be sent.

        Returns:
            What it has found: SOME if anything in ``frame`` is to be sent, REST if S is not the value itself now.

        Raises:
            ClosedError: the table is closed.
            MultiversoError: a lock is broken.
        """
        with self._gate:
            self._check_open()
            self._inside += 1
        try:
            record = _Record(0, 0, self.convex)
            compiled, where = (
                kernel.compiled(self.shard.spec.dtype),
                (self._control, self.shard.base, chunk.low, agreed, frame, addressof(record)),
            )
            # a lock's owner that is stopped is waited for, as workers do
            while (code := compiled(*where)) == TIMED_OUT:
                self._check_open()
            if code != DONE:
                raise MultiversoError(f"a lock of table {self.shard.header['table_id']} is broken ({code})")
            return record[1]
        finally:
            with self._gate:
                self._inside -= 1
                if self._closed:
                    self._left.notify_all()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the table is closed")


class Changes:
    """Counts how often a table of this host was changed by its workers, and by each peer's pushes.

    Args:
        read: asks the table how often this host's workers have changed it; None where ``version`` is only set.
    """

    def __init__(self, read: Callable[[], int] | None = None) -> None:
        self.version = 0
        self._read = read
        self._by: dict[int, int] = {}
        self._all = 0
        self._lock = threading.Lock()

    def look(self) -> None:
        """Asks the table now, without waiting for the next look at all tables."""
        if self._read is not None:
            self.version = self._read()

    def arrived(self, peer: int) -> None:
        """A peer has pushed something that is not zero."""
        with self._lock:
            self._by[peer] = self._by.get(peer, 0) + 1
            self._all += 1

    def for_peer(self, peer: int) -> int:
        """Returns how often others than this peer have changed it."""
        return self.version + self._all - self._by.get(peer, 0)
