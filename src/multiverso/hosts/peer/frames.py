"""Frames between two nodes: a header of 40 bytes and what it announces. No length is believed before it is checked.

What a kind of frame means is known to its protocol alone (`Numbered`); ``docs/protocol.md`` lists them. The numbers are
big-endian; the arrays in a body are little-endian, as they lie in memory on every machine that we run on.
"""

from __future__ import annotations

import struct
import threading
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from multiverso.errors import MultiversoError
from multiverso.hosts.peer.resources import Array, Buffers
from multiverso.hosts.transport.channel import RefusedError

RECEIVED = 7  # a frame without a number: it only says how far this side is

_HEADER = struct.Struct("!BBHIIIQQQ")
HEADER_BYTES = _HEADER.size
LONGEST_BODY = 1 << 31
_SKIP_BYTES = 1 << 16
_BUFFER_BYTES = (1 << 14) + HEADER_BYTES
# so much has been received since the last acknowledgement: the other side keeps what follows that
_SAY_FRAMES = 64
_BYTES_OF_ONE = 1 << 14  # a longer frame counts as several


class ProtocolError(MultiversoError, ConnectionError):
    """The other node sent what no node of this version sends: the connection is closed, nothing was changed."""


class Header(NamedTuple):
    """What stands before a body. A tuple: two of them are made for each frame.

    Attributes:
        kind: which protocol's frame it is, and what it means there.
        wire: how the body is coded.
        flags: of that kind, added.
        table: number of the table in the job.
        chunk: number of the chunk in the table.
        length: bytes of the body.
        step: of rounds, see ``hosts/rounds/frames.py``.
        number: of the frame, from 1, see `Numbered`; 0: it only says how far this side is.
        received: the number of the last frame that has come from the other side.
    """

    kind: int
    wire: int = 0
    flags: int = 0
    table: int = 0
    chunk: int = 0
    length: int = 0
    step: int = 0
    number: int = 0
    received: int = 0

    def pack(self) -> bytes:
        """Returns it as it travels."""
        return _HEADER.pack(*self)

    @classmethod
    def unpack(cls, data: bytes | bytearray | memoryview, at: int = 0) -> Header:
        """The inverse of `pack`, of what begins at some byte.

        Raises:
            ProtocolError: no body is that long.
        """
        header = tuple.__new__(cls, _HEADER.unpack_from(data, at))
        if header.length > LONGEST_BODY:
            raise ProtocolError(f"a frame of {header.length} bytes was announced; the longest has {LONGEST_BODY}")
        return header


NOTHING = memoryview(b"")
Body = bytes | bytearray | memoryview
Frame = tuple[Header, memoryview | None]


@dataclass(eq=False, slots=True)
class Outgoing:
    """A frame to send."""

    header: Header
    body: memoryview = NOTHING
    buffer: Array | None = None  # goes back when it has arrived
    more: tuple[Body, ...] = ()  # of the body


def unknown(header: Header) -> ProtocolError:
    """Returns the error for a frame of a kind that a protocol does not have."""
    return ProtocolError(f"no kind of frame has the number {header.kind}")


def memory_for(header: Header, expected: int) -> memoryview:
    """Returns memory for the body of a frame whose kind fixes its length.

    Raises:
        ProtocolError: the header announces another one.
    """
    if header.length != expected:
        raise ProtocolError(f"a frame of kind {header.kind} has {expected} bytes, not {header.length}")
    return memoryview(bytearray(expected))


class Reader:
    """Puts a stream of bytes together to frames, in memory that the receiver of a frame provides.

    What comes is taken from the connection up to 16 KiB at a time, so that a small frame is there at once, header
    and body; what is left of a large one goes to its memory directly. After each `filled`, until there is no more::

        header = reader.begin()
        frame = reader.whole() if header is None else reader.place(memory for the body)
    """

    def __init__(self) -> None:
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._low = self._high = 0  # where in the buffer what has come begins, and ends
        self._header: Header | None = None  # whose body is not whole yet
        self._body: memoryview | None = None
        self._got = 0  # of it
        self._scratch = memoryview(b"")

    @property
    def inside(self) -> bool:
        """Whether the body of a frame has come in part."""
        return self._header is not None

    def room(self) -> memoryview:
        """Returns where the next bytes of the stream go: at least one."""
        if self._header is None:
            return self._buffer[self._high :]
        if self._body is None:
            if not self._scratch:
                self._scratch = memoryview(bytearray(_SKIP_BYTES))
            return self._scratch[: self._header.length - self._got]
        return self._body[self._got :]

    def filled(self, count: int) -> None:
        """Takes note of how many bytes came."""
        if self._header is None:
            self._high += count
        else:
            self._got += count

    def begin(self) -> Header | None:
        """Returns the next header once it is whole; `place` follows.

        Raises:
            ProtocolError: no node sends it.
        """
        if self._header is not None:
            return None
        low, high = self._low, self._high
        if high - low < HEADER_BYTES:
            if low:
                self._buffer[: high - low] = self._buffer[low:high]
                self._low, self._high = 0, high - low
            return None
        self._header, self._low = Header.unpack(self._buffer, low), low + HEADER_BYTES
        return self._header

    def place(self, body: memoryview | None) -> Frame | None:
        """Gives the body of the frame that has begun its memory, of its length; None: it is skipped.

        Returns:
            The frame, if it is whole.
        """
        header, low = self._header, self._low
        assert header is not None
        got = min(header.length, self._high - low)
        if got and body is not None:
            body[:got] = self._buffer[low : low + got]
        if low + got < self._high:
            self._low = low + got
        else:
            self._low = self._high = 0
        if got == header.length:
            self._header = None
            return header, body
        self._body, self._got = body, got
        return None

    def whole(self) -> Frame | None:
        """Returns the frame that had begun before once it is whole; None as its body if that was skipped."""
        header, body = self._header, self._body
        if header is None or self._got < header.length:
            return None
        self._header = self._body = None
        return header, body


