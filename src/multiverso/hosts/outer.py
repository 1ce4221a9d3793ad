"""Rules between hosts: what a home makes of the differences that the hosts push to it.

A host is a worker of the other hosts, so the rules are those between workers, one level up; H is the number of hosts::

    sum         T += a                                     every host's adds count in full
    mean        T += a / H                                 model averaging; with ``every``, local SGD
    diloco      T += lr a / H for each push; and once all hosts have pushed since the last time, g being the
                sum of these a / H: m = mu m + g;  T += lr mu m      outer Nesterov

Local SGD: Stich 2018, arXiv:1805.09767. DiLoCo: Douillard et al. 2023, arXiv:2311.08105, algorithm 1, with the outer
step of Nesterov momentum, ``lr (g + mu m)``. Nobody waits for the slowest host here: a push counts when it comes, and
only the momentum waits for all, as "delayed Nesterov" does in Liu et al. 2024, arXiv:2401.09135. One push of each host
moves T as one synchronous outer step does.

With a rule other than sum, the shared value is an array of its own at the home (``Outer``), beside the copy that the
home's workers have: that host is one of the hosts, and pushes to itself (``loop.py``).
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from multiverso import layout as at
from multiverso.errors import DtypeMismatchError, StartupError
from multiverso.hosts.changes import Changes
from multiverso.hosts.copies import Copy
from multiverso.memory import heap
from multiverso.memory.segment import Segment
from multiverso.shards.shard import Shard, initialise
from multiverso.spec import Places, TableSpec

Array = npt.NDArray[Any]
NAMES = ("sum", "mean", "local_sgd", "diloco")


@dataclass(frozen=True)
class OuterRule:
    """A rule between hosts.

    Attributes:
        name: one of NAMES.
        lr: the outer learning rate.
        momentum: of the outer Nesterov.
    """

    name: str = "sum"
    lr: float = 1.0
    momentum: float = 0.0

    @classmethod
    def of(cls, text: str, dtype: npt.DTypeLike) -> OuterRule:
        """Returns the rule that a user's text means: a name, or ``"diloco:LR,MOMENTUM"`` (by default 0.7 and 0.9).

        Raises:
            StartupError: there is no such rule.
            DtypeMismatchError: a table of whole numbers can only be summed.
        """
        name, colon, numbers = text.partition(":")
        lr, momentum = (0.7, 0.9) if name == "diloco" else (1.0, 0.0)
        try:
            if colon:
                lr, momentum = map(float, numbers.split(","))
        except ValueError:
            lr = -1.0
        if name not in NAMES or (colon and name != "diloco") or not (lr > 0 and 0 <= momentum < 1):
            raise StartupError(
                f"a rule between hosts is one of {', '.join(NAMES)}, or diloco:LR,MOMENTUM; got {text!r}"
            )
        if name != "sum" and np.dtype(dtype).kind != "f":
            raise DtypeMismatchError(
                f"the rule {name} needs a table of floats; {np.dtype(dtype)} can only be summed"
            )
        return cls(name, lr, momentum)


@dataclass
class _Momentum:
    m: Array
    sum: Array
    pushed: set[int] = field(default_factory=set)


@dataclass(eq=False)
class Outer:
    """The shared values of a table at their homes on this host, and the rule that moves them.

    Attributes:
        rule: what is done with a push.
        hosts: how many there are now.
        copy: the values; only the chunks that live here mean anything.
        changes: by pushes.
    """

    rule: OuterRule
    hosts: int
    copy: Copy
    changes: Changes = field(default_factory=Changes)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _momenta: dict[int, _Momentum] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, rule: OuterRule, hosts: int, spec: TableSpec, number: int) -> Outer:
        """Makes the values, zero, in memory that no worker has."""
        plain = TableSpec(spec.kind, spec.rows, spec.columns, spec.dtype, convex=spec.convex)
        descriptor = heap.create("outer", Places.of(plain, 1, False).size)
        try:
            memory = Segment(descriptor)
        finally:
            os.close(descriptor)
        initialise(memory.address, plain, number, 1, at.ASYNCHRONOUS)
        return cls(rule, hosts, Copy(Shard(memory, plain, 1, at.ASYNCHRONOUS)))

    def regroup(self, hosts: int, values: dict[int, Array]) -> None:
        """Some hosts are no more: chunks that live here from now on begin with what was agreed with their last home."""
        with self._lock:
            self.hosts = hosts
            for chunk, agreed in values.items():
                place = self.copy.chunks[chunk]
                self.copy.shard.values()[place.low : place.high] = agreed

    def make_room(self, chunk: int, frame: Array) -> None:
        """Gets the memory that :meth:`step` needs for a chunk, where it has none yet."""
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
        with self._lock:
            self._step(chunk, peer, frame, spare)

    def _step(self, chunk: int, peer: int | None, frame: Array, spare: Array) -> None:
        frame /= frame.dtype.type(self.hosts)
        if self.rule.name != "diloco":
            return
        state = self._momenta[chunk]
        state.sum += frame
        if peer is not None:
            state.pushed.add(peer)
        frame *= frame.dtype.type(self.rule.lr)
        if len(state.pushed) >= self.hosts:
            state.m *= frame.dtype.type(self.rule.momentum)
            state.m += state.sum
            np.multiply(state.m, frame.dtype.type(self.rule.lr * self.rule.momentum), out=spare)
            frame += spare
            state.sum[:] = 0
            state.pushed.clear()
