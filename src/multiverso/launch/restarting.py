"""A job that fails is started again: how often, and what its workers find in their environment then."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from multiverso.launch.job import JobResult, Signals
from multiverso.runtime.restarts import RESTARTS_VARIABLE, RESUME_VARIABLE


@dataclass
class Starts:
    """The starts of one job.

    Attributes:
        most: How many restarts there may be.
        timeout_seconds: How long all of them together may take; None for no limit.
        signals: What asks for the end of all.
        restarts: How many there have been.
    """

    most: int
    timeout_seconds: float | None
    signals: Signals
    restarts: int = 0
    _began: float = field(default_factory=time.monotonic)

    @property
    def seconds_left(self) -> float | None:
        """How long this start may take."""
        if self.timeout_seconds is None:
            return None
        return max(self.timeout_seconds - (time.monotonic() - self._began), 1e-3)

    def again(self, result: JobResult, code: int) -> bool:
        """Returns whether to start once more after this result, and counts it.

        A signal, a timeout and a reader that has gone are no failures of the job.
        """
        failed = code != 0 and result.reason in ("failed", "finished") and not self.signals.number
        left = self.seconds_left
        if not failed or self.restarts >= self.most or (left is not None and left <= 1e-3):
            return False
        self.restarts += 1
        return True

    def words(self) -> str:
        """Says that it is started again."""
        return f"the job is started again ({self.restarts} of at most {self.most} times)."

    def environ(self, environ: Mapping[str, str], resume: bool) -> dict[str, str]:
        """Returns what workers find in their environment: how often there was a restart, whether to resume."""
        more = {RESTARTS_VARIABLE: str(self.restarts)}
        if resume:
            more[RESUME_VARIABLE] = "1"
        return {**environ, **more}
