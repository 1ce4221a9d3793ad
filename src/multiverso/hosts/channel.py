"""A connection that carries bytes both ways, plain or encrypted: one thread sends, another receives.

TLS goes through pyOpenSSL over memory BIOs: the socket is ours, and what is read from it is handed to the library in
large pieces. One ``SSLSocket`` read of the standard library gives 16 KiB at most, and two threads on one deadlock or
crash in some versions of CPython. OpenSSL's object is guarded by a lock here that no thread holds while it is in the
network.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import socket
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

from multiverso.deadline import Deadline
from multiverso.errors import StartupError
from multiverso.hosts.distance import FAR

_PIECE = 256 * 1024  # measured: of a plain stream 28 % with 64 KiB, 32 % with 256
_MANY = 64
_MIN_RTT_AT = 148  # of Linux's struct tcp_info: tcpi_min_rtt, in microseconds
_TLS_RECORDS = (0x15, 0x16)  # alert, handshake
_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


class RefusedError(StartupError, ConnectionError):
    """The other node refuses this one, or is not one of ours. Trying again does not help."""


class Channel(Protocol):
    """What the fabric and the control plane need of a connection. All of it raises OSError when that has ended."""

    def send(self, *parts: bytes | bytearray | memoryview) -> None:
        """Sends all of the parts, one after another; one thread at a time."""

    def send_now(self, *parts: bytes | bytearray | memoryview) -> bool:
        """Sends without waiting for the other side; False if some of it is left for :meth:`flush`, or the next send."""

    def flush(self) -> None:
        """Sends what is left."""

    def recv_into(self, view: memoryview) -> int:
        """Waits for bytes, of some channels until the view is full; returns how many came, 0 at the end. One thread."""

    def round_trip(self) -> float:
        """Returns the shortest time in seconds that the way there and back has taken."""

    def shutdown(self) -> None:
        """Ends it for both sides: whoever waits in here goes on. Any thread may call it, more than once."""

    def close(self) -> None:
        """Frees the socket, once no thread is in here."""


class Plain:
    """Bytes as they are."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        _sockets.add(connection)
        self._rest = b""

    def send(self, *parts: bytes | bytearray | memoryview) -> None:
        self.flush()
        send_all(self._socket, parts)

    def send_now(self, *parts: bytes | bytearray | memoryview) -> bool:
        self._rest = _send_some(self._socket, b"".join((self._rest, *parts)))
        return not self._rest

    def flush(self) -> None:
        if self._rest:
            rest, self._rest = self._rest, b""
            self._socket.sendall(rest)

    def recv_into(self, view: memoryview) -> int:
        # a large frame comes in dozens of pieces: the system puts them together without waking this thread for each
        return self._socket.recv_into(view, 0, socket.MSG_WAITALL)

    def round_trip(self) -> float:
        return _round_trip(self._socket)

    def shutdown(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()


def send_all(connection: socket.socket, parts: Sequence[bytes | bytearray | memoryview]) -> None:
    """Sends every byte of all parts with as few calls as it takes."""
    left = [memoryview(part) for part in parts if len(part)]
    while left:
        sent = connection.sendmsg(left[:_MANY])
        while left and sent >= len(left[0]):
            sent -= len(left.pop(0))
        if sent:
            left[0] = left[0][sent:]


def _round_trip(connection: socket.socket) -> float:
    """Asks the system, which sees each acknowledgement."""
    try:
        told = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _MIN_RTT_AT + 4)
    except OSError:
        return FAR
    if len(told) < _MIN_RTT_AT + 4:  # Linux before 4.6
        return FAR
    return int.from_bytes(told[_MIN_RTT_AT:], sys.byteorder) * 1e-6


def _send_some(connection: socket.socket, data: bytes) -> bytes:
    """Sends what the system takes at once; returns the rest."""
    try:
        return data[connection.send(data, socket.MSG_DONTWAIT) :]
    except BlockingIOError:
        return data


