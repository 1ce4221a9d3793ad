"""Messages between a session and its node: one JSON object per packet, with file descriptors beside it.

``requests.py`` has every request, and ``docs/protocol.md`` how they travel. A body too
long for a packet travels in a memfd.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import select
import socket
import struct
import time
from pathlib import Path
from typing import Any

PROTOCOL = 6
_LONGEST = 60_000
_LARGEST = 64 * 1024 * 1024
_MOST_DESCRIPTORS = 8
_BACKLOG = 4096  # the most that Linux lets wait; strangers may fill it, until the node has looked at each
_SLICE_SECONDS = 0.5
_F_GET_SEALS = 1034
_ACCEPTS_CONNECTIONS = 0x10000  # __SO_ACCEPTCON in /proc/net/unix
_PREFIX = "multiverso-"

Message = dict[str, Any]


def listen(name: str) -> socket.socket:
    """Returns a listening abstract Unix socket. Raises OSError (EADDRINUSE) when the name is taken."""
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    try:
        server.bind("\0" + name)
        server.listen(_BACKLOG)
    except BaseException:
        server.close()
        raise
    return server


def connect(name: str, timeout_seconds: float) -> socket.socket:
    """Returns a connection to a node, which blocks. Waits while too many others wait for it to take them.

    Raises:
        TimeoutError: they still do.
        OSError: there is no listener.
    """
    deadline = time.monotonic() + timeout_seconds
    client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    try:
        while True:
            # the kernel's own queue: a process that kept asking instead would lose to one that asks more often
            left = min(_SLICE_SECONDS, max(0.001, deadline - time.monotonic()))
            client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(left))
            try:
                client.connect("\0" + name)
                client.getpeername()  # a signal in the middle of the wait looks like success
                break
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.ENOTCONN):
                    raise
                if time.monotonic() >= deadline:
                    raise TimeoutError(
                        errno.ETIMEDOUT, "too many processes wait for this socket to be answered", name
                    ) from error
        client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(0))
    except BaseException:
        client.close()
        raise
    return client


def _timeval(seconds: float) -> bytes:
    return struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))


def send(connection: socket.socket, message: Message, descriptors: tuple[int, ...] = ()) -> None:
    """Sends one message. The descriptors stay the caller's."""
    body = json.dumps(message).encode()
    if len(body) <= _LONGEST:
        socket.send_fds(connection, [body], descriptors)
        return
    carrier = os.memfd_create("multiverso-message", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with os.fdopen(os.dup(carrier), "wb") as file:
            file.write(body)
        socket.send_fds(connection, [b'{"long": %d}' % len(body)], (*descriptors, carrier))
    finally:
        os.close(carrier)


def receive(connection: socket.socket, into: list[int] | None = None) -> tuple[Message, list[int]] | None:
    """Returns the next message and its descriptors (now the caller's), or None at the end of the connection.

    Args:
        connection: where from.
        into: takes the descriptors, so that the caller knows them also when an exception arrives.

    Raises:
        ValueError: this is not a message.
        OSError: it could not be received.
    """
    descriptors = [] if into is None else into
    try:
        body, descriptors[:], flags, _ = _received(connection)
    except ConnectionResetError:  # of an end that left something unread: raised first, and once; what it sent comes now
        body, descriptors[:], flags, _ = _received(connection)
    if not body:
        return None
    try:
        if flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC):
            raise OSError("a message was cut short: this process has too few file descriptors left (ulimit -n)")
        message = parsed(body)
        if "long" in message:
            if not descriptors:
                raise ValueError("a long message came without its descriptor")
            message = parsed(_read_long(descriptors.pop(), message["long"]))
    except BaseException:
        while descriptors:
            os.close(descriptors.pop())
        raise
    return message, descriptors


def _received(connection: socket.socket) -> tuple[bytes, list[int], int, Any]:
    return socket.recv_fds(connection, _LONGEST + 1024, _MOST_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)


def waiting(connection: socket.socket) -> bool:
    """Returns whether a message, or the end, is there to be received."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(0))


def parsed(body: bytes) -> Message:
    """Returns what was sent as JSON.

    Raises:
        ValueError: it is no JSON object.
    """
    try:
        message = json.loads(body)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(message, dict):
        raise ValueError("not a JSON object")
    return message


def _read_long(descriptor: int, size: Any) -> bytes:
    """Returns what lies in a memfd. Nothing else is read: a pipe or a device could make us wait forever."""
    with os.fdopen(descriptor, "rb") as file:
        fcntl.fcntl(file, _F_GET_SEALS)  # OSError for anything but a memfd
        if type(size) is not int or not 0 <= size <= min(_LARGEST, os.fstat(file.fileno()).st_size):
            raise ValueError("a long message of another size than it says, or of more than is taken")
        return os.pread(file.fileno(), size, 0)


def listening_sockets(table: str | None = None) -> dict[str, str]:
    """Lists the abstract sockets that accept connections here, also other users': their inodes, by name.

    Args:
        table: the text of /proc/net/unix, which is read by default.
    """
    text = Path("/proc/net/unix").read_text() if table is None else table
    rows = (row.split(maxsplit=7) for row in text.splitlines()[1:])
    return {
        row[7][1:]: row[6]
        for row in rows
        if len(row) == 8 and row[7].startswith("@") and int(row[3], 16) & _ACCEPTS_CONNECTIONS
    }


def node_addresses(table: str | None = None) -> list[str]:
    """Lists the nodes that run here, also other users', by `listening_sockets`."""
    return sorted(name for name in listening_sockets(table) if name.startswith(_PREFIX))


def peer(connection: socket.socket) -> tuple[int, int]:
    """Returns (process id, user id) of the other end, as the kernel knows them."""
    pid, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid
