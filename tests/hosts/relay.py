"""A relay between hosts whose link can be cut, closed and silenced."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import Self


class Relay:
    """Passes connections on to an address. Any thread.

    Attributes:
        address: where it listens.
        speaks: cleared: bytes stay where they are, and no connection ends.
        is_open: cleared: new connections are ended at once.
        connections: how many there have been.
        carried: bytes since the last cut.
    """

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._listener.getsockname()
        self.speaks, self.is_open = threading.Event(), threading.Event()
        self.speaks.set()
        self.is_open.set()
        self.connections = self.carried = 0
        self._sockets: set[socket.socket] = set()
        self._closed = False
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                here, _ = self._listener.accept()
            except OSError:
                return
            if self._closed or not self.is_open.is_set():
                here.close()
                continue
            try:
                there = socket.create_connection(self._target)
            except OSError:
                here.close()
                continue
            self.connections += 1
            self._sockets |= {here, there}
            for one, other in ((here, there), (there, here)):
                threading.Thread(target=self._pass_on, args=(one, other), daemon=True).start()

    def _pass_on(self, one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(4096):
                self.speaks.wait()
                other.sendall(data)
                self.carried += len(data)
        self._end(one, other)

    def _end(self, *sockets: socket.socket) -> None:
        for each in sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
            self._sockets.discard(each)

    def cut(self) -> None:
        """Ends all connections."""
        self.carried = 0
        self._end(*list(self._sockets))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._closed = True
        self.speaks.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
