"""A publication for other hosts: each host that follows it has a connection of its own, and gets what has changed."""

from __future__ import annotations

import os
import socket
import threading

from multiverso.deadline import Deadline
from multiverso.errors import MultiversoError, WaitTimeoutError
from multiverso.hosts.transport.channel import Channel
from multiverso.hosts.transport.credentials import Credentials
from multiverso.hosts.transport.handshake import HANDSHAKE_SECONDS, PUBLICATIONS, Hello, connect
from multiverso.hosts.transport.listener import Listener
from multiverso.publications.differences import CHUNK_BYTES, difference
from multiverso.publications.snapshot import Snapshot
from multiverso.publications.subscription import Subscription
from multiverso.publications.traffic import Alive, Begin, Follow, Part, Version, Whole, receive, send

_ALIVE_SECONDS = 1.0


class Forwarder:
    """Reads a publication for hosts that follow it, at the pace of each one's link.

    It keeps, for each, the version that was sent last: the next one is sent as what differs from it.

    Args:
        name, job: of the publication.
        port: where followers connect, as of ``open_port``; closed by `close`.
        credentials: of the token.

    Attributes:
        credentials: as given.
        sent_bytes: of tensors, to all.

    Owner: its publication. Each connection has a thread.
    """

    def __init__(self, name: str, job: str, port: socket.socket, credentials: Credentials) -> None:
        self._name, self._job = name, job
        self.credentials = credentials
        self._closing = threading.Event()
        self._channels: set[Channel] = set()
        me = Hello(0, 2, int.from_bytes(os.urandom(8)), role=PUBLICATIONS)
        self._listener = Listener(port, credentials, me, self._serve, "multiverso-forward")
        self.sent_bytes = 0

    @property
    def address(self) -> tuple[str, int]:
        """Where followers connect."""
        return self._listener.address

    def close(self) -> None:
        """Ends all connections. May be called again."""
        self._closing.set()
        self._listener.shut()
        for channel in list(self._channels):
            channel.shutdown()
        self._listener.join()

    def _serve(self, channel: Channel, follower: Hello) -> None:
        self._channels.add(channel)
        try:
            message, _ = receive(channel)
            if isinstance(message, Follow) and follower.role == PUBLICATIONS and not self._closing.is_set():
                with Subscription(self._name, self._job, _ALIVE_SECONDS, message.seen) as subscription:
                    self._send_versions(channel, subscription)
        except (OSError, ValueError, MultiversoError):
            pass  # it connects again, and gets the newest whole
        finally:
            self._channels.discard(channel)
            channel.close()

    def _send_versions(self, channel: Channel, subscription: Subscription) -> None:
        last: Snapshot | None = None
        while not self._closing.is_set():
            try:
                snapshot = subscription.wait(last.version if last is not None else 0)
            except WaitTimeoutError:
                send(channel, Alive())
                continue
            if last is None or last.layout != snapshot.layout:
                if last is not None:
                    return  # another publisher with another model: the follower begins again
                send(channel, Begin(snapshot.layout))
            self._send(channel, last, snapshot)
            last = snapshot

    def _send(self, channel: Channel, last: Snapshot | None, snapshot: Snapshot) -> None:
        checksums = [int(number) for number in snapshot.sums]
        base = last.version if last is not None else 0
        send(channel, Version(snapshot.version, base, snapshot.note, checksums))
        for number, tensor in enumerate(snapshot.layout.tensors):
            for first in range(0, tensor.nbytes, CHUNK_BYTES):
                end = min(first + CHUNK_BYTES, tensor.nbytes)
                new = snapshot.bytes_of(tensor)[first:end]
                body = None if last is None else difference(last.bytes_of(tensor)[first:end], new, tensor.itemsize)
                if body is None:
                    send(channel, Part(number, first, end - first, False), new.data)
                elif body:
                    send(channel, Part(number, first, end - first, True), body)
                self.sent_bytes += new.size if body is None else len(body)
        send(channel, Whole())


def answers(address: tuple[str, int], credentials: Credentials) -> bool:
    """Returns whether somebody forwards a publication at an address."""
    me = Hello(1, 2, int.from_bytes(os.urandom(8)), role=PUBLICATIONS)
    try:
        channel, _ = connect(address, credentials, me, Deadline.after(HANDSHAKE_SECONDS))
    except (OSError, MultiversoError):
        return False
    channel.close()
    return True