class Encrypted:
    """TLS 1.3, by an ``OpenSSL.SSL.Connection`` over memory BIOs that has done its handshake."""

    def __init__(self, connection: socket.socket, tls: Any, rest: bytes = b"") -> None:
        from OpenSSL import SSL

        self._socket, self._tls, self._ssl = connection, tls, SSL
        _sockets.add(connection)
        self._lock = threading.Lock()
        self._cipher = memoryview(bytearray(_PIECE))
        self._rest = b""
        if rest:
            tls.bio_write(rest)

    def send_now(self, *parts: bytes | bytearray | memoryview) -> bool:
        out = [self._rest]
        with self._lock:
            self._encrypt(memoryview(b"".join(parts)), out)
        self._rest = _send_some(self._socket, b"".join(out))
        return not self._rest

    def flush(self) -> None:
        if self._rest:
            rest, self._rest = self._rest, b""
            self._socket.sendall(rest)

    def send(self, *parts: bytes | bytearray | memoryview) -> None:
        self.flush()
        small = b"".join(bytes(part) for part in parts if len(part) <= 256)  # a header goes with its body
        large = [memoryview(part) for part in parts if len(part) > 256]
        pieces: list[memoryview] = [memoryview(small)]
        pieces += [part[i : i + _PIECE] for part in large for i in range(0, len(part), _PIECE)]
        waiting: list[bytes] = []
        for piece in pieces:
            if len(piece):
                with self._lock:
                    self._encrypt(piece, waiting)
            if sum(map(len, waiting)) >= _PIECE:
                send_all(self._socket, waiting)
                waiting.clear()
        send_all(self._socket, waiting)

    def _encrypt(self, view: memoryview, out: list[bytes]) -> None:
        try:
            while view:
                view = view[self._tls.send(view) :]
        except self._ssl.Error as error:
            raise ConnectionError(f"TLS: {error}") from error
        with contextlib.suppress(self._ssl.WantReadError):
            while True:
                out.append(self._tls.bio_read(2 * _PIECE))

    def recv_into(self, view: memoryview) -> int:
        while True:
            got = self._decrypted(view)
            if got >= 0:
                return got
            count = self._socket.recv_into(self._cipher)
            if not count:
                return 0
            with self._lock:
                self._tls.bio_write(self._cipher[:count])

    def _decrypted(self, view: memoryview) -> int:
        """Returns how many bytes are there, 0 at the end, -1 if more have to come first."""
        got = 0
        with self._lock:
            try:
                while got < len(view):
                    got += self._tls.recv_into(view[got:])
            except self._ssl.WantReadError:
                return got or -1
            except self._ssl.ZeroReturnError:
                return got
            except self._ssl.Error as error:
                raise ConnectionError(f"TLS: {error}") from error
        return got

    def round_trip(self) -> float:
        return _round_trip(self._socket)

    def shutdown(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()


def context_of(certificate: bytes, key: bytes, server: bool) -> Any:
    """Returns what TLS connections of a job are made from: version 1.3, and one certificate, shown and taken."""
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import load_pem_private_key
    from OpenSSL import SSL, crypto

    context = SSL.Context(SSL.TLS_SERVER_METHOD if server else SSL.TLS_CLIENT_METHOD)
    context.set_min_proto_version(SSL.TLS1_3_VERSION)
    ours = x509.load_pem_x509_certificate(certificate)
    private: Any = load_pem_private_key(key, None)
    context.use_certificate(ours)
    context.use_privatekey(private)
    store = context.get_cert_store()
    assert store is not None
    store.add_cert(crypto.X509.from_cryptography(ours))

    def pinned(connection: Any, shown: Any, number: int, depth: int, fine: int) -> bool:
        return bool(fine) and shown.to_cryptography() == ours

    context.set_verify(SSL.VERIFY_PEER | SSL.VERIFY_FAIL_IF_NO_PEER_CERT, pinned)
    context.set_session_cache_mode(SSL.SESS_CACHE_OFF)
    return context


def encrypt(connection: socket.socket, context: Any, server: bool, deadline: Deadline) -> Encrypted:
    """Does the handshake over a connected socket.

    Raises:
        RefusedError: the other side is not of this job.
        ConnectionError: it is gone.
        TimeoutError: it did not answer in time.
    """
    from OpenSSL import SSL

    tls = SSL.Connection(context, None)
    tls.set_accept_state() if server else tls.set_connect_state()
    first = True
    while True:
        try:
            tls.do_handshake()
            done = True
        except SSL.WantReadError:
            done = False
        except SSL.Error as error:
            _flush(connection, tls, deadline)  # the alert tells the other side what it is
            raise RefusedError(f"the other host is not of this job ({_words(error)})") from error
        _flush(connection, tls, deadline)
        if done:
            return Encrypted(connection, tls)
        received = receive_some(connection, _PIECE, deadline)
        if not received:
            raise ConnectionError("the other host ended the connection in the TLS handshake")
        if first and received[0] not in _TLS_RECORDS:
            raise RefusedError("the other host does not speak TLS: was it started with --insecure-fabric?")
        first = False
        tls.bio_write(received)


def _flush(connection: socket.socket, tls: Any, deadline: Deadline) -> None:
    from OpenSSL import SSL

    with contextlib.suppress(SSL.WantReadError):
        while True:
            piece = tls.bio_read(_PIECE)
            connection.settimeout(max(deadline.left(math.inf), 1e-3))
            connection.sendall(piece)


def _words(error: Any) -> str:
    reasons = ", ".join(str(part[-1]) for part in (error.args[0] if error.args else []) if part)
    return reasons or "TLS refused it"


def receive_some(connection: socket.socket, most: int, deadline: Deadline) -> bytes:
    """Returns what comes, at most so many bytes; nothing at the end.

    Raises:
        TimeoutError: nothing came in time.
    """
    left = deadline.left(math.inf)
    until = None if left == math.inf else time.monotonic() + left
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    while not poll.poll(500 if until is None else max(0.0, min(500.0, 1000 * (until - time.monotonic())))):
        if until is not None and time.monotonic() >= until:
            raise TimeoutError(f"the other host said nothing for {deadline}")
    return connection.recv(most)


def _after_fork_in_child() -> None:
    """A forked child that kept the sockets would let this host look connected after its end."""
    for connection in list(_sockets):
        connection.close()


os.register_at_fork(after_in_child=_after_fork_in_child)
