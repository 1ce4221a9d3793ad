"""When a repeated task is due: every N steps, or every so often."""

from __future__ import annotations

import math
import time
from datetime import timedelta


class Due:
    """Tells when something is due: every N steps, or when so much time has passed since the last time.

    Args:
        every: a number of steps, 1 or more, or a time above zero.

    Raises:
        ValueError, TypeError: it is neither.
    """

    def __init__(self, every: int | timedelta) -> None:
        if isinstance(every, timedelta):
            self._steps, self._seconds = 0, every.total_seconds()
            if self._seconds <= 0:
                raise ValueError(f"every={every!r}: expected a time above zero")
        elif isinstance(every, int) and not isinstance(every, bool):
            self._steps, self._seconds = every, 0.0
            if every < 1:
                raise ValueError(f"every={every}: expected at least 1 step")
        else:
            raise TypeError(f"every={every!r}: expected a number of steps (int) or a datetime.timedelta")
        self.restart()

    @property
    def by_time(self) -> bool:
        """Whether time and not steps decides."""
        return self._steps == 0

    def step(self) -> bool:
        """Counts a step; returns whether an exchange is due."""
        if self.by_time:
            due = time.monotonic() - self._since >= self._seconds
        else:
            due = self._count + 1 >= self._steps
        self._count += 1  # last: an exception cannot come between this and the return
        return due

    @property
    def count(self) -> int:
        """Steps since the last exchange."""
        return self._count

    def resume(self, count: int) -> None:
        """Resumes after so many steps since the last exchange; the time starts over."""
        self.restart()
        self._count = count

    def make_due(self) -> None:
        """Makes the next step due."""
        self._count, self._since = self._steps, -math.inf

    def restart(self) -> None:
        """Counts from here."""
        self._count = 0
        self._since = time.monotonic()
