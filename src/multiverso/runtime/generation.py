"""What a job has on this host from its first worker's coming to its last one's going: its memory, and what is in it."""

from __future__ import annotations

from multiverso import layout as at
from multiverso.memory import mutex
from multiverso.memory.heap import Heap
from multiverso.memory.segment import Segment
from multiverso.runtime.abroad import Abroad
from multiverso.runtime.catalogue import Catalogue
from multiverso.runtime.control import Control
from multiverso.runtime.creation import Creations
from multiverso.runtime.host_creation import HostCreations

_ELASTIC_CAPACITY = at.MAX_WORKERS


class Generation:
    """A fresh control segment and no tables. Owner: the node's thread.

    Args:
        workers_num: how many workers the job has; None for any number that come and go.
        continues: whether the others go on without a lost worker, unless the workers say otherwise.
        abroad: this host's part in a job on several, which begins with this memory.

    Attributes:
        control: the control segment.
        control_bytes: its size.
        catalogue: the tables.
        creations: those in the making.
        heap: the memory that all of it lies in.
    """

    def __init__(self, workers_num: int | None, continues: bool, abroad: Abroad | None) -> None:
        capacity = workers_num or _ELASTIC_CAPACITY
        self._held = False
        self.heap = Heap("job")
        try:
            self.control_bytes = at.control_bytes(capacity)
            offset = self.heap.reserve(self.control_bytes, "a job's control segment")
            segment = Segment(self.heap.descriptor, offset, self.control_bytes)
            self.control = Control(segment, *_places(abroad))
            self.control.initialise(capacity)
            self.control.continue_without_lost(continues)
            self.catalogue = catalogue = Catalogue(self.control, self.heap)
            if abroad is None:
                self.creations = Creations(catalogue, self.control, workers_num is not None)
            else:
                self.creations = HostCreations(catalogue, self.control, abroad.roster, abroad.tables)
                self.control.span_hosts()
                abroad.begin(self.control, lambda: catalogue.shards, catalogue.whole_memory)
        except BaseException:
            self.heap.close()
            raise

    def hold(self) -> None:
        """Takes the mutex that says that the node lives: its thread's end is the node's death."""
        mutex.lock(self.control.address + at.NODE_LIFE, 1.0)
        self._held = True

    def close(self) -> None:
        """Frees the memory; whoever still waits in it sees that the node is gone."""
        self.heap.close()
        if self._held:
            mutex.unlock(self.control.address + at.NODE_LIFE)
            self._held = False


def _places(abroad: Abroad | None) -> tuple[tuple[str, ...], str]:
    if abroad is None:
        return (), ""
    return abroad.roster.places(), abroad.roster.names[abroad.roster.host]
