"""Being seen alive, and seeing whether the node is.

A robust mutex belongs to the thread that locked it, so one thread holds this worker's life mutex for as long as
the session lives. The same thread watches the node: its socket's end tells at once, its life mutex in any case.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import threading
import time

from multiverso import layout as at
from multiverso.memory import mutex
from multiverso.runtime.control import Control

_LOOK_MILLISECONDS = 200
_GRACE_SECONDS = 1.0


class Liveness:
    """Owner: the session; ``release`` ends it."""

    def __init__(
        self, control: Control, worker_id: int, connection: socket.socket, ends_with_node: bool
    ) -> None:
        self.node_lost = threading.Event()
        self._control = control
        self._life = control.block(worker_id) + at.LIFE
        self._connection = connection.fileno()
        self._ends_with_node = ends_with_node
        self._released = os.eventfd(0, os.EFD_CLOEXEC)
        held = threading.Event()
        self._thread = threading.Thread(target=self._live, args=(held,), name="multiverso-life", daemon=True)
        self._thread.start()
        held.wait()

    def release(self) -> None:
        """Lets the life mutex go and ends the thread."""
        os.eventfd_write(self._released, 1)
        self._thread.join()
        os.close(self._released)

    def _live(self, held: threading.Event) -> None:
        mutex.lock(self._life, 1.0)
        held.set()
        poll = select.poll()
        poll.register(self._released, select.POLLIN)
        poll.register(self._connection, select.POLLRDHUP)
        while True:
            events = poll.poll(_LOOK_MILLISECONDS)
            if any(descriptor == self._released for descriptor, _ in events):
                break
            if events or self._node_is_dead():
                self._say_node_is_lost()
                poll.unregister(self._connection)
                poll.poll()  # until the session is released
                break
        mutex.unlock(self._life)

    def _node_is_dead(self) -> bool:
        code = mutex.try_lock(self._control.address + at.NODE_LIFE)
        if code in (0, mutex.OWNER_DEAD):
            # unlocked as it is, not made consistent: every other worker's try tells the same
            mutex.unlock(self._control.address + at.NODE_LIFE)
        return code != mutex.BUSY

    def _say_node_is_lost(self) -> None:
        self.node_lost.set()
        self._control.notify()
        if not self._ends_with_node:
            return
        print("multiverso: the launcher is gone, so this worker ends", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_GRACE_SECONDS)
        os._exit(128 + signal.SIGTERM)
