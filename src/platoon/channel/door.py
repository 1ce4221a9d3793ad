"""Who may talk to a port: only somebody with the password gets as far as a message.

ZeroMQ asks for the password (its PLAIN mechanism) before it reads anything else of a connection, and asks us
whether it is right over its authentication protocol, ZAP (https://rfc.zeromq.org/spec/27/). Nothing is
encrypted: the ports are on the loopback device, and encryption (CURVE) takes two thirds of the minibatches'
speed; see the decision on it.
"""

from __future__ import annotations

import hmac
import secrets
import threading
from collections.abc import Callable

import zmq

from platoon.channel.secret import Secret
from platoon.util import PlatoonError

_ZAP_ADDRESS = "inproc://zeromq.zap.01"
_USER = b"platoon"
_HANDSHAKE_MS = 5000


class Door:
    """A port of the loopback device that is open to those only who know the job's secret. It has one thread.

    (Workers run on their controller's host, so nobody else has to come in.)

    Args:
        secret: the job's secret.
        channel: what the port is for, ``"control"`` or ``"data"``.
        port: its number, 0 for a free one.
        most_bytes: the longest part of a message; whoever sends a longer one is disconnected.
        on_refused: called, in any thread, with the address of each who did not know the password, and why it
            was refused.
        options: of ZeroMQ for the socket.

    Raises:
        PlatoonError: the port is taken or not allowed.

    Attributes:
        port: the port.
        socket: the ROUTER that listens there.
    """

    def __init__(
        self,
        secret: Secret,
        channel: str,
        port: int,
        most_bytes: int,
        on_refused: Callable[[str, str], None],
        options: dict[int, int],
    ) -> None:
        self._why = f"did not know the job's secret ({channel} port)"
        self._on_refused = on_refused
        self._context = zmq.Context()
        # A free port is known, and so its password, before anybody else knows that it is ours.
        self._password = secret.password(channel, port) if port else secrets.token_bytes(32)
        asked = self._context.socket(zmq.REP)
        asked.linger = 0
        asked.bind(_ZAP_ADDRESS)
        self.socket = self._context.socket(zmq.ROUTER)
        # who speaks no PLAIN at all is sent away by ZeroMQ, and only its monitor tells
        seen = self.socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        )
        self._thread = threading.Thread(
            target=self._answer, args=(asked, seen), name="platoon-door", daemon=True
        )
        self._thread.start()
        self.socket.plain_server = 1
        self.socket.zap_domain = b"platoon"
        self.socket.setsockopt(zmq.MAXMSGSIZE, most_bytes)
        self.socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
        for option, value in options.items():
            self.socket.setsockopt(option, value)
        try:
            self.port = _bind(self.socket, port)
        except BaseException:
            self.close()
            raise
        self._password = secret.password(channel, self.port)

    def close(self) -> None:
        """Closes the port and ends the thread; what is on its way has the socket's linger to arrive."""
        self.socket.disable_monitor()
        self.socket.close()
        self._context.term()
        self._thread.join()

    def _answer(self, asked: zmq.Socket, seen: zmq.Socket) -> None:
        with asked, seen:
            try:
                poller = zmq.Poller()
                poller.register(asked, zmq.POLLIN)
                poller.register(seen, zmq.POLLIN)
                while True:
                    ready = dict(poller.poll())
                    if seen in ready:
                        event, _ = seen.recv_multipart()
                        if int.from_bytes(event[:2], "little") == zmq.EVENT_MONITOR_STOPPED:
                            poller.unregister(seen)
                        else:
                            self._on_refused("a connection", self._why)
                    if asked not in ready:
                        continue
                    version, number, _, address, _, mechanism, *credentials = asked.recv_multipart()
                    given = b"\0".join(credentials)
                    right = mechanism == b"PLAIN" and hmac.compare_digest(
                        given, _USER + b"\0" + self._password
                    )
                    answer = (b"200", b"OK") if right else (b"400", b"wrong password")
                    asked.send_multipart([version, number, *answer, b"", b""])
                    if not right:
                        self._on_refused(address.decode(errors="replace"), self._why)
            except zmq.ContextTerminated:
                pass


def knock(socket: zmq.Socket, secret: Secret, channel: str, port: int) -> None:
    """Connects a socket to a port of this host's, behind a door."""
    socket.plain_username = _USER
    socket.plain_password = secret.password(channel, port)
    socket.connect(f"tcp://127.0.0.1:{port}")


def _bind(socket: zmq.Socket, port: int) -> int:
    try:
        if port == 0:
            return int(socket.bind_to_random_port("tcp://127.0.0.1"))
        socket.bind(f"tcp://127.0.0.1:{port}")
    except zmq.ZMQError as error:
        raise PlatoonError(
            f"cannot listen on port {port} ({error.strerror}); another controller may be using it: "
            "give this one --control-port or --data-port"
        ) from error
    return port
