"""The minibatch channel: the controller deals minibatches to whichever worker has room.

A worker grants credits, one for each minibatch that it has room for, so a slow worker gets fewer and none is
sent to a worker that is gone. (A push socket would deal the same number to each, dead or alive.) Only a worker
of the job can: see `platoon.channel.door`.

Credits after the first ones say that a minibatch was received. Until then the controller keeps it, and deals it again
to others when that worker's process has ended.
"""

from __future__ import annotations

import hmac
import os
import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence

import zmq

from platoon.channel.door import Door, knock
from platoon.channel.secret import Secret
from platoon.channel.wire import END_OF_DATA, Array, pack_arrays, unpack_arrays
from platoon.util import PlatoonError

MOST_ROOM = 1000  # minibatches on their way to one worker
_SLICE_SECONDS = 0.5
_NONCE_BYTES = 16
_RECEIVED = b"+"  # after a nonce: this credit is for a minibatch that was received
_MOST_CREDIT_BYTES = 1024  # a credit has 16 bytes, but what is said before the first one counts too


class BatchServer:
    """The controller's end. Any thread may send, one at a time.

    Args:
        port: the port, 0 for a free one.
        secret: the job's secret.
        on_refused: called, in any thread, with who was refused, and why.

    Raises:
        PlatoonError: the port is taken.

    Attributes:
        port: where it listens.
        socket: what it listens with.
    """

    def __init__(self, port: int, secret: Secret, on_refused: Callable[[str, str], None]) -> None:
        self._secret = secret
        self._on_refused = on_refused
        self._lock = threading.Lock()
        self._credits: deque[tuple[bytes, bytes]] = deque()  # of whom, and what answers its nonce
        self._granted: Counter[bytes] = Counter()
        self._on_way: dict[bytes, deque[list[object]]] = {}  # sent, and not known to be received
        self._again: deque[list[object]] = deque()  # sent to a worker that has ended before it had them
        self.ended = False
        self.closed = False
        options = {
            zmq.ROUTER_MANDATORY: 1,  # a worker that is gone is an error, not a lost minibatch
            zmq.SNDHWM: 0,  # the credits bound what is on its way
            zmq.RCVHWM: 2 * MOST_ROOM,
            zmq.LINGER: 2000,
        }
        self._door = Door(secret, "data", port, _MOST_CREDIT_BYTES, on_refused, options)
        self.port, self.socket = self._door.port, self._door.socket

    def send(self, arrays: Sequence[object] | Array, copy: bool, timeout_seconds: float) -> None:
        """Sends a minibatch to the next worker that has room, and waits for one if none has."""
        frames = pack_arrays(arrays)
        if copy:
            frames[1:] = [bytes(frame) for frame in frames[1:]]  # ours, as they may have to be sent again
        with self._lock:
            if self.ended:
                raise PlatoonError("end_mb() was called: there can be no more minibatches")
            until = time.monotonic() + timeout_seconds
            self._again.append(frames)  # after those that come before it
            try:
                while self._again:
                    worker = self._next_credit(until, timeout_seconds)
                    if self._send_to(*worker, self._again[0]):
                        self._again.popleft()
            except BaseException:
                if self._again and self._again[-1] is frames:
                    self._again.pop()
                raise

    def deal_again(self, pid: int) -> None:
        """Deals what was on its way to a process that has ended to workers that have room, now or with the next."""
        with self._lock:
            if self.closed:
                return
            self._receive_credits()
            for worker in [each for each in self._on_way if _process_of(each) == pid]:
                self._again.extend(self._on_way.pop(worker))
                self._credits = deque(credit for credit in self._credits if credit[0] != worker)
                self._granted.pop(worker, None)
            self._deal_waiting()

    def _deal_waiting(self) -> None:
        while self._again and self._credits:
            if self._send_to(*self._take_credit(), self._again[0]):
                self._again.popleft()

    def end(self) -> None:
        """Ends the minibatches, for the workers that wait and for each that asks later."""
        with self._lock:
            if not self.ended:
                self._answer_end()
                self.ended = True  # from now on the serving thread alone uses the socket

    def answer_end(self) -> None:
        """Answers workers that have asked since that there are no more; called when the socket is readable."""
        with self._lock:
            self._answer_end()

    def close(self) -> None:
        """Stops sending; what is on its way has two seconds to arrive."""
        self.closed = True  # a sender that waits sees it within its slice, and lets go of the lock
        with self._lock:
            self._door.close()

    def _answer_end(self) -> None:
        if self.closed:
            return
        self._receive_credits()
        self._deal_waiting()
        while self._credits:
            self._send_to(*self._take_credit(), [END_OF_DATA])

    def _take_credit(self) -> tuple[bytes, bytes]:
        credit = self._credits.popleft()
        self._granted[credit[0]] -= 1
        if not self._granted[credit[0]]:
            del self._granted[credit[0]]
        return credit

    def _send_to(self, worker: bytes, proof: bytes, frames: list[object]) -> bool:
        try:
            # The header is copied in any case, and small; ZeroMQ frees a frame that it did not copy later.
            self.socket.send_multipart([worker, proof, frames[0]], zmq.SNDMORE if len(frames) > 1 else 0)
            if len(frames) > 1:
                self.socket.send_multipart(frames[1:], copy=False)
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                return False  # gone since it granted the credit
            raise
        if frames[0] is not END_OF_DATA:
            self._on_way.setdefault(worker, deque()).append(frames)
        return True

    def _next_credit(self, until: float, timeout_seconds: float) -> tuple[bytes, bytes]:
        while True:
            if self.closed:
                raise PlatoonError("the controller is closed: no worker will take this minibatch")
            if not self._credits:
                self._receive_credits()
            if self._credits:
                return self._take_credit()
            left = until - time.monotonic()
            if left <= 0:
                raise PlatoonError(f"no worker had room for a minibatch within {timeout_seconds:g} s")
            self.socket.poll(1000 * min(left, _SLICE_SECONDS))

    def _receive_credits(self) -> None:
        try:
            while True:
                worker, *nonce = self.socket.recv_multipart(zmq.NOBLOCK)
                received = (
                    len(nonce) == 1 and nonce[0].endswith(_RECEIVED) and len(nonce[0]) == _NONCE_BYTES + 1
                )
                if received and self._on_way.get(worker):
                    self._on_way[worker].popleft()
                if len(nonce) != 1 or (len(nonce[0]) != _NONCE_BYTES and not received):
                    self._on_refused("a worker", f"granted a credit of {sum(map(len, nonce))} bytes")
                elif self._granted[worker] >= MOST_ROOM:
                    self._on_refused(
                        "a worker", f"wanted more than {MOST_ROOM} minibatches on their way to it"
                    )
                else:
                    self._granted[worker] += 1
                    self._credits.append((worker, self._secret.proof(nonce[0][:_NONCE_BYTES])))
        except zmq.Again:
            pass


