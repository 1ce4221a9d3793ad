"""Starts a failed job again, or a failed worker of a job that continues: how often, and after what pause."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from multiverso.launch.results import JobResult, WorkerExit
from multiverso.launch.signals import Signals
from multiverso.runtime.discovery.restarts import RESTARTS_VARIABLE, RESUME_VARIABLE

_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0
_LONG_SECONDS = 10.0
_LOOK_SECONDS = 0.05
_NO_TIME = 1e-3


@dataclass
class Pauses:
    """Growing pauses before a new start, so that a program that fails at once does not take a core.

    Nothing after the first failure, then 0.5, 1, 2 seconds and so on, 30 at most; what has run for 10 seconds begins
    again.
    """

    _in_a_row: int = 0

    def after(self, seconds: float) -> float:
        """Returns the seconds to wait after something has failed that ran for so long."""
        self._in_a_row = 0 if seconds >= _LONG_SECONDS else self._in_a_row + 1
        if self._in_a_row <= 1:
            return 0.0
        return float(min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** (self._in_a_row - 2)))


@dataclass(frozen=True)
class Ended:
    """A start that is over.

    Attributes:
        result: how it ended.
        code: the launcher's exit code for that.
        tell: says how it ended.
    """

    result: JobResult
    code: int
    tell: Callable[[], None]


@dataclass
class Starts:
    """The starts of one job.

    Attributes:
        most: how many restarts there may be.
        timeout_seconds: how long all of them together may take; None for no limit.
        signals: what asks for the end of all.
        restarts: how many there have been.
    """

    most: int
    timeout_seconds: float | None
    signals: Signals
    restarts: int = 0
    _began: float = field(default_factory=time.monotonic)
    _pauses: Pauses = field(default_factory=Pauses)
    _pause: float = 0.0

    @property
    def seconds_left(self) -> float | None:
        """How long this start may take."""
        if self.timeout_seconds is None:
            return None
        return max(self.timeout_seconds - (time.monotonic() - self._began), _NO_TIME)

    def run(self, start: Callable[[], Ended], restarting: Callable[[], None]) -> Ended:
        """Starts a job, again and again as long as it fails and may be; returns the last end, which is not told yet.

        A signal, a timeout and a reader that has gone are not failures of the job. Where the last starts have failed at
        once there is a pause, which a signal or the timeout ends.
        """
        while True:
            ended = start()
            failed = ended.code != 0 and ended.result.reason in ("failed", "finished") and not self.signals.number
            left = math.inf if self.seconds_left is None else self.seconds_left
            if not failed or self.restarts >= self.most or left <= _NO_TIME:
                return ended
            self.restarts += 1
            self._pause = self._pauses.after(ended.result.seconds)
            ended.tell()
            restarting()
            end = time.monotonic() + min(self._pause, left)
            while not self.signals.number and (rest := end - time.monotonic()) > 0:
                time.sleep(min(rest, _LOOK_SECONDS))

    def words(self) -> str:
        """Returns the line that reports a restart."""
        when = f" in {self._pause:g} s" if self._pause else ""
        return f"the job is started again{when} ({self.restarts} of at most {self.most} times)."

    def environ(self, environ: Mapping[str, str], resume: bool) -> dict[str, str]:
        """Returns what workers find in their environment: how often there was a restart, whether to resume."""
        more = {RESTARTS_VARIABLE: str(self.restarts)}
        if resume:
            more[RESUME_VARIABLE] = "1"
        return {**environ, **more}


@dataclass
class Replacements:
    """The workers that are started again in a job that continues.

    Attributes:
        most: how many there may be in all.
        done: how many there have been, with those that wait for their start.
    """

    most: int
    done: int = 0
    _pauses: dict[int, Pauses] = field(default_factory=dict)

    def after(self, end: WorkerExit) -> float | None:
        """Returns the seconds after which a worker that has failed is started again, and counts it; None: it is not."""
        if self.done >= self.most:
            return None
        self.done += 1
        return self._pauses.setdefault(end.worker_id, Pauses()).after(end.seconds)

    def __str__(self) -> str:
        return f"{self.done} of at most {self.most} replacements"

    def words(self, end: WorkerExit, seconds: float) -> str:
        """Returns the line that reports a replacement."""
        when = f" in {seconds:g} s" if seconds else ""
        return f"{end}; it is started again{when} ({self})."
