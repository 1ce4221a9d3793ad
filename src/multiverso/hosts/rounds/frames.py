"""What travels of a table's rounds, as ``rounds.py`` sends it, and what a neighbour may send."""

from __future__ import annotations

import struct
from typing import NamedTuple

from multiverso.hosts import codecs
from multiverso.hosts.peer.frames import RECEIVED, Header, Outgoing, ProtocolError
from multiverso.hosts.peer.resources import owner
from multiverso.hosts.rounds import roll
from multiverso.hosts.rounds.roll import Came
from multiverso.hosts.rounds.state import WINDOW, RoundTable, Sum
from multiverso.spec.table import DTYPES

# kinds: along the chain of hosts, see rounds.py
AT = 8  # both: how far this side is
SUM = 9  # to the next host: the sum so far
TOTAL = 10  # to the host before: the sum of all hosts
WANT = 11  # to the host before: a worker waits for round `step`
CAME = 12  # to the head, with a quorum: how many have come to round `step`
KINDS = frozenset((AT, SUM, TOTAL, WANT, CAME, RECEIVED))

UNPLACED = 1  # flag of AT: this host will know how far it is when the receiver has said how far that is
LACKING = 1  # of WANT: a host lacks the values, and turn `step` or a later one has to bring them
# of SUM and TOTAL: `state.OVERWRITES` and `FILLS`; above these bits, of SUM: by how many steps the head's last total is
# behind
EARLIER = 4  # of TOTAL, see `Sum`
_CODE_BITS, _CODES = 3, 0b111  # how the body is coded
_BEHIND_BITS = 8
_KINDS_OF_TURN = 0b11


class RoundHeader(Header):
    """A header of these frames: what others use for the codec and the chunk has another meaning.

    Attributes:
        step: of WANT and CAME the round.
    """

    __slots__ = ()

    @property
    def epoch(self) -> int:
        """How often the hosts have formed a new chain, modulo 256."""
        return self.wire

    @property
    def contributions(self) -> int:
        """Of SUM and TOTAL: how many workers' there are in it, each as its weight."""
        return self.chunk

    @property
    def overwrites(self) -> int:
        """Of SUM and TOTAL: see `Sum`."""
        return self.flags & _KINDS_OF_TURN

    @property
    def code(self) -> int:
        """Of SUM and TOTAL: the number of the format in which the body is."""
        return self.flags >> _CODE_BITS & _CODES


REACHED = struct.Struct("!QQQII")


class Reached(NamedTuple):
    """The body of AT, in which it travels as `REACHED`.

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


def at_frame(table: RoundTable, epoch: int) -> Outgoing:
    """Returns what says how far this host is with a table, and which table that is."""
    body = REACHED.pack(table.arrived, table.received, *_what(table))
    flags = 0 if table.placed else UNPLACED
    header = RoundHeader(AT, epoch, flags, table.number, length=len(body))
    return Outgoing(header, memoryview(body))


def came_frame(table: RoundTable, number: int, came: Came) -> Outgoing:
    """Returns what tells the head who of this host has come to a round."""
    body = roll.CAME.pack(*came)
    return Outgoing(RoundHeader(CAME, table=table.number, length=len(body), step=number), memoryview(body))


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
    flags = found.overwrites | found.code << _CODE_BITS
    if kind == SUM:
        flags |= step - found.known << _BEHIND_BITS
    elif found.earlier:
        flags |= EARLIER
    header = RoundHeader(kind, epoch, flags, table.number, found.count, len(body), step)
    return Outgoing(header, body)


def sum_of(table: RoundTable, header: RoundHeader, body: memoryview) -> Sum:
    """Returns what has come of a step, in the memory that it came into."""
    known = header.step - (header.flags >> _BEHIND_BITS)
    length = header.length if header.contributions else table.size_of(header.step, header.overwrites)
    earlier = bool(header.flags & EARLIER)
    return Sum(header.contributions, owner(body), length, header.overwrites, known, earlier, header.code)


def check_step(table: RoundTable, header: RoundHeader, last: int) -> None:
    """Looks whether a SUM or TOTAL can be one of a table.

    Args:
        table: whose it is said to be.
        header: what was announced.
        last: the step before which one has come.

    Raises:
        ProtocolError: no node sends this.
    """
    step = header.step
    size = table.size_of(step, header.overwrites)
    if step != last + 1 or step > table.arrived + WINDOW:
        raise ProtocolError(f"step {step} of table {header.table} came after step {last}")
    known = step - (header.flags >> _BEHIND_BITS)
    if header.kind == SUM and not step - WINDOW <= known <= table.arrived:
        raise ProtocolError(
            f"the total {known} of table {header.table} is said to be known before step {step}, of {table.arrived}"
        )
    if header.code != codecs.NATIVE and header.contributions:
        extra = table.staged.extra * table.staged.dtype.itemsize
        itemsize = table.staged.dtype.itemsize
        as_announced = table.is_coded(header.step) and not header.overwrites
        as_announced &= header.code == table.staged.wire.number
        numbers, coded = (size - extra) // itemsize, header.length - extra
        as_announced &= coded >= 0 and codecs.fits(header.code, coded, numbers, itemsize)
    else:
        as_announced = header.code == codecs.NATIVE and header.length == (size if header.contributions else 0)
    if not as_announced:
        raise ProtocolError(
            f"{header.length} bytes cannot be a sum of {header.contributions} contributions to {size} bytes"
        )
