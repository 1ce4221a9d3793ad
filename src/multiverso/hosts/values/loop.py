"""A host's link to itself: with a rule between hosts, its own copy is one of those that push to the shared values."""

from __future__ import annotations

import threading
import time

from multiverso.hosts.peer.frames import Header
from multiverso.hosts.values.link import Link


class Loop:
    """Carries a link's frames back to it, in the thread that asks for it.

    Args:
        link: whose peer is its own host.
    """

    def __init__(self, link: Link) -> None:
        self.link = link
        self._lock = threading.Lock()
        link.connect(0)

    def pump(self) -> None:
        """Moves what there is to move. If another thread does so already, that continues with it."""
        while self._lock.acquire(blocking=False):
            try:
                while (outgoing := self.link.next(time.monotonic())) is not None:
                    header = Header(*outgoing.header)  # as it would arrive
                    room = self.link.accept(header)
                    if room:
                        room[:] = outgoing.body
                    self.link.sent(outgoing)
                    self.link.arrived(header, room, time.monotonic())
                    self.link.wake()
            finally:
                self._lock.release()
            if self.link.wait(time.monotonic()) != 0.0:  # nothing came between the last look and the release
                return

    poke = pump

    def receive_now(self) -> None:
        """All was received when it was sent."""
