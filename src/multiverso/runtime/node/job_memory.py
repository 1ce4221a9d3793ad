"""The memory of one run of a job on this host, from its first worker's coming to its last one's going."""

from __future__ import annotations

from collections.abc import Callable

from multiverso.layout import words as at
from multiverso.memory import mutex
from multiverso.memory.heap import Heap
from multiverso.memory.segment import Segment
from multiverso.runtime.job.control import Control
from multiverso.runtime.node.catalogue import Catalogue
from multiverso.runtime.node.hosts import Hosts

_ELASTIC_CAPACITY = at.MAX_WORKERS


class JobMemory:
    """A fresh control segment and no tables. Owner: the node's thread.

    Args:
        workers_num: how many workers the job has; None for any number that come and go.
        continues: whether the others continue without a lost worker, unless the workers say otherwise.
        hosts: those of the job, which begin with this memory.
        comes_again: whether another process may come for a worker of this host that died.

    Attributes:
        control: the control segment.
        control_bytes: its size.
        catalogue: the tables.
        creations: those in the making.
        heap: the memory that all of it lies in.
    """

    def __init__(
        self, workers_num: int | None, continues: bool, hosts: Hosts, comes_again: Callable[[int], bool]
    ) -> None:
        capacity = workers_num or _ELASTIC_CAPACITY
        self._held = False
        self.heap = Heap("job")
        try:
            self.control_bytes = at.control_bytes(capacity)
            offset = self.heap.reserve(self.control_bytes, "a job's control segment")
            segment = Segment(self.heap.descriptor, offset, self.control_bytes)
            self.control = Control(segment, *hosts.places())
            self.control.initialise(capacity)
            self.control.continue_without_lost(continues)
            self.catalogue = catalogue = Catalogue(self.control, self.heap)
            fixed = workers_num is not None
            self.creations = hosts.begin(self.control, catalogue, fixed, comes_again)
        except BaseException:
            self.heap.close()
            raise

    def hold(self) -> None:
        """Takes the mutex that says that the node lives: its thread's end is the node's death."""
        mutex.lock(self.control.address + at.NODE_LIFE, 1.0)
        self._held = True

    def close(self) -> None:
        """Frees the memory; those that still wait in it see that the node is gone."""
        self.heap.close()
        if self._held:
            mutex.unlock(self.control.address + at.NODE_LIFE)
            self._held = False
