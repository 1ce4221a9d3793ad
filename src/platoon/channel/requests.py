"""A worker's end of the control channel: a request, an answer, a deadline, and is the controller alive?"""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import zmq

from platoon.channel.wire import dumps, loads
from platoon.util import PlatoonError

_SLICE_MS = 500
_LAST_WORDS_MS = 500  # what a controller said before it ended may still be on its way to us
_GOODBYE_SECONDS = 5.0  # a controller that is busy for longer will see the process end


class Requests:
    """Asks a controller. Any thread may ask, one at a time.

    Args:
        context: the worker's ZeroMQ context.
        port: the controller's port on this host.
        timeout_seconds: how long an answer may take.
    """

    def __init__(self, context: zmq.Context, port: int, timeout_seconds: float) -> None:
        self._lock = threading.Lock()
        self._number = 0
        self._port = port
        self._timeout_seconds = timeout_seconds
        self._controller = -1
        self._pid: int | None = None
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(f"tcp://127.0.0.1:{port}")

    def watch(self, pid: int) -> None:
        """Makes every later wait end soon after the controller's process has ended."""
        try:
            self._controller = os.pidfd_open(pid)
        except OSError as error:
            raise PlatoonError(
                f"the controller (process {pid}) is not on this host, or has just ended"
            ) from error
        self._pid = pid

    def ask(self, req: object, info: object, timeout_seconds: float | None = None) -> Any:
        """Sends a request and returns its answer.

        Args:
            req: what is asked.
            info: what goes with it.
            timeout_seconds: how long the answer may take, instead of what was set for all.

        Raises:
            PlatoonError: no answer came in time, the controller is gone, or it answered with an error.
        """
        query = dumps({"worker_id": os.getpid(), "req": req, "req_info": info})
        with self._lock:
            self._number += 1
            number = str(self._number).encode()
            self._socket.send_multipart([number, query])
            seconds = self._timeout_seconds if timeout_seconds is None else timeout_seconds
            until = time.monotonic() + seconds
            while True:
                self.wait(self._socket, until, f"an answer to the request {req!r:.100}")
                received, message = self._socket.recv_multipart()
                if received == number:  # else it is the late answer to a request that was given up
                    break
        answer = loads(message)
        if "error" in answer:
            raise PlatoonError(answer["error"])
        return answer["ok"]

    def wait(self, socket: zmq.Socket, until: float, what: str) -> None:
        """Waits until a socket has something.

        Raises:
            PlatoonError: the deadline passed, or the controller ended and left nothing to read.
        """
        sources = [(socket, zmq.POLLIN)]
        if self._controller >= 0:
            sources.append((self._controller, zmq.POLLIN))
        while True:
            left_ms = 1000 * (until - time.monotonic())
            ready = [source for source, _ in zmq.zmq_poll(sources, max(0, int(min(left_ms, _SLICE_MS))))]
            if socket in ready or (self._controller in ready and socket.poll(_LAST_WORDS_MS)):
                return
            if self._controller in ready:
                raise PlatoonError(
                    f"the controller (process {self._pid}) is gone; this worker waited for {what}"
                )
            if left_ms <= 0:
                raise PlatoonError(
                    f"waited {self._timeout_seconds:g} s for {what}; "
                    f"is a controller running on port {self._port}?"
                )

    def say_goodbye(self) -> None:
        """Tells the controller that this worker leaves; a controller that is gone need not know."""
        if self._controller >= 0 and not zmq.zmq_poll([(self._controller, zmq.POLLIN)], 0):
            try:
                self.ask("platoon-bye", None, _GOODBYE_SECONDS)
            except PlatoonError:
                pass

    def close(self) -> None:
        """Closes the socket."""
        self._socket.close()
        if self._controller >= 0:
            os.close(self._controller)
            self._controller = -1
