"""From values to frames and back: which kernel does what to a chunk, and how it is coded on the way.

The chunk is the caller's alone meanwhile; nothing here is shared state.
"""

from __future__ import annotations

import numpy as np

from multiverso.hosts import codecs
from multiverso.hosts.peer.frames import Header, ProtocolError
from multiverso.hosts.peer.resources import Array, Buffers
from multiverso.hosts.values import frames
from multiverso.hosts.values.state import Away, Here, LinkTable, UnderWay
from multiverso.kernels.between_hosts.agreeing import REST, SOME, begin, catch_up, differ, land, push, serve


def numbers(part: Away | Here, buffer: Array) -> Array:
    """Returns a buffer as a chunk's numbers."""
    agreed = part.agreed
    frame: Array = buffer[: agreed.nbytes].view(agreed.dtype)
    return frame


def make_push(table: LinkTable, part: Away, wire: int, flags: int, ticket: int, pool: Buffers) -> UnderWay:
    """Takes what has changed in this host's copy of a chunk into S and a frame."""
    buffer = pool.take(part.agreed.nbytes)
    frame = numbers(part, buffer)
    copy, length, rest = table.held.copy, 0, True
    if wire == codecs.NATIVE:
        found = copy.run(push, part.chunk, part.agreed, frame)
        length, rest = frame.nbytes if found & SOME else 0, bool(found & REST)
    elif copy.run(differ, part.chunk, part.agreed, frame):
        wire, length, buffer = _coded(table, part, buffer, frame, pool)
    return UnderWay(Header(frames.PUSH, wire, flags, table.number, part.chunk.number, length), buffer, rest, ticket)


def take_push(
    table: LinkTable, part: Here, header: Header, buffer: Array, pool: Buffers, peer: int
) -> tuple[Header, Array]:
    """Adds a push to the home's values; returns the answer's header and memory.

    Raises:
        ProtocolError: it is not a coded difference; nothing has changed.
        MemoryError: nothing has changed either.
    """
    copy, chunk = table.held.home, part.chunk
    buffer = _decoded(part, header, buffer, pool)
    frame = numbers(part, buffer)
    if header.flags & frames.RULED and table.held.outer is not None and header.length:
        spare = pool.take(frame.nbytes)  # all memory that this needs comes before anything is changed
        before = numbers(part, spare)
        table.held.outer.make_room(chunk.number, frame)
        if not header.flags & frames.FRESH:
            copy.advance(part.agreed, frame)
        table.held.outer.step(chunk.number, None if header.flags & frames.REST else peer, frame, before)
        if not header.flags & frames.FRESH:
            if copy.convex:  # what the host has, less what comes: S as it would be before
                np.subtract(part.agreed, frame, out=before)
            copy.run(land, chunk, before, frame)  # into the values alone: S has it already
            header = header._replace(length=0)
        pool.give(spare)
    if header.flags & frames.FRESH:
        copy.run(begin, chunk, part.agreed, frame)
        length = frame.nbytes if frame.any() else 0
        return _answer(header, frames.VALUE, codecs.NATIVE, length, frames.WHOLE), buffer
    wire = codecs.NATIVE if header.flags & frames.URGENT else table.held.wire.number
    if wire == codecs.NATIVE:
        found = copy.run(serve if header.length else push, chunk, part.agreed, frame)
        length, flags = frame.nbytes if found & SOME else 0, 0 if found & REST else frames.WHOLE
        return _answer(header, frames.ANSWER, wire, length, flags), buffer
    if header.length:
        copy.run(land, chunk, part.agreed, frame)
    if not copy.run(differ, chunk, part.agreed, frame):
        return _answer(header, frames.ANSWER, wire, 0, frames.WHOLE), buffer
    try:
        wire, length, buffer = _coded(table, part, buffer, frame, pool)
    except MemoryError:  # it is added, and has to be answered
        frame[:] = part.agreed
        return _answer(header, frames.VALUE, codecs.NATIVE, frame.nbytes, 0), buffer
    return _answer(header, frames.ANSWER, wire, length, 0), buffer


def _answer(push: Header, kind: int, wire: int, length: int, flags: int) -> Header:
    return Header(kind, wire, flags, push.table, push.chunk, length)


def take_answer(table: LinkTable, part: Away, header: Header, buffer: Array, pool: Buffers) -> None:
    """Adds the home's answer to this host's copy.

    Raises:
        ProtocolError: it is not a coded difference; nothing has changed.
    """
    buffer = _decoded(part, header, buffer, pool)
    step = catch_up if header.kind == frames.VALUE else land
    table.held.copy.run(step, part.chunk, part.agreed, numbers(part, buffer))
    pool.give(buffer)


def take_back(table: LinkTable, part: Away, frame: UnderWay, pool: Buffers) -> None:
    """S goes back to what it was before a push that will never be answered."""
    if frame.header.length:
        buffer = _decoded(part, frame.header, frame.buffer, pool)
        with np.errstate(all="ignore"):
            part.agreed -= numbers(part, buffer)


def _coded(table: LinkTable, part: Away | Here, buffer: Array, frame: Array, pool: Buffers) -> tuple[int, int, Array]:
    """Codes a difference; S goes as far as the other side will read. Returns the format, bytes, and where they are."""
    coded = pool.take(codecs.longest(table.held.wire.number, frame.size, frame.itemsize))
    length = codecs.encode(table.held.wire, frame, coded)
    if length:
        table.held.copy.advance(part.agreed, frame)
    if length < 0:
        pool.give(coded)
        return codecs.NATIVE, frame.nbytes, buffer
    pool.give(buffer)
    return table.held.wire.number, length, coded


def _decoded(part: Away | Here, header: Header, buffer: Array, pool: Buffers) -> Array:
    if not header.length:
        numbers(part, buffer)[:] = 0
        return buffer
    if header.wire == codecs.NATIVE:
        return buffer
    plain = pool.take(part.agreed.nbytes)
    try:
        codecs.decode(header.wire, buffer[: header.length], numbers(part, plain))
    except ValueError as error:
        raise ProtocolError(f"a push or answer of chunk {part.chunk.number}: {error}") from error
    pool.give(buffer)
    return plain
