"""A controller's reports: sentences for people on stderr, events for the launcher over a socket."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time

from multiverso.wire import messages


class Reporter:
    """Sends events to the launcher, if there is one.

    Args:
        descriptor: the number of an inherited socket, as text, or None.
    """

    def __init__(self, descriptor: str | None) -> None:
        self._launcher = socket.socket(fileno=int(descriptor)) if descriptor else None
        self._requests = 0
        self._told = 0.0
        self.refused = 0
        if self._launcher is not None:
            # Neither a worker nor whatever handle_control starts may keep the launcher's socket open.
            os.environ.pop("PLATOON_STATUS_FD", None)
            self._launcher.set_inheritable(False)

    def event(self, kind: str, **fields: object) -> None:
        """Sends an event to the launcher."""
        if self._launcher is not None:
            with contextlib.suppress(OSError):  # it is gone
                messages.send(self._launcher, {"event": kind, **fields})

    def say(self, kind: str, text: str) -> None:
        """Prints a line for people, and sends the event to the launcher."""
        print(f"platoon: {text}", file=sys.stderr, flush=True)
        self.event(kind, text=text)

    def refuse(self, who: str, why: str) -> None:
        """Counts a refused connection, or a malformed request; says so the 1st, 2nd, 4th, ... time.

        Any thread may call it.
        """
        self.refused += 1
        if self.refused & (self.refused - 1) == 0:
            self.say("refused", f"refused {who}: it {why} (refused so far: {self.refused})")

    def count_request(self) -> None:
        """Counts a request, and reports the count to the launcher at most once a second."""
        self._requests += 1
        if self._launcher is not None and self._requests % 16 == 1:
            now = time.monotonic()
            if now - self._told >= 1:
                self._told = now
                self.event("requests", count=self._requests)

    def close(self) -> None:
        """Reports the final count and closes the socket."""
        self.event("requests", count=self._requests)
        if self._launcher is not None:
            self._launcher.close()
