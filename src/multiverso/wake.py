"""Wakes a thread that sleeps on descriptors."""

from __future__ import annotations

import contextlib
import socket


class Wake:
    """A descriptor that is readable from `set` to `clear`. Any thread or signal handler may set it, at any time."""

    def __init__(self) -> None:
        self._ends = socket.socketpair()
        for end in self._ends:
            end.setblocking(False)

    def fileno(self) -> int:
        """Returns the descriptor."""
        return self._ends[0].fileno()

    def set(self) -> None:
        """Makes it readable."""
        with contextlib.suppress(OSError):  # full: it is; closed: there is nothing to wake
            self._ends[1].send(b"x")

    def clear(self) -> None:
        """Before looking at what is there: what comes from here on makes it readable again."""
        with contextlib.suppress(BlockingIOError):
            self._ends[0].recv(4096)

    def close(self) -> None:
        """Closes it."""
        for end in self._ends:
            end.close()
