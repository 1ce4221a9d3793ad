"""A connection that carries bytes both ways: one thread sends, another receives. An encrypted one is in ``tls.py``."""

from __future__ import annotations

import contextlib
import select
import socket
import sys

from multiverso.deadline import Deadline
from multiverso.errors import StartupError
from multiverso.in_process import close_in_children

FAR = float("inf")  # unknown
_EACH_SECONDS = 0.0005  # another megabyte for each of these: a way of 3 ms has as much as any


def megabytes_for(seconds: float) -> int:
    """Returns how many megabytes keep a connection busy where an answer takes so long at least: 2 to 8."""
    return 2 + int(min(seconds / _EACH_SECONDS, 6))


_MANY = 64
# In Linux's struct tcp_info, in microseconds: tcpi_rtt, tcpi_min_rtt, tcpi_busy_time, tcpi_rwnd_limited.
_RTT_AT, _MIN_RTT_AT, _BUSY_AT, _RECEIVER_AT = 68, 148, 168, 176
_SOON_MS = 2
_ONCE = 2  # of TCP_QUICKACK: what comes later may still be acknowledged together with an answer


class RefusedError(StartupError, ConnectionError):
    """The other node refuses this one, or is not one of ours. Trying again does not help."""


class Channel:
    """A connection as peers use it. Every method raises OSError once the connection has ended.

    How bytes are sent and received is a transport's own: `Plain` here, and `Encrypted` in ``tls.py``.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._left: list[bytes | bytearray | memoryview] = []  # to be sent
        close_in_children(connection, socket.socket.close)

    def send(self, *parts: bytes | bytearray | memoryview) -> None:
        """Sends all of the parts, one after another; one thread at a time."""
        if not self.send_now(*parts):
            self.flush()

    def send_now(self, *parts: bytes | bytearray | memoryview) -> bool:
        """Sends without waiting for the other side; False if some of it is left for `flush`, or the next send.

        What is left is not copied: it must not change until then.
        """
        self._left += [part for part in parts if len(part)]
        try:
            self._send_left(socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        return True

    def flush(self) -> None:
        """Sends what is left."""
        self._send_left(0)

    def _send_left(self, flags: int) -> None:
        """Sends what is in ``_left`` and removes it from there; ``flags``: of the system's call."""
        raise NotImplementedError

    def recv_into(self, view: memoryview) -> int:
        """Waits for bytes, of some channels until the view is full; returns how many came, 0 at the end. One thread."""
        raise NotImplementedError

    def recv_now(self, view: memoryview) -> int:
        """Returns how many bytes came, 0 at the end. One thread, which may be another than that of ``recv_into``.

        Raises:
            BlockingIOError: nothing is there yet.
        """
        raise NotImplementedError

    def await_some(self) -> None:
        """Waits until there is something to receive, or the end. Another thread may receive it meanwhile.

        Where nothing more comes soon, it acknowledges what has come. The system does so up to 40 ms later, and until
        then the sender's `delay` and `busy_seconds` take an idle connection for a slow one.
        """
        if not self._poll.poll(_SOON_MS):
            self.acknowledge()
            self._poll.poll()

    def acknowledge(self) -> None:
        """Acknowledges what has come, if nothing that was sent has done so."""
        with contextlib.suppress(OSError):  # no TCP, or the end
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, _ONCE)

    def fileno(self) -> int:
        """The descriptor that is readable when there is something to receive, or the end."""
        return self._socket.fileno()

    @property
    def holds_some(self) -> bool:
        """Whether it may have bytes that ``await_some`` does not see in another thread: they have left the socket."""
        return False

    def round_trip(self) -> float:
        """Returns the shortest way there and back in seconds: the system sees each acknowledgement."""
        seconds = self._told(_MIN_RTT_AT, 4)
        return FAR if seconds is None else seconds

    def delay(self) -> float:
        """Returns how long the way there and back takes now, smoothed, in seconds."""
        return self._told(_RTT_AT, 4) or FAR

    def busy_seconds(self) -> float:
        """Returns for how long something that was sent was on its way, and the other side had room for more."""
        return (self._told(_BUSY_AT, 8) or 0.0) - (self._told(_RECEIVER_AT, 8) or 0.0)

    def _told(self, at: int, nbytes: int) -> float | None:
        """Returns what the system says of the connection, in seconds; None where it does not (Linux before 4.10)."""
        try:
            info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, at + nbytes)
        except OSError:
            return None
        return int.from_bytes(info[at:], sys.byteorder) * 1e-6 if len(info) == at + nbytes else None

    def shutdown(self) -> None:
        """Ends it for both sides, and wakes threads that wait in here. Any thread may call it, more than once."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Ends it and frees the socket, once no thread is in here."""
        self.shutdown()
        self._socket.close()


class Plain(Channel):
    """Bytes as they are."""

    def _send_left(self, flags: int) -> None:
        while self._left:
            sent = self._socket.sendmsg(self._left[:_MANY], (), flags)
            while self._left and sent >= len(self._left[0]):
                sent -= len(self._left.pop(0))
            if sent:
                self._left[0] = memoryview(self._left[0])[sent:]

    def recv_into(self, view: memoryview) -> int:
        # a large frame comes in dozens of pieces: the system puts them together without waking this thread for each
        return self._socket.recv_into(view, 0, socket.MSG_WAITALL)

    def recv_now(self, view: memoryview) -> int:
        return self._socket.recv_into(view, 0, socket.MSG_DONTWAIT)


def receive_some(connection: socket.socket, most: int, deadline: Deadline) -> bytes:
    """Returns what comes, at most so many bytes; nothing at the end.

    Raises:
        TimeoutError: nothing came in time.
    """
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    while not poll.poll(1000 * deadline.slice_left()):
        if deadline.passed:
            raise TimeoutError(f"the other host said nothing for {deadline}")
    return connection.recv(most)
