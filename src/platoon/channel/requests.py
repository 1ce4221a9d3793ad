"""A worker's end of the control channel: a request, an answer, a deadline, and is the controller alive?"""

from __future__ import annotations

import hmac
import os
import secrets
import threading
import time
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from platoon.channel.door import knock
from platoon.channel.secret import PROOF_BYTES, Secret, find_secret, where_secrets_are
from platoon.channel.wire import MOST_REQUEST_BYTES, dumps, loads
from platoon.util import PlatoonError

_SLICE_MS = 500
_TRY_AGAIN_SECONDS = 0.05
_LAST_WORDS_MS = 500  # what a controller said before it ended may still be on its way to us
_GOODBYE_SECONDS = 5.0  # a controller that is busy for longer will see the process end


class Requests:
    """Asks a controller. Any thread may ask, one at a time.

    Args:
        context: the worker's ZeroMQ context.
        port: the controller's port on this host.
        timeout_seconds: how long an answer may take, and the controller to be there.

    Raises:
        PlatoonError: no controller came in time, or what has the port does not know the job's secret.

    Attributes:
        secret: the job's secret.
        socket: the ZeroMQ socket.
    """

    def __init__(self, context: zmq.Context, port: int, timeout_seconds: float) -> None:
        self._lock = threading.Lock()
        self._nonce = secrets.token_bytes(16)
        self._number = 0
        self._port = port
        self._timeout_seconds = timeout_seconds
        self._controller = -1
        self._pid: int | None = None
        until = time.monotonic() + timeout_seconds
        while True:
            secret = find_secret(port)
            socket = None if secret is None else self._connect(context, secret, until)
            if secret is not None and socket is not None:
                self.secret, self.socket = secret, socket
                return
            if time.monotonic() >= until:
                raise PlatoonError(
                    f"waited {timeout_seconds:g} s for a controller: is one running on port {port}, and is it "
                    f"yours? Its secret would be in {where_secrets_are(port)}"
                )
            time.sleep(_TRY_AGAIN_SECONDS)

    def _connect(self, context: zmq.Context, secret: Secret, until: float) -> zmq.Socket | None:
        """Returns a socket that the controller has let in, or None if nobody listens (yet)."""
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        monitor = socket.get_monitor_socket(_WATCHED_EVENTS)
        event = None
        try:
            knock(socket, secret, "control", self._port)
            if monitor.poll(1000 * max(0.0, until - time.monotonic())):
                event = recv_monitor_message(monitor)["event"]
        finally:
            socket.disable_monitor()
            monitor.close(linger=0)
            if event != zmq.EVENT_HANDSHAKE_SUCCEEDED:
                socket.close()
        if event in (zmq.EVENT_HANDSHAKE_FAILED_AUTH, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL):
            raise PlatoonError(
                f"what listens on port {self._port} does not accept this job's secret: it is another program, or "
                f"another job's controller. The secret is from {where_secrets_are(self._port)}"
            )
        return socket if event == zmq.EVENT_HANDSHAKE_SUCCEEDED else None

    def say_hello(self, rank: int | None) -> dict[str, Any]:
        """Enters the job; returns what the controller says about it and this worker's place in it.

        Args:
            rank: the rank that this worker was started with, or None.
        """
        info = dict(self.ask("platoon-hello", {"local_rank": rank}))
        self.watch(info["controller"])
        return info

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
        if len(query) > MOST_REQUEST_BYTES:
            raise PlatoonError(
                f"a request of {len(query)} bytes is too long, at most {MOST_REQUEST_BYTES} are taken; large "
                "arrays go through init_shared_params() or shared()"
            )
        with self._lock:
            self._number += 1
            number = self._nonce + b"%d" % self._number
            self.socket.send_multipart([number, query])
            seconds = self._timeout_seconds if timeout_seconds is None else timeout_seconds
            until = time.monotonic() + seconds
            while True:
                self.wait(self.socket, until, f"an answer to the request {req!r:.100}")
                received, *parts = self.socket.recv_multipart()
                if received == number:  # else it is the late answer to a request that was given up
                    break
        proven = parts[0] if len(parts) == 1 else b""
        proof, message = proven[:PROOF_BYTES], proven[PROOF_BYTES:]
        if not hmac.compare_digest(proof, self.secret.proof(number)):
            raise PlatoonError(
                f"what listens on port {self._port} is not this job's controller: it has no proof of the secret"
            )
        answer = loads(message)
        if not isinstance(answer, dict) or answer.keys() not in ({"ok"}, {"error"}):
            raise PlatoonError(f"the controller answered {answer!r:.200}, which is not an answer")
        if "error" in answer:
            raise PlatoonError(str(answer["error"]))
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
        """Tells the controller that this worker is leaving; it is no error if the controller is gone."""
        if self._controller >= 0 and not zmq.zmq_poll([(self._controller, zmq.POLLIN)], 0):
            try:
                self.ask("platoon-bye", None, _GOODBYE_SECONDS)
            except PlatoonError:
                pass

    def close(self) -> None:
        """Closes the socket."""
        self.socket.close()
        if self._controller >= 0:
            os.close(self._controller)
            self._controller = -1


_WATCHED_EVENTS = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_CLOSED
    | zmq.EVENT_DISCONNECTED
)
