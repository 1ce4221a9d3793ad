"""The worker's half: being seen alive, and seeing whether the node is. The node sees deaths in ``deaths.py``.

A robust mutex belongs to the thread that locked it, so one thread holds this worker's life lock for as long as
the session lives. The same thread watches the node: its socket's end shows at once, its life lock in any case.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import threading
import time

from multiverso.layout import words as at
from multiverso.memory import mutex
from multiverso.runtime.job.control import Control
from multiverso.saying import say

_LOOK_MILLISECONDS = 200
_GRACE_SECONDS = 1.0


class Liveness:
    """Owner: the session; ``release`` ends it.

    Args:
        ends_with_node: end this process when the node is gone.
    """

    def __init__(self, ends_with_node: bool) -> None:
        self.node_lost = threading.Event()
        self._ends_with_node = ends_with_node
        self._thread: threading.Thread | None = None
        self._pair: tuple[socket.socket, ...] = ()

    def begin(self, control: Control, worker_id: int, connection: socket.socket) -> None:
        """Takes the life lock of a worker, and watches the node."""
        self._control = control
        self._life = control.block(worker_id) + at.LIFE
        self._connection = connection.fileno()
        self._pair = socket.socketpair()
        held = threading.Event()
        self._thread = threading.Thread(target=self._live, args=(held,), name="multiverso-life", daemon=True)
        self._thread.start()
        held.wait()

    def release(self) -> None:
        """Releases the life lock and ends the thread. Does nothing the second time, or before `begin`."""
        if self._pair:
            with contextlib.suppress(OSError):
                # not only closed: a forked child may hold it open
                self._pair[0].shutdown(socket.SHUT_RDWR)
        if self._thread is not None:
            with contextlib.suppress(RuntimeError):  # it was never started
                self._thread.join()
            self._thread = None
        self.abandon()

    def abandon(self) -> None:
        """In a forked child, which has no such thread: closes the descriptors."""
        for end in self._pair:
            end.close()

    def _live(self, held: threading.Event) -> None:
        released = self._pair[1].fileno()
        mutex.lock(self._life, 1.0)
        held.set()
        poll = select.poll()
        poll.register(released, select.POLLRDHUP)
        poll.register(self._connection, select.POLLRDHUP)
        while True:
            events = poll.poll(_LOOK_MILLISECONDS)
            if any(descriptor == released for descriptor, _ in events):
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
            # unlocked as it is, not made consistent: every other worker's try finds the same
            mutex.unlock(self._control.address + at.NODE_LIFE)
        return code != mutex.BUSY

    def _say_node_is_lost(self) -> None:
        self.node_lost.set()
        self._control.node_is_lost()
        self._control.notify()
        if not self._ends_with_node:
            return
        with contextlib.suppress(OSError, ValueError):  # it may have been the launcher that read it
            say("the launcher is gone, so this worker ends")
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_GRACE_SECONDS)
        os._exit(128 + signal.SIGTERM)
