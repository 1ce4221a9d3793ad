"""Lines for people, on standard error."""

from __future__ import annotations

import contextlib
import sys
import time

_FIRST_SECONDS, _NEXT_SECONDS = 5.0, 10.0


def say(text: str) -> None:
    """Writes a line, at once and in one piece. Any thread. Where nobody can read it, nothing ends by that."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # no reader, closed, or there is none
        sys.stderr.write(f"multiverso: {text}\n")
        sys.stderr.flush()


class Progress:
    """Says how far something is that takes long, and how many seconds are left. Owner: the thread that does it.

    Args:
        what: is done, in words.
        nbytes: there are in all.
    """

    def __init__(self, what: str, nbytes: int) -> None:
        self._what, self._all, self._done = what, nbytes, 0
        self._began = time.monotonic()
        self._next = self._began + _FIRST_SECONDS

    def add(self, nbytes: int) -> None:
        """So many more are done."""
        self._done += nbytes
        now = time.monotonic()
        if now >= self._next and 0 < self._done < self._all:
            self._next = now + _NEXT_SECONDS
            left = (now - self._began) / self._done * (self._all - self._done)
            say(f"{self._what}: {self._done / 1e9:.1f} of {self._all / 1e9:.1f} GB, about {left:.0f} s left")
