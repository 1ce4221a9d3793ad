"""A connection that is encrypted: TLS 1.3, by pyOpenSSL over memory BIOs, with one certificate for a job.

The socket is ours, and what is read from it is handed to the library in large pieces. One ``SSLSocket`` read of the
standard library gives 16 KiB at most, and two threads on one deadlock or crash in some versions of CPython. OpenSSL's
object is guarded by a lock here that no thread holds while it is in the network.

A record has 16 KiB at most, so a frame of a megabyte is 64 of them. Calls go to OpenSSL's own functions, in the memory
that the frame is in: pyOpenSSL's methods allocate, copy and check each time, which takes as long as the cipher itself.
What is sent is encrypted by a call for each piece. What arrives is read by OpenSSL where it was received: a memory BIO
that it is written to would first clear, then copy it.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import Any

from multiverso.deadline import Deadline
from multiverso.hosts.transport.channel import Channel, RefusedError, receive_some

_PIECE = 256 * 1024  # measured: of a plain stream 28 % with 64 KiB, 32 % with 256
_SMALL = 256  # bytes
_RECORD = 1 << 14
_LONGEST_RECORD = 5 + _RECORD + 256  # RFC 8446, section 5.2
_TLS_RECORDS = (0x15, 0x16)  # alert, handshake
# of one key, with AES-GCM: RFC 8446, section 5.5, says 2^24.5; the handshake of another connection makes new ones
_MOST_RECORDS = 1 << 24
_WANT_READ, _ENDED = 2, 6  # SSL_ERROR_WANT_READ, SSL_ERROR_ZERO_RETURN
_NAMES = (
    *("SSL_read", "SSL_write", "SSL_set_bio", "SSL_clear_mode", "SSL_MODE_ENABLE_PARTIAL_WRITE"),
    *("BIO_read", "BIO_new_mem_buf", "BIO_set_mem_eof_return"),
    *("SSL_get_error", "ERR_get_error", "ERR_reason_error_string"),
)


class Encrypted(Channel):
    """TLS 1.3, by an ``OpenSSL.SSL.Connection`` over memory BIOs that has done its handshake."""

    def __init__(self, connection: socket.socket, tls: Any) -> None:
        from OpenSSL import SSL, __version__

        super().__init__(connection)
        self._tls = tls  # keeps what is below
        try:
            self._ssl, self._out = tls._ssl, tls._from_ssl
            self._library, self._address_of, self._string = SSL._lib, SSL._ffi.from_buffer, SSL._ffi.string
            self._null = SSL._ffi.NULL
            for name in _NAMES:
                getattr(self._library, name)
        except AttributeError as error:
            raise RefusedError(
                f"connections between hosts use OpenSSL as pyOpenSSL keeps it, and version {__version__} keeps it "
                f'otherwise ({error}): pip install "pyopenssl<27" on every host, or start with --insecure-fabric on a '
                "network that you trust"
            ) from error
        # a call writes all of a piece, and not a record
        self._library.SSL_clear_mode(self._ssl, self._library.SSL_MODE_ENABLE_PARTIAL_WRITE)
        self._lock = threading.Lock()
        self._received = memoryview(bytearray(_PIECE))
        self._records = memoryview(bytearray(2 * _PIECE))
        self._unsent = self._records[:0]
        self._sent_records = 0
        self._drained = False  # all that was received is decrypted, and was asked for

    def _send_left(self, flags: int) -> None:
        """Encrypts and sends, a piece at a time: what is encrypted is still in the processor's cache."""
        while self._left or self._unsent:
            if not self._unsent:
                self._unsent = self._records[: self._encrypt_piece()]
            self._unsent = self._unsent[self._socket.send(self._unsent, flags) :]

    def _encrypt_piece(self) -> int:
        """Encrypts what is next, a header together with its body; returns the bytes of its records."""
        end = 0
        while self._left and end <= _SMALL:
            first = memoryview(self._left[0])
            end = self._encrypt(first[:_PIECE], end)
            self._left[0] = first[_PIECE:]
            if not self._left[0]:
                del self._left[0]
        return end

    def _encrypt(self, view: memoryview, end: int) -> int:
        """Encrypts at most a piece; returns where the records end that begin at ``end``."""
        plain, records = self._address_of(view), self._address_of(self._records)
        self._sent_records += -(-len(view) // _RECORD)
        if self._sent_records > _MOST_RECORDS:
            raise ConnectionError(f"{_MOST_RECORDS} records were encrypted with this connection's key")
        with self._lock:
            if (count := self._library.SSL_write(self._ssl, plain, len(view))) != len(view):
                raise self._error(self._library.SSL_get_error(self._ssl, count))
            while (count := self._library.BIO_read(self._out, records + end, len(self._records) - end)) > 0:
                end += count
        return end

    def recv_into(self, view: memoryview) -> int:
        got = 0
        while True:
            got, ended = self._decrypt(view, got)
            if ended or got == len(view):
                return got
            # while more than what is read at a time has to come: the system puts it together, as for plain connections
            whole = len(view) - got > _PIECE + _LONGEST_RECORD
            if not self._read(socket.MSG_WAITALL if whole else 0):
                return got

    def recv_now(self, view: memoryview) -> int:
        while True:
            got, ended = self._decrypt(view, 0)
            if got or ended or not self._read(socket.MSG_DONTWAIT):
                return got

    def await_some(self) -> None:
        if self._drained:
            super().await_some()

    @property
    def holds_some(self) -> bool:
        return not self._drained

    def _read(self, flags: int) -> bool:
        """Receives what OpenSSL decrypts next; returns whether anything came."""
        count = self._socket.recv_into(self._received, 0, flags)
        if not count:
            return False
        with self._lock:  # OpenSSL has taken in all that came before
            received = self._library.BIO_new_mem_buf(self._address_of(self._received), count)
            if received == self._null:
                raise MemoryError("OpenSSL has no memory for what was received")
            self._library.BIO_set_mem_eof_return(received, -1)  # after these bytes others will come
            self._library.SSL_set_bio(self._ssl, received, self._out)  # frees the last one; ``_out`` stays
        return True

    def _decrypt(self, view: memoryview, got: int) -> tuple[int, bool]:
        """Continues to fill the view; returns how many bytes are in it now, and whether the other side has ended."""
        plain = self._address_of(view)
        with self._lock:
            while got < len(view):
                count = self._library.SSL_read(self._ssl, plain + got, len(view) - got)
                if count <= 0:
                    why = self._library.SSL_get_error(self._ssl, count)
                    if why not in (_WANT_READ, _ENDED):
                        raise self._error(why)
                    self._drained = why == _WANT_READ
                    return got, why == _ENDED
                got += count
        self._drained = False
        return got, False

    def _error(self, why: int) -> ConnectionError:
        """What OpenSSL says, which it forgets by that."""
        texts = []
        while code := self._library.ERR_get_error():
            text = self._library.ERR_reason_error_string(code)
            texts.append(self._string(text).decode() if text else f"error {code}")
        return ConnectionError(f"TLS: {', '.join(texts) or f'error {why}'}")


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
            connection.settimeout(max(deadline.left(), 1e-3))
            connection.sendall(piece)


def _words(error: Any) -> str:
    reasons = ", ".join(str(part[-1]) for part in (error.args[0] if error.args else []) if part)
    return reasons or "TLS refused it"
