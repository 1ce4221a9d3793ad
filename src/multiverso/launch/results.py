"""How a job ended, and each of its workers."""

from dataclasses import dataclass
from typing import Literal

Reason = Literal["finished", "failed", "signal", "timeout", "output closed"]
_MOST_NAMED = 3  # of those that failed after the first


@dataclass(frozen=True)
class WorkerExit:
    """How a worker ended.

    Attributes:
        worker_id: its number.
        pid: its process id.
        code: its exit code as a shell gives it: 128 + the signal's number when a signal ended it.
        signal: the signal's name, or None.
        ended_by_us: whether it ended because the launcher had told it to.
        seconds: how long it ran.
        host: the name of its host, in a job on several.
    """

    worker_id: int
    pid: int
    code: int
    signal: str | None
    ended_by_us: bool
    seconds: float
    host: str = ""

    @property
    def failed(self) -> bool:
        """Whether it failed on its own account."""
        return self.code != 0 and not self.ended_by_us

    def __str__(self) -> str:
        how = f"was killed by {self.signal}" if self.signal else f"failed with exit code {self.code}"
        where = f" on {self.host}" if self.host else ""
        return f"worker {self.worker_id} (pid {self.pid}{where}) {how}"


@dataclass(frozen=True)
class JobResult:
    """How a job ended.

    Attributes:
        reason: what ended it.
        exit_code: the failed worker's code; 0 also when the others were to continue and one finished; 128 + the
            signal's number after a signal; 124 after a timeout; 141 when our output has no reader.
        culprit: the worker whose failure ended the job, or was the first, or None.
        deserter: a worker that made others fail, although its own exit code is 0: it ended without
            ``multiverso.shutdown()`` while they needed it. Or None.
        exits: how each worker ended, in worker order.
        seconds: how long the job ran.
        later: those that failed after the culprit on their own account, in the order in which that was seen.
    """

    reason: Reason
    exit_code: int
    culprit: WorkerExit | None
    deserter: WorkerExit | None
    exits: tuple[WorkerExit, ...]
    seconds: float
    later: tuple[WorkerExit, ...] = ()

    @property
    def failures(self) -> str:
        """Who failed, the first one first."""
        if not self.later:
            return str(self.culprit)
        named = ", ".join(map(str, self.later[:_MOST_NAMED]))
        more = len(self.later) - _MOST_NAMED
        return f"{self.culprit} first, then {named}" + (f" and {more} more" if more > 0 else "")

    def __str__(self) -> str:
        if self.culprit is not None and self.reason in ("finished", "failed"):
            return self.failures if self.exit_code else f"the others have finished; {self.failures}"
        words = {"finished": "all workers have finished", "timeout": "it took longer than it may"}
        return {**words, "signal": "ended by a signal"}.get(self.reason, self.reason)
