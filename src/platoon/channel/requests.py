"""A worker's end of the control channel: a request, an answer, a deadline, and is the controller alive?"""

from __future__ import annotations

import os
import threading
import time
from socket import socket as Socket
from typing import Any

from multiverso.errors import MultiversoError, NodeLostError
from multiverso.runtime.session.node_link import NodeLink
from multiverso.wire import messages, trust
from platoon.channel.wire import MOST_REQUEST_BYTES, dumps, loads, socket_name
from platoon.util import PlatoonError, readable

_TRY_AGAIN_SECONDS = 0.05
_GOODBYE_SECONDS = 5.0  # a controller that is busy for longer will see the process end


class Requests:
    """Asks a controller. Any thread may ask, one at a time.

    Args:
        port: the controller's port on this host.
        timeout_seconds: how long an answer may take, and the controller to be there.

    Raises:
        PlatoonError: no controller came in time, or another user's program has the port.
    """

    def __init__(self, port: int, timeout_seconds: float) -> None:
        self._lock = threading.Lock()
        self._port = port
        self._timeout_seconds = timeout_seconds
        self._controller = -1
        self._pid: int | None = None
        until = time.monotonic() + timeout_seconds
        while (link := self.connect("control", port, until)) is None:
            if time.monotonic() >= until:
                raise PlatoonError(
                    f"waited {timeout_seconds:g} s for a controller: is one running on port {port} of this host, and "
                    "is it yours?"
                )
            time.sleep(_TRY_AGAIN_SECONDS)
        self._link = link

    def connect(self, channel: str, port: int, until: float) -> NodeLink | None:
        """Returns a connection to a controller's port, or None if nothing listens there (yet).

        Raises:
            PlatoonError: another user's program does, or one that did not answer in time.
        """
        name = socket_name(channel, port)
        try:
            link = NodeLink(messages.connect(name, until - time.monotonic()))
        except OSError:
            return None
        try:
            trust.check_user(link.connection, name)
            if trust.proof_needed():
                secret = os.environ.get(trust.SECRET_VARIABLE) or trust.user_secret()
                link.prove(name, until, secret, lambda: self.look(until, "the controller's proof of the job's secret"))
        except BaseException as error:
            link.close()
            if isinstance(error, MultiversoError):
                raise PlatoonError(f"what listens on port {port} is no controller of this user", error) from error
            raise
        return link

    @property
    def socket(self) -> Socket:
        """The connection's socket."""
        return self._link.connection

    def say_hello(self, rank: int | None) -> dict[str, Any]:
        """Enters the job; returns what the controller says about it and this worker's place in it.

        Args:
            rank: the rank that this worker was started with, or None.
        """
        info = dict(self.ask("platoon-hello", {"local_rank": rank}))
        self._pid = int(info["controller"])
        try:
            self._controller = os.pidfd_open(self._pid)
        except OSError as error:
            raise PlatoonError(
                f"the controller (process {self._pid}) is not on this host, or has just ended"
            ) from error
        return info

    def ask(self, req: object, info: object, timeout_seconds: float | None = None) -> Any:
        """Sends a request and returns its answer.

        Args:
            req: what is asked.
            info: what goes with it.
            timeout_seconds: how long the answer may take, instead of what was set for all.

        Raises:
            PlatoonError: no answer came in time, the controller is gone, or it answered with an error.
        """
        query = dumps({"req": req, "req_info": info})
        if len(query) > MOST_REQUEST_BYTES:
            raise PlatoonError(
                f"a request of {len(query)} bytes is too long, at most {MOST_REQUEST_BYTES} are taken; large "
                "arrays go through init_shared_params() or shared()"
            )
        expected = f"an answer to the request {req!r:.100}"
        with self._lock:
            until = time.monotonic() + (self._timeout_seconds if timeout_seconds is None else timeout_seconds)
            try:
                answer, _ = self._link.ask(
                    {"do": "ask", "query": query}, until, expected, lambda: self.look(until, expected)
                )
            except NodeLostError as error:
                raise self._gone(expected) from error
        if "failed" in answer:
            raise PlatoonError(str(answer["failed"]))
        return loads(answer["answer"])

    def look(self, until: float, expected: str) -> None:
        """Raises PlatoonError if the controller has ended, or the deadline is over."""
        if self.has_ended:
            raise self._gone(expected)
        if time.monotonic() >= until:
            raise PlatoonError(
                f"waited {self._timeout_seconds:g} s for {expected}; is a controller running on port {self._port}?"
            )

    def wait(self, source: Socket | None, until: float, expected: str) -> None:
        """Waits until a socket has something to read; without one, for a moment.

        Raises:
            PlatoonError: the deadline passed, or the controller ended and left nothing to read.
        """
        watched = [each for each in (self._controller, source) if each not in (-1, None)]
        if source not in readable(watched, until - time.monotonic() if source else _TRY_AGAIN_SECONDS):
            self.look(until, expected)

    @property
    def has_ended(self) -> bool:
        """Whether the controller's process has ended."""
        return self._controller >= 0 and bool(readable([self._controller], 0))

    def _gone(self, expected: str) -> PlatoonError:
        process = "" if self._pid is None else f" (process {self._pid})"
        return PlatoonError(f"the controller{process} is gone; this worker waited for {expected}")

    def say_goodbye(self) -> None:
        """Tells the controller that this worker is leaving; it is no error if the controller is gone."""
        if self._controller >= 0 and not self.has_ended:
            try:
                self.ask("platoon-bye", None, _GOODBYE_SECONDS)
            except PlatoonError:
                pass

    def close(self) -> None:
        """Closes the connection."""
        self._link.close()
        if self._controller >= 0:
            os.close(self._controller)
            self._controller = -1
