"""Hosts without nodes: tables in memory of their own, and the fabrics that keep them near each other."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from multiverso.deadline import Deadline
from multiverso.hosts.fabric import Fabric
from multiverso.hosts.transport.credentials import Credentials, new_credentials
from multiverso.layout import words as at
from multiverso.layout.worker_index import WorkerIndex
from multiverso.memory import heap, words
from multiverso.memory.segment import Segment
from multiverso.shards.shard import Shard, initialise
from multiverso.spec.table import Places, TableSpec

SECONDS = 60.0
WORKERS = WorkerIndex(2)


def new_shard(spec: TableSpec, number: int = 1) -> Shard:
    """A table as a node would make it, all of it mapped."""
    descriptor = heap.create("hosts", Places.of(spec, WORKERS, False).size)
    try:
        memory = Segment(descriptor)
    finally:
        os.close(descriptor)
    initialise(memory.address, spec, number, WORKERS, at.ASYNCHRONOUS)
    return Shard(memory, spec, WORKERS, at.ASYNCHRONOUS)


class Adder:
    """A worker of a shard: adds under the stripes' locks, by the kernel that workers call."""

    def __init__(self, shard: Shard, worker_id: int = 0) -> None:
        from multiverso.consistency.protocol import Call
        from multiverso.kernels import dense

        self._shard, self._worker, self._call = shard, worker_id, Call()
        self._add = dense.add.compiled(shard.spec.dtype)
        self._control = np.zeros(at.control_bytes(WORKERS.workers) // 8, np.int64)
        for number in range(WORKERS.workers + 1):
            block = int(self._control.ctypes.data) + at.worker_block(number)
            words.store64(block + at.ATTACHMENT, 1)
            words.store32(block + at.LIVENESS, at.ALIVE)

    @property
    def control(self) -> int:
        """Address of the control segment, of which every adder has its own."""
        return int(self._control.ctypes.data)

    def add(self, delta: Any) -> None:
        self._call.done.value = 0
        array = np.ascontiguousarray(delta, self._shard.spec.dtype)
        assert self._add(self.control, self._shard.base, 0, self._worker, array, self._call.address) == 0


def changed(shard: Shard) -> None:
    """Says that somebody has written into the values."""
    address = shard.base + at.WRITTEN
    words.store64(address, words.load64(address) + 1)


@contextmanager
def fabrics(count: int, credentials: Credentials | None = None, **options: Any) -> Iterator[list[Fabric]]:
    """Hosts of one job in this process, all connected to each other."""
    job = credentials or new_credentials(encrypted=False)
    with ExitStack() as stack:
        made = [stack.enter_context(Fabric(host, count, job, **options)) for host in range(count)]
        addresses = [fabric.listen() for fabric in made]
        for fabric in made:
            for peer in range(fabric.host):
                fabric.connect(peer, addresses[peer])
        yield made


def interrupt(fabric: Fabric, number: int) -> None:
    """Cuts the connections to a host, as a fault of the network would."""
    for peer in fabric.peers.to(number):
        peer.interrupt()


def barrier(made: list[Fabric]) -> None:
    """What a barrier of all workers does between the hosts."""
    deadline = Deadline.after(SECONDS)
    for step in ("settle", "take"):
        errors: list[BaseException] = []

        def call(fabric: Fabric, step: str = step, errors: list[BaseException] = errors) -> None:
            try:
                getattr(fabric, step)(deadline)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=call, args=(fabric,)) for fabric in made]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
