"""A table of synchronous rounds in this host's memory, as `rounds` reaches it."""

from __future__ import annotations

import numpy as np

from multiverso.hosts.codecs import NATIVE, Wire
from multiverso.hosts.peer.resources import Array
from multiverso.hosts.rounds.roll import Came
from multiverso.kernels.between_hosts import node as chained_node
from multiverso.layout import words as at
from multiverso.memory.words import load32, load64, store64
from multiverso.shards.shard import Shard

_HYPER_BYTES = 64
_WORDS = np.dtype([("round", "<i8"), ("steps_before", "<i8"), ("hyper", "u1", _HYPER_BYTES)])


class RoundMemory:
    """What workers have staged of a table, and where totals go. Keeps the table's memory mapped.

    Args:
        shard: the table, all of it mapped.
        control: address of the job's control segment.

    Attributes:
        dtype, elements: the table's.
        chunk: elements of a chunk; the last may have fewer.
        extra: numbers that travel behind each chunk of a sum.
        by_quorum: rounds are closed without those that are late.
        wire: the format of sums.
    """

    extra, by_quorum, wire = 0, False, Wire()

    def __init__(self, shard: Shard, control: int, wire: str = "native") -> None:
        self._shard = shard
        self.wire = Wire.of("native" if shard.spec.convex else wire, shard.spec.dtype)
        self._control = control
        self._node = shard.index.here  # its slot is where sums for an updater go
        self._ready = np.zeros(1, np.int64)
        self._begins = int(shard.spec.updater == "add")
        self._sum_begins = int(self._begins and not self.is_coded)
        self.dtype = np.dtype(shard.spec.dtype)
        self.elements = shard.spec.elements
        self.chunk = int(shard.header["chunk_size"])
        places = shard.places
        if not self.by_quorum:
            store64(shard.base + at.TOTALS, places.slots + places.slot_stride * self._node)
        name = shard.spec.dtype
        self._members, self._wanted = chained_node.members_of.compiled(), chained_node.waits_for.compiled()
        self._decide = chained_node.decide.compiled()
        self._fold, self._fold_values = (chained_node.fold.compiled(name), chained_node.fold_values.compiled(name))
        self._take, self._finish = chained_node.take.compiled(name), chained_node.finish.compiled(name)

    @property
    def is_coded(self) -> bool:
        """Whether sums are those of differences, which do not begin with the old values, and are coded."""
        return self.wire.number != NATIVE

    def members(self, number: int) -> int | None:
        """Returns who of this host takes part in a round, a bit each, or None while one is not ready."""
        is_ready = self._members(self._control, self._shard.base, number, self._ready)
        return int(self._ready[0]) if is_ready else None

    def who_came(self, number: int) -> Came:
        """With a quorum: returns who of this host has come to a round, and who may come."""
        raise NotImplementedError

    def wake(self) -> None:
        """With a quorum: wakes the thread that looks after each event of this host's workers."""

    def wanted(self, number: int) -> bool:
        """Returns whether a live worker of this host waits for a round."""
        return number > 0 and bool(self._wanted(self._control, self._shard.base, number))

    def decide(self, number: int, members: int) -> int:
        """Fixes who takes part in a round, and returns it."""
        self._decide(self._shard.base, number, members)
        return members

    def fold(self, number: int, chunk: int, members: int, total: Array, count: int) -> int:
        """Adds the members' part of a chunk to a sum of ``count`` contributions; returns how many there are then.

        Of round 0 that is what this host's workers have written as initial values.
        """
        if number == 0:
            return self._fold_values(self._shard.base, chunk, total, count)
        return self._fold(self._shard.base, number, chunk, members, self._sum_begins, total, count)

    def finish(self, number: int, chunk: int, members: int, total: Array, count: int) -> int:
        """`fold` and `take` at once, where no host comes after this one."""
        base, begins = self._shard.base, self._begins
        return self._finish(self._control, base, number, chunk, members, begins, total, count)

    def take(self, number: int, chunk: int, total: Array, count: int) -> None:
        """Writes a chunk's total where the workers wait for it."""
        self._complete(number, chunk, total, count)
        self._take(self._control, self._shard.base, number, chunk, self._begins, total, count)

    def _complete(self, number: int, chunk: int, total: Array, count: int) -> None:
        """Makes values of a sum of differences, where no updater does."""
        if self.is_coded and self._begins and number > 0 and count > 0:
            with np.errstate(all="ignore"):
                total += self._shard.values()[self._place(chunk)]

    def written(self, chunk: int, total: Array) -> None:
        """Reads a chunk of what a worker of this host has overwritten the values with."""
        total[:] = self._shard.values()[self._place(chunk)]

    def overwrite(self, chunk: int, total: Array) -> None:
        """Overwrites a chunk of the last finished round."""
        self._shard.values()[self._place(chunk)] = total

    # -- for a host that lacks the values --------------------------------------------------------------------

    def complete(self, round_number: int) -> bool | None:
        """Returns whether the values after a round are here; None while workers still make them, False if none will.

        With an updater the workers make them, each host's for itself.
        """
        if self._shard.committed >= round_number:
            return True
        return None if self._begins or any(map(self._works, self._shard.index.local or ())) else False

    def _works(self, worker: int) -> bool:
        block = self._control + at.worker_block(self._shard.index.of(worker))
        here = self._shard.enrolled(worker)
        alive = load32(block + at.LIVENESS) == at.ALIVE and load32(block + at.PARTICIPATION) == at.ACTIVE
        # it may wait for all others: its read has raised, and one of them may need the values
        kind, target = load32(block + at.WAIT_KIND), load64(block + at.WAIT_TARGET)
        elsewhere = kind == at.FOR_TABLE or (kind == at.FOR_BARRIER and target > load64(self._control + at.RELEASED))
        return bool(here and alive) and not elsewhere

    def fill_bytes(self, chunk: int) -> int:
        """Returns the bytes of a chunk of the values, with the updater's arrays and the words that go with them."""
        low, high, _ = self._place(chunk).indices(self.elements)
        return _WORDS.itemsize + (1 + len(self._shard.spec.state_names)) * (high - low) * self.dtype.itemsize

    def give(self, chunk: int, into: Array) -> None:
        """Writes a chunk of what there is after the last finished round."""
        shard, (words, parts) = self._shard, self._parts(into)
        words["round"], words["steps_before"] = shard.committed, load64(shard.base + at.STEPS_BEFORE)
        words["hyper"] = self._hyper()
        for part, whole in zip(parts, (shard.values(), *shard.states()), strict=True):
            part[:] = whole[self._place(chunk)]

    def put(self, chunk: int, found: Array) -> None:
        """Takes a chunk; they come in their order."""
        shard, (words, parts) = self._shard, self._parts(found)
        self._found = words.copy()
        at_values, at_states = self._places_after(int(words["round"][0]))
        values = shard.segment.array(at_values, self.elements, self.dtype)
        for whole, part in zip((values, *shard.states_at(at_states)), parts, strict=True):
            whole[self._place(chunk)] = part

    def _places_after(self, number: int) -> tuple[int, int]:
        """Where the values and the updater's arrays after a round go that come from another host."""
        places, side = self._shard.places, number & 1
        return places.buffers[side], places.states[side]

    def _parts(self, whole: Array) -> tuple[Array, Array]:
        """Returns the words, and a row of each array."""
        numbers = whole[_WORDS.itemsize :].view(self.dtype)
        return whole[: _WORDS.itemsize].view(_WORDS), numbers.reshape(1 + len(self._shard.spec.state_names), -1)

    def filled(self) -> int:
        """All chunks are there: returns after which round that was."""
        base, done = self._shard.base, int(self._found["round"][0])
        self._hyper()[:] = self._found["hyper"][0]
        store64(base + at.STEPS_BEFORE, int(self._found["steps_before"][0]))
        self._continue_after(done)
        return done

    def _continue_after(self, number: int) -> None:
        """Says to the workers that the values after a round are here."""
        base = self._shard.base
        store64(base + at.TAKING_PART, 0)
        store64(base + at.TAKING_PART + 8, 0)
        store64(base + at.DECIDED, number)
        store64(base + at.ARRIVED, number * int(self._shard.header["chunk_count"]))
        store64(base + at.COMMITTED, number)

    def _hyper(self) -> Array:
        return self._shard.segment.array(at.HYPER, _HYPER_BYTES, "uint8")

    def _place(self, chunk: int) -> slice:
        return slice(chunk * self.chunk, (chunk + 1) * self.chunk)
