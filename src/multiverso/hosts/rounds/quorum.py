"""A table of rounds with a quorum in this host's memory: its node closes and folds, for workers that may be stopped."""

from __future__ import annotations

import numpy as np

from multiverso.compiling.on_demand import compile_update
from multiverso.hosts.peer.resources import Array
from multiverso.hosts.rounds.memory import RoundMemory
from multiverso.hosts.rounds.roll import Came
from multiverso.kernels.between_hosts import quorum as node
from multiverso.layout import words as at
from multiverso.memory.words import store64
from multiverso.shards.shard import Shard
from multiverso.spec.states import MOST_HYPER
from multiverso.updaters import loop_of


class QuorumMemory(RoundMemory):
    """As `RoundMemory`; a sum for an updater has its hyperparameters behind it, of the first host that contributes."""

    by_quorum = True

    def __init__(self, shard: Shard, control: int, wire: str = "native") -> None:
        super().__init__(shard, control, wire)
        name, self._update = shard.spec.dtype, 0
        if not self._begins:
            loop = loop_of(shard.spec.updater, shard.spec.step_count is not None)
            assert loop is not None, "a worker has looked"
            self._update, self.extra = compile_update(loop, name), MOST_HYPER
        self._count, self._close, self._commit = node.came.compiled(), node.close.compiled(), node.commit.compiled()
        self._add, self._update_values = node.fold.compiled(name), node.take.compiled(name)
        self._wake = node.wake.compiled()
        self._in_round, self._counted = 0, np.zeros(len(Came._fields), np.int64)

    def who_came(self, number: int) -> Came:
        """See `RoundMemory.who_came`."""
        self._count(self._control, self._shard.base, number, self._counted)
        return Came(*self._counted.tolist())

    def wake(self) -> None:
        """See `RoundMemory.wake`."""
        self._wake(self._control)

    def wanted(self, number: int) -> bool:
        """The head is told who has come, and need not be asked."""
        return False

    def decide(self, number: int, members: int) -> int:
        """Closes a round here: returns who is in it."""
        self._in_round = int(self._close(self._shard.base, number))
        return self._in_round

    def fold(self, number: int, chunk: int, members: int, total: Array, count: int) -> int:
        """See `RoundMemory.fold`."""
        if number == 0:
            return super().fold(0, chunk, members, total, count)
        numbers, hyper = np.split(total, [total.size - self.extra])
        now: int = self._add(self._shard.base, number, chunk, members, self._sum_begins, numbers, count)
        if not count:
            hyper[:] = self._hyper().view(self.dtype)[: self.extra]
        return now

    def finish(self, number: int, chunk: int, members: int, total: Array, count: int) -> int:
        """See `RoundMemory.finish`."""
        count = self.fold(number, chunk, members, total, count)
        self.take(number, chunk, total, count)
        return count

    def take(self, number: int, chunk: int, total: Array, count: int) -> None:
        """See `RoundMemory.take`."""
        if number == 0:
            super().take(0, chunk, total, count)
            return
        base, (numbers, hyper) = self._shard.base, np.split(total, [max(0, total.size - self.extra)])
        self._complete(number, chunk, numbers, count)
        self._update_values(base, self._node, self._update, number, chunk, numbers, hyper, count)
        if (chunk + 1) * self.chunk >= self.elements:
            self._commit(self._control, base, self._node, number, self._in_round)

    def overwrite(self, chunk: int, total: Array) -> None:
        """Overwrites a chunk, also where workers keep what they have read last."""
        shard, places = self._shard, self._shard.places
        behind = (places.slot_stride - places.small_slots) // 2
        slots = range(shard.index.slots)
        first = (places.slots + slot * places.slot_stride + places.small_slots for slot in slots)
        for start in (shard.values_offset(), *(start + side * behind for start in first for side in (0, 1))):
            shard.segment.array(start, self.elements, self.dtype)[self._place(chunk)] = total

    def _places_after(self, number: int) -> tuple[int, int]:
        places = self._shard.places
        start = places.slots + self._node * places.slot_stride + places.small_slots
        return start, start + self.elements * self.dtype.itemsize

    def _continue_after(self, number: int) -> None:
        base = self._shard.base
        store64(base + at.DECISIONS, number << 16)
        store64(base + at.COMMITTED, (number << 16) | ((self._node + 1) << 1))
