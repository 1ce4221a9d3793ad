"""Messages between two nodes, each exactly once and in order, whatever happens to their connections.

Messages are numbered from 1 and kept until the other side has said that it has them; on a new connection both say
first how far they are, and go on from there. Without sockets and clocks: what was received goes in, what is to be
sent comes out. Nothing outlives a node: one that comes again is a new incarnation, and nothing that was said to the
last one is for it.

A message is a head of 20 bytes and a body: its number (8 bytes; 0: it only says how far this side is), the number of
the last message that has been received (8), and the length of the body (4), all big-endian.
"""

from __future__ import annotations

import struct
import threading
from collections import deque

from multiverso.hosts.peer.frames import ProtocolError

_HEAD = struct.Struct("!QQI")
HEAD_BYTES = _HEAD.size
LONGEST_BODY = 8 << 20
_SAY_BYTES = (
    1 << 20
)  # so much has been received since the other side was told: it keeps what it does not know of
_SAY_MESSAGES = 64

Body = bytes | bytearray | memoryview


class Stream:
    """One side. Any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: deque[tuple[int, tuple[Body, ...]]] = deque()  # not known to be received
        self._last = 0  # the number of the last message put
        self._sent = 0  # of the last one that went out over this connection
        self._received = 0
        self._unsaid_bytes = self._unsaid = 0
        self._say = False
        self._ready = False  # the other side has said on this connection how far it is

    def put(self, *parts: Body) -> None:
        """A message for the other side, in parts; their memory must not change from here on."""
        length = sum(map(len, parts))
        if length > LONGEST_BODY:
            raise ValueError(f"a message of {length} bytes; the longest has {LONGEST_BODY}")
        with self._lock:
            self._last += 1
            self._kept.append((self._last, parts))

    def connected(self) -> None:
        """A new connection: what is not known to be received goes again, once the other side has spoken."""
        with self._lock:
            self._ready, self._say = False, True

    def has(self) -> bool:
        """Whether there is something to send."""
        with self._lock:
            return self._say or (self._ready and self._sent < self._last)

    def next(self) -> tuple[Body, ...] | None:
        """Returns a head and the parts of a body to send, or None."""
        with self._lock:
            number: int = 0
            parts: tuple[Body, ...] = ()
            if self._ready and self._sent < self._last:
                number, parts = self._kept[self._sent + 1 - self._kept[0][0]]
                self._sent = number
            elif not self._say:
                return None
            self._say, self._unsaid, self._unsaid_bytes = False, 0, 0
            return _HEAD.pack(number, self._received, sum(map(len, parts))), *parts

    @staticmethod
    def length(head: bytes | memoryview) -> int:
        """Returns how long the body is.

        Raises:
            ProtocolError: no node sends that.
        """
        length: int = _HEAD.unpack(head)[2]
        if length > LONGEST_BODY:
            raise ProtocolError(f"a message of {length} bytes was announced; the longest has {LONGEST_BODY}")
        return length

    def arrived(self, head: bytes | memoryview, body: Body) -> Body | None:
        """Takes a message; returns its body unless it has been received before, or has none.

        Raises:
            ProtocolError: no node sends that.
        """
        number, received, _ = _HEAD.unpack(head)
        with self._lock:
            if received > self._last or (self._kept and received + 1 < self._kept[0][0]):
                raise ProtocolError(f"message {received} is said to be received, of {self._last}")
            while self._kept and self._kept[0][0] <= received:
                self._kept.popleft()
            if not self._ready:
                self._ready, self._sent = True, received
            if number <= self._received:
                return None
            if number != self._received + 1:
                raise ProtocolError(f"message {number} came after message {self._received}")
            self._received = number
            self._unsaid += 1
            self._unsaid_bytes += len(body)
            self._say |= self._unsaid >= _SAY_MESSAGES or self._unsaid_bytes >= _SAY_BYTES
            return body