class BatchClient:
    """A worker's end.

    Args:
        context: the worker's ZeroMQ context.
        port: where the controller sends from.
        room: how many minibatches may be on their way to this worker.
        secret: the job's secret.
    """

    def __init__(self, context: zmq.Context, port: int, room: int, secret: Secret) -> None:
        if not 1 <= room <= MOST_ROOM:
            raise PlatoonError(f"data_hwm must be from 1 to {MOST_ROOM}, got {room}")
        self._port = port
        self._nonce = secrets.token_bytes(_NONCE_BYTES)
        self._proof = secret.proof(self._nonce)
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.setsockopt(zmq.IDENTITY, _identity())
        knock(self.socket, secret, "data", port)
        self.ended = False
        for _ in range(room):
            self.socket.send(self._nonce)

    def receive(self, copy: bool) -> list[Array]:
        """Returns the minibatch that has arrived, or an empty list when there are no more.

        Raises:
            PlatoonError: it did not come from the job's controller, or its parts do not fit each other.
        """
        proof, *frames = self.socket.recv_multipart(copy=False)
        if not frames or not hmac.compare_digest(proof.buffer, self._proof):
            raise PlatoonError(
                f"a minibatch came from port {self._port} without proof of the job's secret: another program has "
                "that port"
            )
        if len(frames) == 1 and bytes(frames[0].buffer) == END_OF_DATA:
            self.ended = True
            return []
        arrays = unpack_arrays(frames, copy)
        self.socket.send(self._nonce + _RECEIVED)
        return arrays

    def close(self) -> None:
        """Gives up what is on its way."""
        self.socket.close()


def _identity() -> bytes:
    return b"%d/" % os.getpid() + secrets.token_bytes(8)


def _process_of(identity: bytes) -> int:
    number = identity.partition(b"/")[0]
    return int(number) if number.isdigit() else 0
