"""A host that lacks what a synchronous table holds: it takes a lost one's place, or had no worker to run the updater.

It holds the chain between two turns: what others begin passes no further than here, so that nobody's values change any
more. When all totals so far have come it *asks* a host, which answers, once its own workers are through with the round
(FILL), piece after piece: words, values, the updater's arrays. Then those who waited for them are made members of the
next round, and the chain continues (``Rounds.refill`` and ``release``)::

    this host, between turns t and t + 1        another one
    no step of t + 1 is begun
    all totals of t are here       ASK ---->    all totals of t are here, its workers have made them values
    writes them            <---- FILL, FILL
    its workers join round t + 1

One that is *blank* is a mere relay until then: it begins where the host before it is, keeps no more than the window,
and when hosts are lost or come it begins there again. What was under way when it came may have gone through the hosts
behind without it, and its totals are still to come back; so the tail is asked first whether anything has gone beyond,
and if it has, this host lets that turn pass. Then the head is asked for the values. It is the last to get a total: when
it answers, nobody lacks one of before any more, which this host could not send again.

Functions over the state of ``state.py``; the caller holds the locks of ``chain.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from multiverso.hosts.peer.frames import NOTHING, Outgoing, ProtocolError
from multiverso.hosts.peer.resources import Buffers, owner, view
from multiverso.hosts.rounds import frames
from multiverso.hosts.rounds.frames import AHEAD, CONFIRMS, HAS_NONE, Reached, RoundHeader
from multiverso.hosts.rounds.state import Refill, RoundTable

# -- a blank table in the chain ----------------------------------------------------------------------------


def place(table: RoundTable, before: Reached) -> None:
    """The host before has said how far it is: so far is this one."""
    table.arrived = table.folded = table.received = before.arrived
    table.decided = (before.arrived - 1) // table.chunks
    table.placed = True


def gone_through(table: RoundTable, turn: int) -> None:
    """A turn, or part of it, has gone through the others without this host: it passes here, too."""
    if turn > table.decided:
        table.decided = turn
        _ask_anew(table.refill)


def _ask_anew(refill: Refill | None) -> None:
    if refill is not None and not refill.over:
        refill.source, refill.confirmed = None, False
        refill.asked.clear()


def regrouped(table: RoundTable, live: Iterable[int]) -> None:
    """Other hosts are there than before."""
    refill = table.refill  # what others have asked for stays: one may return of whom this host hears later
    if table.blank:
        table.placed = False
        table.totals.clear()
    if refill is not None and (table.blank or refill.source not in set(live)):
        _ask_anew(refill)


# -- the host that asks ------------------------------------------------------------------------------------


def _last_step(table: RoundTable) -> int:
    """The last step of what was begun."""
    return (max(table.decided, 0) + 1) * table.chunks


def proceed(table: RoundTable, me: int, live: Sequence[int], epoch: int) -> int | None:
    """Looks whether values that are waited for are here, or who is to be asked for them: returns that host.

    Args:
        table: whose values.
        me: this host.
        live: all hosts, in their order.
        epoch: of the chain.
    """
    refill = table.refill
    if refill is None or refill.over or refill.source is not None:
        return None
    if not table.placed or table.arrived < _last_step(table):
        return None
    if not table.blank:
        complete = table.staged.complete(table.round_of(table.decided + 1) - 1)
        if complete is not False:
            if complete:
                _end(refill, here=True)
            return None
    refill.epoch = epoch
    if table.blank and not refill.confirmed and me != live[-1]:
        refill.source = live[-1]
        return refill.source
    refill.confirmed = True
    left = [host for host in live if host != me and host not in refill.asked]
    if not left:
        _end(refill, here=False)
        return None
    refill.source = left[0]
    refill.asked.add(left[0])
    return refill.source


def _end(refill: Refill, here: bool) -> None:
    refill.over = True
    refill.then(here)


def question(table: RoundTable) -> Outgoing:
    """Returns what asks for all of it, from the first piece on, or for a confirmation."""
    refill = table.refill
    assert refill is not None
    refill.piece = 0
    flags = 0 if refill.confirmed or not table.blank else CONFIRMS
    return Outgoing(RoundHeader(frames.ASK, refill.epoch, flags, table.number, number=_last_step(table)), NOTHING)


def _expects(table: RoundTable, peer: int, header: RoundHeader) -> bool:
    refill = table.refill
    if refill is None or refill.over:
        return False
    piece = refill.piece if not header.flags & AHEAD else header.contributions
    expected = (refill.source, refill.epoch, piece, _last_step(table))
    return expected == (peer, header.epoch, header.contributions, header.number)


def room(table: RoundTable, peer: int, header: RoundHeader, pool: Buffers) -> memoryview | None:
    """Returns memory for a piece, or None for one that was asked for before and is not wanted any more.

    Raises:
        ProtocolError: no node sends this.
    """
    if not _expects(table, peer, header):
        return None
    if header.flags & AHEAD and not header.flags & HAS_NONE:
        raise ProtocolError(f"a piece of table {header.table} that says how far its sender is")
    expected = 0 if header.flags & HAS_NONE else table.staged.pieces()[header.contributions]
    if header.length != expected:
        raise ProtocolError(
            f"piece {header.contributions} of table {header.table} has {expected} bytes, not {header.length}"
        )
    return view(pool.take(expected), expected) if expected else memoryview(bytearray(0))


def take(table: RoundTable, peer: int, header: RoundHeader, body: memoryview, pool: Buffers) -> None:
    """A piece has come."""
    refill = table.refill
    if refill is None or not _expects(table, peer, header):
        return
    if header.flags & HAS_NONE:
        refill.source = None
        if header.flags & AHEAD:
            gone_through(table, (header.number + header.contributions - 1) // table.chunks)
        else:
            refill.confirmed = True
        return
    buffer = owner(body)
    table.staged.put(refill.piece, buffer[: header.length])
    pool.give(buffer)
    refill.piece += 1
    if refill.piece < len(table.staged.pieces()):
        return
    turn, done = header.number // table.chunks, table.staged.filled()
    table.passed = turn - (done + 1) - sum(other < turn for other in table.overwrites)
    table.decided, table.blank = turn - 1, False
    _end(refill, here=True)


# -- the host that is asked --------------------------------------------------------------------------------


def look(table: RoundTable, epoch: int) -> set[int]:
    """Looks whether what others have asked for can be said now, in this epoch of the chain; returns to whom."""
    ready = set()
    for peer, giving in table.gives.items():
        if giving.ready is not None:
            continue
        if giving.confirms:
            if table.placed and epoch == giving.epoch and table.arrived >= giving.step:
                giving.ready = False
        elif table.blank:
            giving.ready = False
        elif table.arrived == giving.step:
            giving.ready = table.staged.complete(table.round_of(giving.step // table.chunks) - 1)
        if giving.ready is not None:
            ready.add(peer)
    return ready


def can_answer(table: RoundTable, peer: int) -> bool:
    """Returns whether there is something to send to a host that has asked."""
    giving = table.gives.get(peer)
    return giving is not None and giving.ready is not None


def answer(table: RoundTable, peer: int) -> Outgoing:
    """Returns the next piece for a host."""
    giving = table.gives[peer]
    sizes = table.staged.pieces()
    if not giving.ready:
        del table.gives[peer]
        ahead = table.arrived - giving.step if giving.confirms else 0
        flags = HAS_NONE | (AHEAD if ahead else 0)
        header = RoundHeader(frames.FILL, giving.epoch, flags, table.number, ahead, 0, giving.step)
        return Outgoing(header, NOTHING)
    piece, size = giving.piece, sizes[giving.piece]
    buffer = np.empty(size, np.uint8)
    table.staged.give(piece, buffer)
    giving.piece += 1
    if giving.piece == len(sizes):
        del table.gives[peer]
    header = RoundHeader(frames.FILL, giving.epoch, 0, table.number, piece, size, giving.step)
    return Outgoing(header, view(buffer, size))
