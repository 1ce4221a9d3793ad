"""Frames between two nodes: a header of 24 bytes and what it announces. No length is believed before it is checked.

``docs/protocol.md`` says what each kind means. The numbers are big-endian; the arrays in a body are little-endian, as
they lie in memory on every machine that we run on.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from multiverso.errors import MultiversoError
from multiverso.hosts.peer.buffers import Array

# kinds
OPEN = 1  # this side has the table: body says its size, so that both mean the same
CLOSE = 2  # this side has it no more
PUSH = 3  # host to home: a difference
ANSWER = 4  # home to host: a difference
VALUE = 5  # home to host: S itself, where the answer was lost, or to a first push
NEWS = 6  # home to host: its values have changed since its last answers
BYE = 7  # this side ends on purpose
# of synchronous rounds, along the chain of hosts: with a `RoundHeader`, see hosts/rounds/rounds.py
AT = 8  # both: how far this side is
SUM = 9  # to the next host: the sum so far
TOTAL = 10  # to the host before: the sum of all hosts
WANT = 11  # to the host before: somebody waits for round `number`
ASK = 12  # to any host: this one lacks what a table holds after step `number`
FILL = 13  # to the host that asked: a piece of it
OF_ROUNDS = frozenset((AT, SUM, TOTAL, WANT, ASK, FILL))
KINDS = frozenset((OPEN, CLOSE, PUSH, ANSWER, VALUE, NEWS, BYE)) | OF_ROUNDS

# flags
FRESH = 1  # of PUSH: the first between the two since the table was opened
FIRST = 2  # of PUSH: the first of a pass over the table
URGENT = 4  # of PUSH: somebody waits for it
RULED = 16  # of PUSH: the rule between hosts decides what becomes of it; without, it is added
REST = 32  # of PUSH: what an earlier one has left, to rounding or to the wire format
WHOLE = 8  # of ANSWER and VALUE: S is the home's value itself now, to the last bit

_HEADER = struct.Struct("!BBHIIIQ")
HEADER_BYTES = _HEADER.size
LONGEST_BODY = 1 << 31
_SKIP_BYTES = 1 << 16
_BUFFER_BYTES = (1 << 14) + HEADER_BYTES


class ProtocolError(MultiversoError, ConnectionError):
    """The other node sent what no node of this version sends: the connection is closed, nothing was changed."""


class Header(NamedTuple):
    """What stands before a body. A tuple: two of them are made for each frame.

    Attributes:
        kind: one of the kinds above.
        wire: how the body is coded (``hosts/values/codecs.py``).
        flags: of the flags above, added.
        table: number of the table in the job.
        chunk: number of the chunk in the table.
        length: bytes of the body.
        number: of the push in this chunk, from 1; its answer has the same.
    """

    kind: int
    wire: int = 0
    flags: int = 0
    table: int = 0
    chunk: int = 0
    length: int = 0
    number: int = 0

    def pack(self) -> bytes:
        """Returns it as it travels."""
        return _HEADER.pack(*self)

    @classmethod
    def unpack(cls, data: bytes | bytearray | memoryview, at: int = 0) -> Header:
        """The inverse of :meth:`pack`, of what begins at some byte.

        Raises:
            ProtocolError: no such kind, or a body that nobody sends.
        """
        header = tuple.__new__(cls, _HEADER.unpack_from(data, at))
        if header.kind not in KINDS:
            raise ProtocolError(f"no kind of frame has the number {header.kind}")
        if header.length > LONGEST_BODY:
            raise ProtocolError(
                f"a frame of {header.length} bytes was announced; the longest has {LONGEST_BODY}"
            )
        return header


class RoundHeader(NamedTuple):
    """The header of frames of synchronous rounds: as long as any, with words of its own.

    Attributes:
        kind: AT, SUM, TOTAL, WANT, ASK or FILL.
        epoch: how often the hosts have formed a chain anew, modulo 256.
        flags: of all but WANT, see ``hosts/rounds/frames.py``.
        table: number of the table in the job.
        contributions: of SUM and TOTAL: how many workers' there are in it; of FILL the piece.
        length: bytes of the body.
        number: of SUM and TOTAL the step, of WANT the round, of ASK and FILL the last step of the turn before.
    """

    kind: int
    epoch: int = 0
    flags: int = 0
    table: int = 0
    contributions: int = 0
    length: int = 0
    number: int = 0

    def pack(self) -> bytes:
        """Returns it as it travels."""
        return _HEADER.pack(*self)


NOTHING = memoryview(b"")


@dataclass(eq=False)
class Outgoing:
    """A frame to send."""

    header: Header | RoundHeader
    body: memoryview = NOTHING
    buffer: Array | None = None  # goes back when it is sent


class Reader:
    """Puts a stream of bytes together to frames, in memory that the receiver of a frame provides.

    What comes is taken from the connection up to 16 KiB at a time, so that a small frame is there at once, header
    and body; what is left of a large one goes to its memory directly.

    Args:
        accept: gets a header, checks it, and returns the memory for the body, of its length; or None to skip it.
    """

    def __init__(self, accept: Callable[[Header], memoryview | None]) -> None:
        self._accept = accept
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

    def filled(self, count: int) -> tuple[Header, memoryview | None] | None:
        """Takes note of how many bytes came; returns a frame once it is whole (None as its body if it was skipped).

        After a frame, call it with 0 for the next one: several may have come at once.

        Raises:
            ProtocolError: the header is refused.
        """
        header = self._header
        if header is None:
            self._high += count
            header = self._next()
            if header is None:
                return None
        else:
            self._got += count
        if self._got < header.length:
            self._header = header
            return None
        body, self._header, self._body = self._body, None, None
        return header, body

    def _next(self) -> Header | None:
        """Takes a header from the buffer, and what of its body is there."""
        low, high = self._low, self._high
        if high - low < HEADER_BYTES:
            self._buffer[: high - low] = self._buffer[low:high]
            self._low, self._high = 0, high - low
            return None
        header = Header.unpack(self._buffer, low)
        body = self._body = self._accept(header)
        low += HEADER_BYTES
        got = self._got = min(header.length, high - low)
        if got and body is not None:
            body[:got] = self._buffer[low : low + got]
        low += got
        self._low, self._high = (low, high) if low < high else (0, 0)
        return header


_OPENED = struct.Struct("!QIIQ")
OPENED_BYTES = _OPENED.size


@dataclass(frozen=True, slots=True)
class Opened:
    """The body of OPEN.

    Attributes:
        elements: of the table.
        dtype: its number in ``spec.DTYPES``.
        chunk: elements of a chunk.
        epoch: how often homes were given out anew.
    """

    elements: int
    dtype: int
    chunk: int
    epoch: int

    def pack(self) -> bytes:
        """Returns it as it travels."""
        return _OPENED.pack(self.elements, self.dtype, self.chunk, self.epoch)

    @classmethod
    def unpack(cls, data: memoryview) -> Opened:
        """The inverse of :meth:`pack`; the length was checked."""
        return cls(*_OPENED.unpack(data))


_REACHED = struct.Struct("!QQQII")
REACHED_BYTES = _REACHED.size


@dataclass(frozen=True, slots=True)
class Reached:
    """The body of AT.

    Attributes:
        arrived: the last step whose total is here.
        received: the last step whose sum so far is here; of smaller ones nothing has to be sent.
        elements: of the table.
        dtype: its number in ``spec.DTYPES``.
        chunk: elements of a chunk.
    """

    arrived: int
    received: int
    elements: int
    dtype: int
    chunk: int

    def pack(self) -> bytes:
        """Returns it as it travels."""
        return _REACHED.pack(self.arrived, self.received, self.elements, self.dtype, self.chunk)

    @classmethod
    def unpack(cls, data: memoryview) -> Reached:
        """The inverse of :meth:`pack`; the length was checked."""
        return cls(*_REACHED.unpack(data))