class Numbered:
    """What goes over the connections to one peer: frames that arrive exactly once and in order, whatever is cut.

    A protocol's end of its conversation is derived from it. Two threads may call at once, one that sends and one that
    receives.

    They are numbered from 1 and kept until the other side has said that it has them; on a new connection both say first
    how far they are, and continue from there. Nothing outlives a node: one that returns is a new incarnation, and
    nothing that was said to the last one is for it.

    A thread that reads or changes the state holds the lock.

    Args:
        pool: where buffers come from and go back to.
    """

    def __init__(self, pool: Buffers) -> None:
        self._pool, self._lent = pool, 0  # buffers of frames that have not arrived
        self._lock = threading.RLock()
        self._kept: deque[Outgoing] = deque()  # the last ones, which are not known to be received
        self._last = 0  # the number of the last one put
        self._sent = 0  # of the last one that went out over this connection, or the one before where it is not ready
        self._received = 0
        self._unsaid = 0  # frames that came since this side has last said how far it is
        self._say = False
        # ready: the other side has said on this connection how far it is
        self._connected = self._ready = False
        self._incarnation: int | None = None

    def post(self, frame: Outgoing) -> None:
        """A frame for the other side; its memory must not change, and a buffer goes back once it has arrived."""
        with self._lock:
            self._post(frame)

    def _post(self, frame: Outgoing) -> None:
        """The same under the lock."""
        self._last += 1
        if frame.buffer is not None:
            self._lent += 1
        self._kept.append(frame)

    def connect(self, incarnation: int) -> None:
        """A new connection: what is not known to be received goes again, once the other side has spoken.

        Raises:
            RefusedError: the other node is a new one.
        """
        with self._lock:
            if self._incarnation not in (None, incarnation):
                raise RefusedError("its node has restarted, and knows nothing of what was under way")
            self._incarnation = incarnation
            self._connected = self._say = True
            self._ready = False

    def cut(self) -> None:
        """The connection has ended."""
        with self._lock:
            self._connected = self._ready = False

    def at_distance(self, seconds: float) -> None:
        """Sets the shortest round-trip time to the peer."""

    @property
    def has_words(self) -> bool:
        """Whether a frame is to be sent before this side may end; the other side may have to speak before."""
        return self._connected and bool(self._kept) and (self._sent < self._last or not self._ready)

    @property
    def has_something(self) -> bool:
        """Whether there is something to send."""
        return self._speaks()

    def _speaks(self) -> bool:
        return (self._ready and self._sent < self._last) or (self._say and self._connected)

    def wait(self, now: float) -> float | None:
        """Returns the seconds until `next` has something: 0 for at once, None to wait for an event."""
        return 0.0 if self.has_something else None

    def pause(self, now: float) -> float:
        """Returns the seconds that the peer's next frame should wait: 0 where a worker waits for it."""
        return 0.0

    def next(self, now: float, most_new: int = LONGEST_BODY) -> Outgoing | None:
        """Returns the next frame to send, or how far this side is, or None.

        Args:
            now: the time.
            most_new: bytes of the body of a frame that is computed in this call; a longer one is left for another.
        """
        with self._lock:
            return self._next()

    def _next(self) -> Outgoing | None:
        """The same under the lock."""
        if self._ready and self._sent < self._last:
            frame, number = self._kept[self._sent - self._last], self._sent + 1
            self._sent = number
        elif self._say and self._connected:
            frame, number = Outgoing(Header(RECEIVED)), 0
        else:
            return None
        self._say, self._unsaid = False, 0
        frame.header = tuple.__new__(Header, (*frame.header[:7], number, self._received))
        return frame

    def accept(self, header: Header) -> memoryview | None:
        """Checks a header; returns memory for its body, or None for one that is not wanted, or has come before.

        Raises:
            ProtocolError: no node sends this.
        """
        raise NotImplementedError

    def arrived(self, header: Header, body: memoryview | None, now: float) -> bool:
        """A frame is whole; returns whether there may be something to send. Then `wake` follows.

        Raises:
            ProtocolError: no node sends this.
        """
        raise NotImplementedError

    def wake(self) -> None:
        """Wakes those who wait for what has arrived: late, as they have to wait for this thread's interpreter."""

    def is_new(self, header: Header) -> bool:
        """Notes how far the other side is; returns whether a frame has not come before, so that `note` follows.

        Raises:
            ProtocolError: it is not the next one.
        """
        number, received = header.number, header.received
        if (number > 0) == (header.kind == RECEIVED) or (header.length and not number):
            raise ProtocolError(f"a message of {header.length} bytes of kind {header.kind} has the number {number}")
        with self._lock:
            news = received - self._last + len(self._kept)
            if news < 0 or received > self._sent:
                raise ProtocolError(f"message {received} is said to be received, of {self._sent} that were sent")
            for _ in range(news):
                if (buffer := self._kept.popleft().buffer) is not None:
                    self._lent -= 1
                    self._pool.give(buffer)
            if not self._ready:
                self._ready, self._sent = True, received
            if number > self._received + 1:
                raise ProtocolError(f"message {number} came after message {self._received}")
            return number > self._received

    def note(self, header: Header) -> None:
        """A new frame has arrived, and does not have to come again."""
        self._received = header.number  # by the one thread that receives; counted roughly, so without the lock
        self._unsaid += 1 + header.length // _BYTES_OF_ONE
        if self._unsaid >= _SAY_FRAMES:
            self._say = True
