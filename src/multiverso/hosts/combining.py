"""Combines arrays of all hosts, piece by piece: what a node does between its workers' part of it and the others'.

Without sockets, threads and clocks: what this host's workers give and what other nodes say goes in, messages for
these come out. A *piece* is what all hosts have each at a time, at most `PIECE_BYTES`; the pieces are counted from 1
through all reductions. A small piece goes from each host to all others, and each combines them all. A larger one is
cut into chunks that have a home each: every host sends its chunk there (``PART``), the home combines them and sends
the result to all (``WHOLE``). Where hosts reduce different things all get ``REFUSE``. So a piece crosses each
host's link at most twice in each direction, however many hosts there are.

Every element is ``(h0 op h1) op h2 ...`` in host order, and a host's own is ``(w0 op w1) op ...`` of its workers in
their order: the same bits on all hosts, and in every run on the same hosts.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from multiverso.errors import ShapeMismatchError
from multiverso.hosts.peer.frames import Body, ProtocolError
from multiverso.hosts.peer.resources import Array

PIECE_BYTES = 2 << 20
CHUNK_BYTES = 512 << 10
SMALL_BYTES = 64 << 10
PIECES = 4  # under way at a time
PART, WHOLE, REFUSE = 1, 2, 3
_HEAD = struct.Struct("!BxxxIQQQ")  # kind, chunk, piece, signature, bytes of the piece
HEAD_BYTES = _HEAD.size

COMBINE: dict[str, Callable[..., Array]] = {"sum": np.add, "product": np.multiply, "max": np.maximum, "min": np.minimum}


@dataclass(frozen=True)
class Piece:
    """The parts of a reduction that have to be equal on all hosts.

    Attributes:
        number: from 1, through all reductions.
        signature: another one for calls that do not belong together.
        operation: of `COMBINE`.
        dtype: of the elements.
        nbytes: of the piece.
    """

    number: int
    signature: int
    operation: str
    dtype: np.dtype[Any]
    nbytes: int

    def head(self, kind: int, chunk: int) -> bytes:
        """Returns what stands before a chunk that travels."""
        return _HEAD.pack(kind, chunk, self.number, self.signature, self.nbytes)

    def cut(self, array: Array, chunk: int) -> Array:
        """Returns a chunk of a piece's array."""
        low = chunk * CHUNK_BYTES // self.dtype.itemsize
        return array[low : low + _bytes_of(self.nbytes, chunk) // self.dtype.itemsize]


@dataclass
class _Under:
    """A piece that is under way here."""

    parts: dict[int, dict[int, Body]] = field(default_factory=dict)  # by chunk, by host
    wholes: dict[int, Body] = field(default_factory=dict)
    said: dict[int, tuple[int, int]] = field(default_factory=dict)  # signature and bytes, by hosts that have begun it
    piece: Piece | None = None  # once this host's workers have given theirs
    out: Array | None = None
    done: set[int] = field(default_factory=set)


class Combining:
    """One thread at a time may call.

    Args:
        host: this host's number.
        hosts: the hosts' numbers, in order.
        send: takes a message for another host, in parts whose memory does not change before it has arrived.
        free: takes a message back that has been read.
    """

    def __init__(
        self,
        host: int,
        hosts: list[int],
        send: Callable[..., None],
        free: Callable[[Body], None] = lambda message: None,
    ) -> None:
        self._host, self._hosts, self._send, self._free = host, hosts, send, free
        self._others = [other for other in hosts if other != host]
        self._under: dict[int, _Under] = {}
        self._finished = 0  # all pieces up to this one

    def begin(self, piece: Piece, own: Array, out: Array) -> list[int]:
        """This host's part of a piece is there.

        Args:
            piece: the next one.
            own: the part, flat. It is read and sent until the piece is done; of a small one, which may be on its way
                to a host for longer, a copy is.
            out: where the result goes, and is sent from; it changes again with the piece after the next at the
                earliest, which takes parts of hosts that have all of this one.

        Returns:
            the numbers of the pieces that are done with it, in order.

        Raises:
            ShapeMismatchError: the workers of other hosts reduce something else.
        """
        under = self._under.setdefault(piece.number, _Under())
        if piece.nbytes <= SMALL_BYTES:
            own = own.copy()
        under.piece, under.out = piece, out
        if any(said != (piece.signature, piece.nbytes) for said in under.said.values()):
            raise self._mismatch(piece.number)
        for chunk in range(_chunks(piece.nbytes)):
            data = piece.cut(own, chunk).data.cast("B")
            home = self._home(piece, chunk)
            for host in self._others:
                if home in (None, host):
                    self._send(host, piece.head(PART, chunk), data)
            if home in (None, self._host):
                under.parts.setdefault(chunk, {})[self._host] = data
                self._fold(under, chunk)
        for chunk in list(under.wholes):
            self._take_whole(under, chunk)
        return self._end()

    def arrived(self, host: int, message: Body) -> list[int]:
        """Takes another node's message; returns the pieces that it completes, in order.

        Raises:
            ProtocolError: no node says that.
            ShapeMismatchError: its workers reduce something else.
        """
        if len(message) < HEAD_BYTES:
            raise ProtocolError("a message of a reduction is too short")
        kind, chunk, number, signature, nbytes = _HEAD.unpack(message[:HEAD_BYTES])
        body = memoryview(message)[HEAD_BYTES:]
        if kind == REFUSE:
            raise ShapeMismatchError(_DIFFERENT)
        known = kind in (PART, WHOLE) and nbytes <= PIECE_BYTES
        if not known or not self._finished < number <= self._finished + 2 * PIECES:
            raise ProtocolError(f"a message of a reduction makes no sense: kind {kind}, piece {number}")
        under = self._under.setdefault(number, _Under())
        under.said[host] = signature, nbytes
        if under.piece is not None and (under.piece.signature, under.piece.nbytes) != (signature, nbytes):
            raise self._mismatch(number)
        chunks = _chunks(nbytes)
        if chunk >= chunks or len(body) != _bytes_of(nbytes, chunk):
            raise ProtocolError(f"chunk {chunk} of a piece of {nbytes} bytes has not {len(body)}")
        if kind == PART:
            under.parts.setdefault(chunk, {})[host] = body
            self._fold(under, chunk)
        else:
            under.wholes[chunk] = body
            self._take_whole(under, chunk)
        return self._end()

    def missing(self, number: int) -> list[int]:
        """Returns the other hosts that a piece waits for."""
        under = self._under.get(number)
        if under is None or under.piece is None:
            return self._others
        wanted: set[int] = set()
        for chunk in range(_chunks(under.piece.nbytes)):
            if chunk not in under.done:
                home = self._home(under.piece, chunk)
                if home in (None, self._host):
                    wanted |= set(self._hosts) - set(under.parts.get(chunk, ()))
                else:
                    wanted |= set(self._others) - under.said.keys() or {home}
        return sorted(wanted - {self._host})

    # -- within ----------------------------------------------------------------------------------------------

    def _fold(self, under: _Under, chunk: int) -> None:
        piece, parts = under.piece, under.parts.get(chunk, {})
        if piece is None or chunk in under.done or len(parts) < len(self._hosts):
            return
        assert under.out is not None
        combine = COMBINE[piece.operation]
        first, second, *others = (np.frombuffer(parts[host], piece.dtype) for host in self._hosts)
        whole = piece.cut(under.out, chunk)
        combine(first, second, out=whole)
        for other in others:
            combine(whole, other, out=whole)
        for host, part in under.parts.pop(chunk).items():
            if host != self._host:
                self._free(part)
        under.done.add(chunk)
        if self._home(piece, chunk) is not None:
            for host in self._others:
                self._send(host, piece.head(WHOLE, chunk), whole.data.cast("B"))

    def _take_whole(self, under: _Under, chunk: int) -> None:
        if under.piece is None or under.out is None:
            return
        whole = under.wholes.pop(chunk)
        under.piece.cut(under.out, chunk)[...] = np.frombuffer(whole, under.piece.dtype)
        self._free(whole)
        under.done.add(chunk)

    def _end(self) -> list[int]:
        ended = []
        while (under := self._under.get(self._finished + 1)) is not None and under.piece is not None:
            if len(under.done) < _chunks(under.piece.nbytes):
                break
            self._finished += 1
            ended.append(self._finished)
            del self._under[self._finished]
        return ended

    def _home(self, piece: Piece, chunk: int) -> int | None:
        """Returns where a chunk is combined; None: everywhere."""
        if piece.nbytes <= SMALL_BYTES:
            return None
        return self._hosts[(piece.number * (PIECE_BYTES // CHUNK_BYTES) + chunk) % len(self._hosts)]

    def _mismatch(self, number: int) -> ShapeMismatchError:
        """Reports it to all other hosts, which might not notice the difference otherwise."""
        for host in self._others:
            self._send(host, _HEAD.pack(REFUSE, 0, number, 0, 0))
        return ShapeMismatchError(_DIFFERENT)


_DIFFERENT = "the workers of another host do not call all_reduce with the same things"


def _chunks(nbytes: int) -> int:
    return 1 if nbytes <= SMALL_BYTES else -(-nbytes // CHUNK_BYTES)


def _bytes_of(nbytes: int, chunk: int) -> int:
    return nbytes if nbytes <= SMALL_BYTES else min(CHUNK_BYTES, nbytes - chunk * CHUNK_BYTES)
