"""A node's log: lines on stderr."""

from __future__ import annotations

import math
import sys
import time

NODE_SAYS = "multiverso: node: "


def log(line: str) -> None:
    """Writes a line, at once. Any thread."""
    print(NODE_SAYS + line, file=sys.stderr, flush=True)


class Seldom:
    """Lines about what strangers on the network can cause, at a limited rate, so that they cannot fill the log.

    Args:
        seconds: between two lines.

    Owner: one thread at a time; two at once may both write a line.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._last, self._unsaid = -math.inf, 0

    def log(self, line: str) -> None:
        """Writes a line, with the number of those that were kept back; or keeps it back, if the last was just now."""
        now = time.monotonic()
        if now - self._last < self._seconds:
            self._unsaid += 1
            return
        more = f" ({self._unsaid} such lines before it were left out)" if self._unsaid else ""
        self._last, self._unsaid = now, 0
        log(line + more)
