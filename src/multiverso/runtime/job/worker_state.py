"""What one worker says of itself in the control segment, as it is read: whether it is there, and what it waits for."""

from __future__ import annotations

from msgspec import Struct

from multiverso.layout import words as at


class Wait(Struct, frozen=True):
    """What a worker waits for.

    Attributes:
        kind, table, stage, target: see ``layout/words.py``.
        sequence: another one for each wait.
        since_ns: when it began, on CLOCK_MONOTONIC.
        holder: of a lock or a word: the process that holds it now; 0 for none.
        holder_host: the name of its host, in a job on several.
        phases: of a reduction: how far workers 0, 1, ... are.
    """

    kind: int
    sequence: int
    table: int
    stage: int
    target: int
    since_ns: int
    holder: int = 0
    holder_host: str = ""
    phases: tuple[int, ...] = ()

    @property
    def is_for_lock(self) -> bool:
        """Whether a process has something that it will give back by itself."""
        return self.kind in (at.FOR_LOCK, at.FOR_WORD)


class WorkerState(Struct, frozen=True):
    """What one worker's block of the control segment says."""

    worker_id: int
    pid: int
    liveness: int
    participation: int
    barrier: int
    created: int
    threaded: bool
    gave_up_ns: int
    wait: Wait | None
    host: str = ""
    life: int = 0
    incarnation: int = 0

    @property
    def owner(self) -> int:
        """A number that no other session of this worker's number has: its process's may be given out again."""
        return self.life << 32 | self.pid

    @property
    def process(self) -> str:
        """Its pid, and where that is in a job on several hosts."""
        return f"pid {self.pid} on {self.host}" if self.host else f"pid {self.pid}"

    @property
    def has_left(self) -> bool:
        """It has left in order, or its node has seen that it did."""
        return self.participation == at.LEFT or self.liveness == at.GONE

    @property
    def is_live(self) -> bool:
        """Alive and not left: others wait for it."""
        return self.liveness == at.ALIVE and self.participation == at.ACTIVE
