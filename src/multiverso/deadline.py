"""Deadlines: one moment each, made where a user's call comes in and handed down as it is.

A number of seconds that is handed down is given in full to each thing below: to each of 65 locks, to each of a
worker's tables. A deadline is one moment for all of them.
"""

from __future__ import annotations

import math
import time

from msgspec import Struct

SLICE_SECONDS = 0.5  # the longest that anything sleeps without a look at signals, deadlines and the node


class Deadline(Struct, frozen=True):
    """The moment at which a wait ends.

    Attributes:
        seconds: how long it was at first; ``math.inf`` for no limit.
        at: the moment itself, on ``time.monotonic()``.
    """

    seconds: float
    at: float

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        """Returns the deadline that many seconds from now.

        Raises:
            ValueError: it is not a number of seconds, 0 or more.
        """
        seconds = checked_seconds(seconds)
        return cls(seconds, time.monotonic() + seconds)

    def left(self, most: float = math.inf) -> float:
        """Returns the seconds until then: at least 0, and at most ``most``."""
        return max(0.0, min(most, self.at - time.monotonic()))

    def slice_left(self) -> float:
        """Returns how long a waiter may sleep before it has to look again."""
        return self.left(SLICE_SECONDS)

    @property
    def passed(self) -> bool:
        """Whether it is over."""
        return time.monotonic() >= self.at

    def __str__(self) -> str:
        return f"{self.seconds:g} s"


def checked_seconds(value: float, *, positive: bool = False) -> float:
    """Returns a number of seconds as it came from a user.

    Args:
        value: what came.
        positive: whether 0 is refused, too: nothing can begin, or be done, in no time.

    Raises:
        ValueError: it is not a number, or too small.
    """
    try:
        seconds = math.nan if isinstance(value, (bool, str)) else float(value)
    except (TypeError, ValueError):
        seconds = math.nan
    if not seconds >= 0 or (positive and seconds == 0):
        least = "above 0" if positive else "0 or more"
        raise ValueError(f"a timeout is a number of seconds, {least} (math.inf for no limit); got {value!r}")
    return seconds
