"""Connections between the nodes of a job: who is let in, and what both say first.

Every connection begins alike, inside TLS where that is used::

    who connects                                      who listens
    "MVHS", version, role, host, hosts,
    incarnation, generation, job, nonce     ------->  refuses a wrong version, role or job in words
                                            <-------  "welcome", the same of itself, and the proof of the secret
    the proof of the secret                 ------->
                                            <-------  "welcome", or why not

A proof is an HMAC of the secret over both first messages: it is worth nothing on another connection. Nobody says
anything about tables before both have been checked.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import socket
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from multiverso.deadline import Deadline
from multiverso.hosts.transport.channel import Channel, Plain, RefusedError, receive_some
from multiverso.hosts.transport.credentials import Credentials
from multiverso.hosts.transport.tls import context_of, encrypt

VERSION = 6  # of all that nodes say to each other; the handshake refuses any other
ROLES = dict(enumerate(("values", "control", "messages", "rounds", "publications", "rows"), 1))
VALUES, CONTROL, MESSAGES, ROUNDS, PUBLICATIONS, ROWS = ROLES
_MAGIC = b"MVHS"
_NONCE = _PROOF = 32
_HELLO = struct.Struct(f"!4sHHIIQQ16s{_NONCE}s")
_ANSWER = struct.Struct("!HH")  # code, bytes of text
_LONGEST_TEXT = 1000
_TLS_RECORD = 0x16
# A silent peer: data that it does not acknowledge for so long ends the connection, as do that many seconds of
# unanswered probes where nothing is under way. The link then continues over the next connection.
_SILENT_SECONDS = 5
_DAY_SECONDS = 86_400.0
HANDSHAKE_SECONDS = 10.0


@dataclass(frozen=True)
class Hello:
    """A node's introduction.

    Attributes:
        host: its number.
        hosts: how many there are.
        incarnation: a random number that it has made when it began.
        generation: how many connections of this role it has made to the same peer, from 1; a newer one replaces it.
        role: one of ROLES.
    """

    host: int
    hosts: int
    incarnation: int
    generation: int = 1
    role: int = VALUES

    def pack(self, credentials: Credentials) -> bytes:
        """Returns it as it travels, another time with another nonce."""
        me = self.role, self.host, self.hosts, self.incarnation, self.generation
        return _HELLO.pack(_MAGIC, VERSION, *me, job_of(credentials), os.urandom(_NONCE))


def job_of(credentials: Credentials) -> bytes:
    """Returns a number for a job that tells nothing of its secret."""
    return hashlib.sha256(b"multiverso job\0" + credentials.secret).digest()[:16]


Begun = Callable[[socket.socket], object]
"""Is given a socket before it connects, for another thread to shut it down, which ends the wait."""


def connect(
    address: tuple[str, int], credentials: Credentials, me: Hello, deadline: Deadline, begun: Begun = lambda way: None
) -> tuple[Channel, Hello]:
    """Connects to a peer's listener; returns the channel, and what the peer says of itself.

    Raises:
        RefusedError: it is of another version or another job, or does not take this host.
        OSError: it is not there, or does not answer in time.
    """
    with _first_exchange(_connected(address, deadline, begun), credentials, False, deadline) as pipe:
        hello = me.pack(credentials)
        pipe.send(hello)
        pipe.refused_unless(pipe.receive(_ANSWER.size))
        theirs_raw = pipe.receive(_HELLO.size)
        theirs = _checked(theirs_raw, credentials, me.role)
        if not hmac.compare_digest(pipe.receive(_PROOF), _proof(credentials, b"listens", hello, theirs_raw)):
            raise RefusedError(f"{address[0]}:{address[1]} does not know this job's secret")
        pipe.send(_proof(credentials, b"connects", hello, theirs_raw))
        pipe.refused_unless(pipe.receive(_ANSWER.size))
    return pipe.channel, theirs


def _connected(address: tuple[str, int], deadline: Deadline, begun: Begun) -> socket.socket:
    """As `socket.create_connection`, with the socket shown before it waits."""
    failed: OSError | None = None
    for family, kind, protocol, _, place in socket.getaddrinfo(*address, type=socket.SOCK_STREAM):
        with contextlib.ExitStack() as undo:
            way = undo.enter_context(socket.socket(family, kind, protocol))
            way.settimeout(_socket_seconds(deadline))
            begun(way)
            try:
                way.connect(place)
            except OSError as error:
                failed = error
                continue
            undo.pop_all()
            return way
    raise failed or OSError(f"{address[0]} has no address")


def accept(connection: socket.socket, credentials: Credentials, me: Hello, deadline: Deadline) -> tuple[Channel, Hello]:
    """Lets a new connection in, or refuses it in words; returns the channel, and what the peer says of itself.

    The connection is closed when this raises.

    Raises:
        RefusedError: it is of another version or another job.
        OSError: it ended, or did not answer in time.
    """
    with _first_exchange(connection, credentials, True, deadline) as pipe:
        hello = pipe.receive(_HELLO.size)
        try:
            theirs = _checked(hello, credentials, None)
        except RefusedError as error:
            pipe.refuse(str(error))
            raise
        mine = replace(me, generation=theirs.generation, role=theirs.role).pack(credentials)
        pipe.send(_ANSWER.pack(0, 0) + mine + _proof(credentials, b"listens", hello, mine))
        if not hmac.compare_digest(pipe.receive(_PROOF), _proof(credentials, b"connects", hello, mine)):
            pipe.refuse("this host does not know the job's secret")
            raise RefusedError("a host that connected does not know the job's secret")
        pipe.send(_ANSWER.pack(0, 0))
    return pipe.channel, theirs


def _socket_seconds(deadline: Deadline) -> float:
    """Returns the seconds left, as a socket takes them: not 0, which is "do not wait", and not infinity."""
    return max(1e-3, deadline.left(_DAY_SECONDS))


@contextlib.contextmanager
def _first_exchange(
    connection: socket.socket, credentials: Credentials, server: bool, deadline: Deadline
) -> Iterator[_Pipe]:
    """Gives a connection for its first exchange; it is closed where that raises."""
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _SILENT_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * _SILENT_SECONDS)
        yield _Pipe(connection, credentials, server, deadline)
        connection.settimeout(None)
    except BaseException:
        connection.close()
        raise


def _proof(credentials: Credentials, role: bytes, first: bytes, second: bytes) -> bytes:
    return hmac.new(credentials.secret, role + b"\0" + first + second, "sha256").digest()


def _checked(raw: bytes, credentials: Credentials, role: int | None) -> Hello:
    magic, version, its_role, host, hosts, incarnation, generation, job, _ = _HELLO.unpack(raw)
    if magic != _MAGIC:
        raise RefusedError("the other end of the connection is not a node of multiverso")
    if version != VERSION:
        raise RefusedError(
            f"the other node speaks version {version} of the protocol between hosts, this one {VERSION}: "
            "install the same multiverso on all hosts"
        )
    if job != job_of(credentials):
        raise RefusedError("the other node belongs to another job: it has another secret")
    if its_role not in ROLES or (role is not None and its_role != role):
        raise RefusedError(f"a connection has no role {its_role}")
    if not host < hosts:
        raise RefusedError(f"there is no host {host} of {hosts}")
    return Hello(host, hosts, incarnation, generation, its_role)


class _Pipe:
    """A connection in its first exchange: whole messages, each in time."""

    def __init__(self, connection: socket.socket, credentials: Credentials, server: bool, deadline: Deadline) -> None:
        self._socket, self._deadline = connection, deadline
        self.channel: Channel = Plain(connection)
        self._encrypted = credentials.encrypted
        if server:
            first = _peek(connection, deadline)
            if self._encrypted and first == _MAGIC[0]:
                self.refuse("this job is encrypted, and the other node was started with --insecure-fabric")
                raise RefusedError("a node that was started with --insecure-fabric connected to this encrypted job")
            if not self._encrypted and first == _TLS_RECORD:
                self.refuse("this job was started with --insecure-fabric")
                raise RefusedError("an encrypted node connected to this job, which has --insecure-fabric")
        if self._encrypted:
            context = context_of(credentials.certificate, credentials.key, server)
            self.channel = encrypt(connection, context, server, deadline)

    def send(self, data: bytes) -> None:
        self._socket.settimeout(_socket_seconds(self._deadline))
        self.channel.send(data)

    def receive(self, count: int) -> bytes:
        data = bytearray(count)
        view = memoryview(data)
        while view:
            self._socket.settimeout(_socket_seconds(self._deadline))
            got = self.channel.recv_into(view)
            if not got:
                raise ConnectionError("the other host ended the connection before both knew each other")
            view = view[got:]
        return bytes(data)

    def refused_unless(self, head: bytes) -> None:
        """Raises what an answer says, unless that is "welcome"."""
        code, length = _ANSWER.unpack(head)
        if code == 1 and length <= _LONGEST_TEXT:
            raise RefusedError(f"refused by the other host: {self.receive(length).decode(errors='replace')}")
        if code != 0 or length:
            raise RefusedError("the other end of the connection is not a node of multiverso")

    def refuse(self, why: str) -> None:
        text = why.encode()[:_LONGEST_TEXT]
        with contextlib.suppress(OSError):
            self.send(_ANSWER.pack(1, len(text)) + text)
            self._socket.shutdown(socket.SHUT_WR)
            while receive_some(self._socket, 65536, Deadline.after(1)):
                pass  # a reset would take the text away


def _peek(connection: socket.socket, deadline: Deadline) -> int:
    connection.settimeout(_socket_seconds(deadline))
    first = connection.recv(1, socket.MSG_PEEK)
    if not first:
        raise ConnectionError("the other host ended the connection before it said anything")
    return first[0]
