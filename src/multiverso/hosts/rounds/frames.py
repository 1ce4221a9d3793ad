"""What travels of a table's rounds, as ``rounds.py`` sends it, and what a neighbour may send."""

from __future__ import annotations

from multiverso.hosts.peer import frames
from multiverso.hosts.peer.buffers import owner
from multiverso.hosts.peer.frames import Outgoing, ProtocolError, Reached, RoundHeader
from multiverso.hosts.rounds.state import WINDOW, RoundTable, Sum
from multiverso.layout import MAX_WORKERS
from multiverso.spec import DTYPES

_OVERWRITES = 1  # flag of SUM and TOTAL: the values are overwritten by one host's
UNPLACED = 1  # of AT: this host will know how far it is when the receiver has said how far that is
CONFIRMS = 1  # of ASK: only whether totals have come here that are beyond it
HAS_NONE = 1  # of FILL: no values: this host lacks them, too, or was asked to confirm
AHEAD = 2  # of FILL: so many steps (`contributions`) have gone beyond what was asked for
_BEHIND_BITS = 8  # above these, of SUM: how many steps the last total that the head had is behind


def at_frame(table: RoundTable, epoch: int) -> Outgoing:
    """Returns what says how far this host is with a table, and which table that is."""
    elements, dtype, chunk = _what(table)
    body = Reached(table.arrived, table.received, elements, dtype, chunk).pack()
    flags = 0 if table.placed else UNPLACED
    header = RoundHeader(frames.AT, epoch, flags, table.number, length=len(body))
    return Outgoing(header, memoryview(body))


def check_same(table: RoundTable, theirs: Reached, peer: int) -> None:
    """Raises ProtocolError where a neighbour means another table by the same number."""
    if (theirs.elements, theirs.dtype, theirs.chunk) != _what(table):
        raise ProtocolError(f"table {table.number} is another one on host {peer}")


def _what(table: RoundTable) -> tuple[int, int, int]:
    staged = table.staged
    return staged.elements, DTYPES.index(staged.dtype.name), staged.chunk


def step_frame(kind: int, table: RoundTable, epoch: int, step: int, found: Sum) -> Outgoing:
    """Returns a step's SUM or TOTAL. Its body is the sum's own memory, not a copy."""
    body = found.body
    flags = _OVERWRITES if found.overwrites else 0
    if kind == frames.SUM:
        flags |= step - found.known << _BEHIND_BITS
    header = RoundHeader(kind, epoch, flags, table.number, found.count, len(body), step)
    return Outgoing(header, body)


def sum_of(table: RoundTable, header: RoundHeader, body: memoryview) -> Sum:
    """Returns what has come of a step, in the memory that it came into."""
    size = table.size(table.turn_and_chunk(header.number)[1])
    known = header.number - (header.flags >> _BEHIND_BITS)
    return Sum(header.contributions, owner(body), size, bool(header.flags & _OVERWRITES), known)


def memory_for_word(header: RoundHeader) -> memoryview:
    """Returns memory for the body of an AT, a WANT or an ASK.

    Raises:
        ProtocolError: the header announces another length.
    """
    expected = frames.REACHED_BYTES if header.kind == frames.AT else 0
    if header.length != expected:
        raise ProtocolError(f"a frame of kind {header.kind} has {expected} bytes, not {header.length}")
    return memoryview(bytearray(expected))


def check_step(table: RoundTable, header: RoundHeader, last: int) -> None:
    """Looks whether a SUM or TOTAL can be one of a table.

    Args:
        table: whose it is said to be.
        header: what was announced.
        last: the step before which one has come.

    Raises:
        ProtocolError: no node sends this.
    """
    step = header.number
    size = table.size(table.turn_and_chunk(step)[1])
    if step != last + 1 or step > table.arrived + WINDOW:
        raise ProtocolError(f"step {step} of table {header.table} came after step {last}")
    known = step - (header.flags >> _BEHIND_BITS)
    if header.kind == frames.SUM and not step - WINDOW <= known <= table.arrived:
        raise ProtocolError(
            f"the total {known} of table {header.table} is said to be known before step {step}, of {table.arrived}"
        )
    if header.length != (size if header.contributions else 0) or header.contributions > MAX_WORKERS:
        raise ProtocolError(
            f"{header.length} bytes cannot be a sum of {header.contributions} contributions to {size} bytes"
        )
