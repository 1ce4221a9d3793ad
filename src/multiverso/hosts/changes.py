"""Whether a table has changed since a peer was last told, and by whom."""

from __future__ import annotations

import threading


class Changes:
    """How often a table of this host has changed, and by whom: its workers, or a peer's pushes."""

    def __init__(self) -> None:
        self.version = 0
        self._by: dict[int, int] = {}
        self._all = 0
        self._lock = threading.Lock()

    def arrived(self, peer: int) -> None:
        """A peer has pushed something that is not zero."""
        with self._lock:
            self._by[peer] = self._by.get(peer, 0) + 1
            self._all += 1

    def for_peer(self, peer: int) -> int:
        """Returns how often others than this peer have changed it."""
        return self.version + self._all - self._by.get(peer, 0)
