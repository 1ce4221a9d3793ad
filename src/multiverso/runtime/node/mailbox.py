"""What other threads have to say to the node's thread, and the socket that wakes it."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from typing import Any, Literal

from multiverso.wake import Wake

End = Literal["left", "lost", "absent"]


class Mailbox:
    """Any thread posts; the node's thread reads. Owner: the node's maker opens and closes it."""

    def __init__(self) -> None:
        self._ends: queue.SimpleQueue[tuple[End, int, int]] = queue.SimpleQueue()
        self._orders: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._wake: Wake | None = None

    def open(self) -> None:
        """Makes the socket. What is posted before is not lost."""
        self._wake = Wake()

    def close(self) -> None:
        """Closes it; later posts are dropped."""
        if self._wake is not None:
            self._wake.close()

    def fileno(self) -> int:
        """The descriptor that is readable while something was posted."""
        assert self._wake is not None
        return self._wake.fileno()

    def poke(self) -> None:
        """Wakes the node's thread, to look at what has changed."""
        if self._wake is not None:
            self._wake.set()

    def post_order(self, order: Any) -> None:
        """Posts what is to be done: an order of the coordinator's, or something to call."""
        self._orders.put(order)
        self.poke()

    def post_end(self, how: End, worker_id: int, life: int = 0) -> None:
        """Posts how a worker's life has ended, or that its process is gone for good (``"absent"``)."""
        self._ends.put((how, worker_id, life))
        self.poke()

    def clear(self) -> None:
        """Before reading: what is posted from here on wakes the node's thread again."""
        assert self._wake is not None
        self._wake.clear()

    def orders(self) -> Iterator[Any]:
        """Yields the orders there are, each once."""
        while not self._orders.empty():
            yield self._orders.get()

    def ends(self) -> Iterator[tuple[End, int, int]]:
        """Yields how lives have ended, each once: what happened, to which worker, in which of its lives."""
        while not self._ends.empty():
            yield self._ends.get()
