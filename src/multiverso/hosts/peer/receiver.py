"""One thread that receives over many connections: where each had its own, those of a busy machine waited for turns.

On each message such a thread needs the interpreter and its protocol's lock, and whoever has them may have no processor.
With 64 hosts on two cores that was most of the time.
"""

from __future__ import annotations

import select
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from multiverso.in_process import close_in_children
from multiverso.wake import Wake


@dataclass(eq=False)
class _Connection:
    take: Callable[[], bool]
    ended: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None


class Receiver:
    """For connections whose messages take little time. Any thread may call; its maker closes it.

    Args:
        name: of its thread, which begins with the first connection.
    """

    _poll: select.epoll  # from then on, as is the next
    _wake: Wake

    def __init__(self, name: str) -> None:
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._of: dict[int, _Connection] = {}  # by descriptor
        self._lock = threading.Lock()

    def receive(self, descriptor: int, take: Callable[[], bool]) -> None:
        """Calls ``take`` in its thread whenever there is something to receive, until that says that this is the end.

        The calling thread waits meanwhile.

        Raises:
            Exception: what ``take`` has raised, which is its end, too.
            MemoryError: the system gives no thread.
        """
        connection = _Connection(take)
        with self._lock:
            if self._thread.ident is None:
                self._begin()
            self._of[descriptor] = connection
            self._poll.register(descriptor, select.EPOLLIN)
        connection.ended.wait()
        if connection.error is not None:
            raise connection.error

    def _begin(self) -> None:
        self._poll, self._wake = select.epoll(), Wake()
        close_in_children(self, Receiver._close)
        self._poll.register(self._wake, select.EPOLLIN)
        try:
            self._thread.start()
        except RuntimeError as error:  # perhaps not for long
            self._close()
            raise MemoryError(str(error)) from error

    def close(self) -> None:
        """Ends the thread, once all connections have ended."""
        if self._thread.ident is not None:
            self._wake.set()
            self._thread.join()
            self._close()

    def _close(self) -> None:
        self._poll.close()
        self._wake.close()

    def _run(self) -> None:
        while True:
            for descriptor, _ in self._poll.poll():
                if descriptor == self._wake.fileno():
                    return
                connection = self._of[descriptor]
                try:
                    if connection.take():
                        continue
                except Exception as error:  # it is this connection's end, and no other's
                    connection.error = error
                self._poll.unregister(descriptor)
                with self._lock:
                    del self._of[descriptor]
                connection.ended.set()
