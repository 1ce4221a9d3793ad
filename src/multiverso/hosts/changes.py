"""Whether a table has changed since a peer was last told, and by whom."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Changes:
    """How often a table of this host has changed, and by whom: its workers, or a peer's pushes.

    Args:
        read: asks the table how often this host's workers have changed it; None where ``version`` is only set.
    """

    def __init__(self, read: Callable[[], int] | None = None) -> None:
        self.version = 0
        self._read = read
        self._by: dict[int, int] = {}
        self._all = 0
        self._lock = threading.Lock()

    def look(self) -> None:
        """Asks the table now, and does not wait for whoever looks at all tables now and then."""
        if self._read is not None:
            self.version = self._read()

    def arrived(self, peer: int) -> None:
        """A peer has pushed something that is not zero."""
        with self._lock:
            self._by[peer] = self._by.get(peer, 0) + 1
            self._all += 1

    def for_peer(self, peer: int) -> int:
        """Returns how often others than this peer have changed it."""
        return self.version + self._all - self._by.get(peer, 0)
