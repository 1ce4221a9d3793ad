"""A table of synchronous rounds in this host's memory, as `rounds` reaches it."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from multiverso import layout as at
from multiverso.hosts.buffers import Array
from multiverso.kernels import chained_node
from multiverso.memory.words import store64
from multiverso.shards.shard import Shard


class RoundMemory:
    """Implements :class:`multiverso.hosts.round_books.Staged`. Keeps the table's memory mapped.

    Args:
        shard: the table, all of it mapped.
        control: address of the job's control segment.
        local: the workers of this host; of the others' slots one is where sums for an updater go.
    """

    def __init__(self, shard: Shard, control: int, local: Iterable[int]) -> None:
        self._shard = shard
        self._control = control
        local = set(local)
        self._local = _bits(local)
        self._begins = int(shard.spec.updater == "add")
        self.dtype = np.dtype(shard.spec.dtype)
        self.elements = shard.spec.elements
        self.chunk = int(shard.header["chunk_size"])
        places = shard.places
        other = next(worker for worker in range(shard.workers) if worker not in local)
        store64(shard.base + at.TOTALS, places.slots + places.slot_stride * other)
        name = shard.spec.dtype
        self._members, self._wanted = chained_node.members_of.compiled(), chained_node.waits_for.compiled()
        self._decide = chained_node.decide.compiled()
        self._fold, self._fold_values = (
            chained_node.fold.compiled(name),
            chained_node.fold_values.compiled(name),
        )
        self._take, self._finish = chained_node.take.compiled(name), chained_node.finish.compiled(name)

    def members(self, number: int) -> int | None:
        """Returns who of this host takes part in a round, a bit each, or None while one is not ready."""
        members = self._members(self._control, self._shard.base, self._local, number)
        return None if members == -1 else members

    def wanted(self, number: int) -> bool:
        """Returns whether a live worker of this host waits for a round."""
        return number > 0 and bool(self._wanted(self._control, self._shard.base, self._local, number))

    def decide(self, number: int, members: int) -> None:
        """Fixes who takes part in a round."""
        self._decide(self._shard.base, number, members)

    def fold(self, number: int, chunk: int, members: int, total: Array, count: int) -> int:
        """Adds this host's part of a chunk; of round 0, what its workers have written as initial values."""
        if number == 0:
            return self._fold_values(self._shard.base, chunk, total, count)
        return self._fold(self._shard.base, number, chunk, members, self._begins, total, count)

    def finish(self, number: int, chunk: int, members: int, total: Array, count: int) -> int:
        """Adds this host's part of a chunk, and writes the total where the workers wait for it."""
        base, begins = self._shard.base, self._begins
        return self._finish(self._control, base, number, chunk, members, begins, total, count)

    def take(self, number: int, chunk: int, total: Array, count: int) -> None:
        """Writes a chunk's total where the workers wait for it."""
        self._take(self._control, self._shard.base, number, chunk, self._begins, total, count)

    def written(self, chunk: int, total: Array) -> None:
        """Reads a chunk of what a worker of this host has overwritten the values with."""
        total[:] = self._shard.values()[self._place(chunk)]

    def overwrite(self, chunk: int, total: Array) -> None:
        """Overwrites a chunk of the last finished round."""
        self._shard.values()[self._place(chunk)] = total

    def _place(self, chunk: int) -> slice:
        return slice(chunk * self.chunk, (chunk + 1) * self.chunk)


def _bits(workers: Iterable[int]) -> int:
    bits = sum(1 << worker for worker in workers)
    return bits - (1 << at.MAX_WORKERS) if bits >> (at.MAX_WORKERS - 1) else bits
