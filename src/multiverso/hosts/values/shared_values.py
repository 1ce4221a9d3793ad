"""The shared values of tables at their homes, where a rule between hosts (``options.py``) decides how they move.

With a rule other than sum, the shared value is an array of its own at the home, beside the copy that the home's workers
have: that host is one of the hosts, and pushes to itself (`Loop`, in ``link.py``).
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field

import numpy as np

from multiverso.hosts.options import RuleBetween
from multiverso.hosts.peer.resources import Array
from multiverso.hosts.values.copies import Changes, Copy
from multiverso.layout import words as at
from multiverso.layout.worker_index import ALONE
from multiverso.memory import heap
from multiverso.memory.segment import Segment
from multiverso.shards.shard import Shard, initialise
from multiverso.spec.table import Places, TableSpec


@dataclass
class _Momentum:
    m: Array
    sum: Array
    pushed: set[int] = field(default_factory=set)


@dataclass(eq=False)
class SharedValues:
    """The shared values of a table at their homes on this host, and the rule that moves them.

    Attributes:
        rule: what is done with a push.
        hosts: how many there are now.
        copy: the values; only the chunks that live here mean anything.
        changes: by pushes.
    """

    rule: RuleBetween
    hosts: int
    copy: Copy
    changes: Changes = field(default_factory=Changes)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _momenta: dict[int, _Momentum] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, rule: RuleBetween, hosts: int, beside: Copy, number: int) -> SharedValues:
        """Makes the values, zero, in memory that no worker has, cut as this host's copy of the table is."""
        spec = beside.shard.spec
        plain = TableSpec(spec.kind, spec.rows, spec.columns, spec.dtype, convex=spec.convex)
        descriptor = heap.create("outer", Places.of(plain, ALONE, False).size)
        try:
            memory = Segment(descriptor)
        finally:
            os.close(descriptor)
        initialise(memory.address, plain, number, ALONE, at.ASYNCHRONOUS)
        return cls(rule, hosts, Copy(Shard(memory, plain, ALONE, at.ASYNCHRONOUS), beside.chunk_bytes))

    def regroup(self, hosts: int, values: dict[int, Array]) -> None:
        """Some hosts are no more: chunks that live here from now on begin with what was agreed with their last home."""
        with self._lock:
            self.hosts = hosts
            for chunk, agreed in values.items():
                place = self.copy.chunks[chunk]
                self.copy.shard.values()[place.low : place.high] = agreed

    def make_room(self, chunk: int, frame: Array) -> None:
        """Gets the memory that `step` needs for a chunk, where it has none yet."""
        with self._lock:
            if self.rule.name == "diloco" and chunk not in self._momenta:
                self._momenta[chunk] = _Momentum(np.zeros_like(frame), np.zeros_like(frame))

    def step(self, chunk: int, peer: int | None, frame: Array, spare: Array) -> None:
        """Makes of what a host has pushed, in place, by how much the shared values of a chunk move.

        Args:
            chunk: its number.
            peer: who has pushed; None for what an earlier push has left.
            frame: what was pushed.
            spare: memory of the same size, which is written to.
        """
        number = frame.dtype.type
        with self._lock:
            frame /= number(self.hosts)
            if self.rule.name != "diloco":
                return
            state = self._momenta[chunk]
            state.sum += frame
            if peer is not None:
                state.pushed.add(peer)
            frame *= number(self.rule.lr)
            if len(state.pushed) >= self.hosts:
                state.m *= number(self.rule.momentum)
                state.m += state.sum
                np.multiply(state.m, number(self.rule.lr * self.rule.momentum), out=spare)
                frame += spare
                state.sum[:] = 0
                state.pushed.clear()
