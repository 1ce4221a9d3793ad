"""The minibatch channel: the controller deals minibatches to whichever worker has room.

A worker grants credits, one for each minibatch that it has room for, so a slow worker gets fewer and none is
sent to a worker that is gone. (A push socket would deal the same number to each, dead or alive.)
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence

import zmq

from platoon.channel.wire import END_OF_DATA, Array, pack_arrays, unpack_arrays
from platoon.util import PlatoonError

_SLICE_SECONDS = 0.5


class BatchServer:
    """The controller's end. Any thread may send, one at a time.

    Args:
        interface: the address to listen on, or ``*`` for all.
        port: the port, 0 for a free one.

    Raises:
        PlatoonError: the port is taken.
    """

    def __init__(self, interface: str, port: int) -> None:
        self._context = zmq.Context()
        self._lock = threading.Lock()
        self._credits: deque[bytes] = deque()
        self.ended = False
        self.closed = False
        self.socket = self._context.socket(zmq.ROUTER)
        self.socket.setsockopt(
            zmq.ROUTER_MANDATORY, 1
        )  # a worker that is gone is an error, not a lost minibatch
        self.socket.setsockopt(zmq.SNDHWM, 0)  # the credits bound what is on its way
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.setsockopt(zmq.LINGER, 2000)
        try:
            self.port = bind(self.socket, interface, port)
        except PlatoonError:
            self.close()
            raise

    def send(self, arrays: Sequence[object], copy: bool, timeout_seconds: float) -> None:
        """Sends a minibatch to the next worker that has room, and waits for one if none has."""
        frames = pack_arrays(arrays)
        with self._lock:
            if self.ended:
                raise PlatoonError("end_mb() was called: there can be no more minibatches")
            until = time.monotonic() + timeout_seconds
            while True:
                worker = self._next_credit(until, timeout_seconds)
                if self._send_to(worker, frames, copy):
                    return

    def end(self) -> None:
        """Says that there are no more minibatches: to the workers that wait, and to each that asks later."""
        with self._lock:
            if not self.ended:
                self._answer_end()
                self.ended = True  # from now on the serving thread alone uses the socket

    def answer_end(self) -> None:
        """Tells workers that asked since that there are no more; called when the socket is readable."""
        with self._lock:
            self._answer_end()

    def close(self) -> None:
        """Stops sending; what is on its way has two seconds to arrive."""
        self.closed = True  # a sender that waits sees it within its slice, and lets go of the lock
        with self._lock:
            self.socket.close()
            self._context.term()

    def _answer_end(self) -> None:
        if self.closed:
            return
        self._receive_credits()
        while self._credits:
            self._send_to(self._credits.popleft(), [END_OF_DATA], True)

    def _send_to(self, worker: bytes, frames: list[object], copy: bool) -> bool:
        try:
            # The header is copied in any case, and small; ZeroMQ frees a frame that it did not copy later.
            self.socket.send_multipart([worker, frames[0]], zmq.SNDMORE if len(frames) > 1 else 0)
            if len(frames) > 1:
                self.socket.send_multipart(frames[1:], copy=copy)
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                return False  # gone since it granted the credit
            raise
        return True

    def _next_credit(self, until: float, timeout_seconds: float) -> bytes:
        while True:
            if self.closed:
                raise PlatoonError("the controller is closed: no worker will take this minibatch")
            if not self._credits:
                self._receive_credits()
            if self._credits:
                return self._credits.popleft()
            left = until - time.monotonic()
            if left <= 0:
                raise PlatoonError(f"no worker had room for a minibatch within {timeout_seconds:g} s")
            self.socket.poll(1000 * min(left, _SLICE_SECONDS))

    def _receive_credits(self) -> None:
        try:
            while True:
                self._credits.append(self.socket.recv_multipart(zmq.NOBLOCK)[0])
        except zmq.Again:
            pass


class BatchClient:
    """A worker's end.

    Args:
        context: the worker's ZeroMQ context.
        port: where the controller sends from.
        room: how many minibatches may be on their way to this worker.
    """

    def __init__(self, context: zmq.Context, port: int, room: int) -> None:
        if room < 1:
            raise PlatoonError(f"data_hwm must be at least 1, got {room}")
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.connect(f"tcp://127.0.0.1:{port}")
        self.ended = False
        for _ in range(room):
            self.socket.send(b"")

    def receive(self, copy: bool) -> list[Array]:
        """Returns the minibatch that has arrived, or an empty list when there are no more."""
        frames = self.socket.recv_multipart(copy=False)
        if len(frames) == 1 and bytes(frames[0].buffer) == END_OF_DATA:
            self.ended = True
            return []
        arrays = unpack_arrays(frames, copy)
        self.socket.send(b"")
        return arrays

    def close(self) -> None:
        """Gives up what is on its way."""
        self.socket.close()


def bind(socket: zmq.Socket, interface: str, port: int) -> int:
    """Binds a socket and returns its port.

    Raises:
        PlatoonError: the port is taken or not allowed.
    """
    try:
        if port == 0:
            return int(socket.bind_to_random_port(f"tcp://{interface}"))
        socket.bind(f"tcp://{interface}:{port}")
    except zmq.ZMQError as error:
        raise PlatoonError(
            f"cannot listen on port {port} ({error.strerror}); another controller may be using it: "
            "give this one --control-port or --data-port"
        ) from error
    return port
