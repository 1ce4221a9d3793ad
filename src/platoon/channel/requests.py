"""A worker's end of the control channel: a request, an answer, a deadline, and is the controller there?"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from functools import partial
from socket import socket as Socket
from typing import Any

from multiverso.errors import MultiversoError, NodeLostError
from multiverso.runtime.session.node_link import NodeLink
from multiverso.wire import messages, trust
from platoon.channel.wire import MOST_REQUEST_BYTES, dumps, loads, socket_name
from platoon.util import PlatoonError

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
                link.prove(name, until, secret, partial(self._in_time, until, "the controller's proof of the secret"))
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
                in_time = partial(self._in_time, until, expected)
                answer, _ = self._link.ask({"do": "ask", "query": query}, until, expected, in_time)
            except NodeLostError as error:
                raise self._gone(expected) from error
        if "failed" in answer:
            raise PlatoonError(str(answer["failed"]))
        return loads(answer["answer"])

    def wait(self, source: Socket | None, until: float, expected: str) -> None:
        """Waits until a socket has something to read; without one, for a moment.

        Raises:
            PlatoonError: the deadline passed, or the controller ended and left nothing to read.
        """
        poll = select.poll()
        poll.register(self.socket, 0)  # for its end, and not for answers
        if source is not None:
            poll.register(source, select.POLLIN)
        seconds = until - time.monotonic() if source else _TRY_AGAIN_SECONDS
        ready = [descriptor for descriptor, _ in poll.poll(1000 * max(0.0, seconds))]
        if source is None or source.fileno() not in ready:
            if self.socket.fileno() in ready:
                raise self._gone(expected)
            self._in_time(until, expected)

    def _in_time(self, until: float, expected: str) -> None:
        if time.monotonic() >= until:
            raise PlatoonError(
                f"waited {self._timeout_seconds:g} s for {expected}; is a controller running on port {self._port}?"
            )

    def _gone(self, expected: str) -> PlatoonError:
        process, _ = messages.peer(self.socket)
        return PlatoonError(f"the controller (process {process}) is gone; this worker waited for {expected}")

    def say_goodbye(self) -> None:
        """Tells the controller that this worker is leaving; it is no error if the controller is gone."""
        with contextlib.suppress(PlatoonError):
            self.ask("platoon-bye", None, _GOODBYE_SECONDS)

    def close(self) -> None:
        """Closes the connection."""
        self._link.close()
