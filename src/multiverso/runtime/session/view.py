"""The interface of a session to its own parts: they know this, and not `Session`."""

from __future__ import annotations

from typing import Protocol

from multiverso.deadline import Deadline
from multiverso.errors import NodeLostError
from multiverso.runtime.job.control import Control
from multiverso.runtime.job.wait_graph import WaitGraph
from multiverso.spec.modes import ConsistencyMode


class SessionView(Protocol):
    """A session, to its parts; see `Session`, where each of these is described.

    Attributes:
        closed: why it cannot be used any more; None while it can.
        consistency: what reads and adds mean in its job.
        control: the control segment.
        fixed_num: how many workers the job has; None where they come and go.
        incarnation: how many processes had this worker's number before, and died.
        worker_id: this worker's number.
        index: where its words lie in this host's memory, see `WorkerIndex`.
        barriers: the number of the last barrier that this worker has passed, which is the same in all that have.
    """

    closed: str | None
    consistency: ConsistencyMode
    control: Control
    fixed_num: int | None
    incarnation: int
    worker_id: int
    index: int
    barriers: int

    @property
    def hosts(self) -> tuple[str, ...]:
        """The names of the hosts of a job on several; nothing for a job on one."""

    def count_barriers(self, number: int) -> None:
        """Counts this worker as past so many barriers."""

    @property
    def node_lost(self) -> bool:
        """Whether the node is gone."""

    def node_error(self) -> NodeLostError:
        """Returns the error for a wait after the node is gone."""

    def makes_together(self, name: str | None) -> bool:
        """Returns whether all workers make a table together, with this name or none."""

    def live_workers(self) -> list[int]:
        """Returns the workers that take part now."""

    def wait_graph(self) -> WaitGraph:
        """Returns who is there, how far each is, and what each waits for."""

    def check_may_wait(self) -> None:
        """Before anything that may wait for others."""

    def note_threads(self) -> None:
        """Tells the other workers whether another thread of this one may continue while this thread waits."""

    def start_deadline(self, timeout_seconds: float | None = None) -> Deadline:
        """Begins the time of a call that may wait."""
