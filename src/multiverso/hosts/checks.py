"""What a header may say: checked before memory is taken for what it announces."""

from __future__ import annotations

from multiverso.hosts import frames, wires
from multiverso.hosts.books import Away, Here, LinkTable
from multiverso.hosts.frames import Header, ProtocolError

MOST_ANSWERS = 64  # of a peer whose window we do not know; a peer that sends more is not one of our nodes


def check_word(header: Header) -> None:
    """Of OPEN, CLOSE, NEWS and BYE.

    Raises:
        ProtocolError: no node sends this.
    """
    expected = frames.OPENED_BYTES if header.kind == frames.OPEN else 0
    if header.length != expected:
        raise ProtocolError(f"a frame of kind {header.kind} has {expected} bytes, not {header.length}")


def check_push(table: LinkTable, header: Header, answering: int) -> Here:
    """Returns whose push it is; ``answering``: how many of this peer's wait for an answer.

    Raises:
        ProtocolError: no node sends this.
    """
    part = table.here.get(header.chunk)
    if part is None:
        raise ProtocolError(f"chunk {header.chunk} of table {header.table} has its home elsewhere")
    if header.number not in (part.applied, part.applied + 1) or header.number == 0:
        raise ProtocolError(f"push {header.number} of a chunk of which {part.applied} was the last")
    if bool(header.flags & frames.FRESH) != (header.number == 1):
        raise ProtocolError("the first push of a chunk is fresh, and no other")
    if answering >= MOST_ANSWERS:
        raise ProtocolError(f"more than {MOST_ANSWERS} pushes wait for an answer")
    _check_size(part, header)
    return part


def check_answer(table: LinkTable, header: Header) -> Away:
    """Returns what it is an answer to.

    Raises:
        ProtocolError: no node sends this.
    """
    part = table.away.get(header.chunk)
    if part is None or part.frame is None or part.frame.header.number != header.number:
        raise ProtocolError(
            f"an answer to push {header.number} of chunk {header.chunk}, which is not under way"
        )
    if header.kind == frames.VALUE and header.wire != wires.NATIVE:
        raise ProtocolError("the agreed value itself travels as it is")
    _check_size(part, header)
    return part


def _check_size(part: Here | Away, header: Header) -> None:
    agreed, length = part.agreed, header.length
    if header.wire == wires.NATIVE and (length == 0 or length == agreed.nbytes):
        return
    if not wires.fits(header.wire, length, agreed.size, agreed.itemsize):
        raise ProtocolError(
            f"{length} bytes in wire format {header.wire} are no difference of {agreed.size} numbers"
        )
