"""The frames of rounds that go over the connection to another host: what is sent there, and what comes from there."""

from __future__ import annotations

from multiverso.hosts.peer.frames import Header, Numbered, ProtocolError, memory_for, unknown
from multiverso.hosts.peer.resources import view
from multiverso.hosts.rounds import frames, roll
from multiverso.hosts.rounds.coding import decoded
from multiverso.hosts.rounds.frames import (
    KINDS,
    LACKING,
    REACHED,
    UNPLACED,
    Reached,
    RoundHeader,
    check_same,
    check_step,
    sum_of,
)
from multiverso.hosts.rounds.roll import Came
from multiverso.hosts.rounds.rounds import Rounds
from multiverso.hosts.rounds.state import WINDOW, RoundTable, Sum

_SIZES = {frames.AT: REACHED.size, frames.WANT: 0, frames.CAME: roll.CAME.size}


class Neighbour(Numbered):
    """This host's end of a pair, for rounds.

    Args:
        rounds: of this host, which send over it what they have for the peer.
        peer: the other host's number.
    """

    def __init__(self, rounds: Rounds, peer: int) -> None:
        super().__init__(rounds.pool)
        self._rounds, self._peer = rounds, peer
        with rounds.state_lock:
            rounds.ways[peer] = self
            for table in rounds.tables.values():
                rounds.report_progress(peer, table)

    def at_distance(self, seconds: float) -> None:
        """Sets the shortest round-trip time to the peer."""
        self._rounds.at_distance(self._peer, seconds)

    # -- receiving -------------------------------------------------------------------------------------------

    def accept(self, header: Header) -> memoryview | None:
        """Checks a header; returns memory for its body, or None for one that is no longer wanted.

        Raises:
            ProtocolError: no node sends this.
        """
        rounds, peer, header = self._rounds, self._peer, RoundHeader(*header)
        if header.kind not in KINDS:
            raise unknown(header)
        if not self.is_new(header):
            return None
        if header.kind in _SIZES:
            return memory_for(header, _SIZES[header.kind])
        with rounds.state_lock:
            table = rounds.tables.get(header.table)
            if table is None:
                if header.table in rounds.closed:
                    return None
                raise ProtocolError(f"a step of table {header.table}, which this side has not opened")
            from_whom = rounds.before if header.kind == frames.SUM else rounds.next
            if header.epoch != rounds.epoch or peer != from_whom or peer not in table.theirs:
                return None
            last = table.received if header.kind == frames.SUM else table.arrived
            if header.step <= last:
                return None
            check_step(table, header, last)
            size = table.size_of(header.step, header.overwrites)
            return view(rounds.pool.take(max(size, header.length)), header.length)

    def arrived(self, header: Header, body: memoryview | None, now: float) -> bool:
        """A frame is whole. What it has left to send was sent, by the ``wake`` of the rounds.

        Raises:
            ProtocolError: it says that a table is another one, or is not a coded sum.
            MemoryError: it comes again.
        """
        if header.number > self._received:
            header = RoundHeader(*header)
            plain = self._decoded(header, body) if body is not None else None
            self.note(header)  # it does not come again, also where there is no memory now to go on with it
            if body is not None:
                self._take(header, body, plain, now)
        return self.has_something

    def _decoded(self, header: RoundHeader, body: memoryview) -> Sum | None:
        """Returns what a sum or total says, if it is still wanted; in memory of its own if it was coded."""
        if header.kind not in (frames.SUM, frames.TOTAL):
            return None
        rounds = self._rounds
        with rounds.state_lock:
            table = rounds.tables.get(header.table)
            if table is None or header.epoch != rounds.epoch:
                return None
            if header.step != (table.received if header.kind == frames.SUM else table.arrived) + 1:
                return None
        found, is_total = sum_of(table, header, body), header.kind == frames.TOTAL
        plain = decoded(table, header.step, found, rounds.pool, apart=is_total)
        if plain is not found and not is_total:
            rounds.pool.give(found.buffer)
        return plain

    def _take(self, header: RoundHeader, body: memoryview, plain: Sum | None, now: float) -> None:
        rounds = self._rounds
        table = rounds.tables.get(header.table)
        if table is None:
            return  # opened there before it is here: it is said again when it is
        if header.kind == frames.AT:
            self._hear(header, table, Reached(*REACHED.unpack(body)))
        elif header.kind == frames.WANT:
            self._want(table, header)
        elif header.kind == frames.CAME:
            rounds.note_came(table, self._peer, header.step, Came(*roll.CAME.unpack(body)), now)
        elif header.kind == frames.SUM:
            with rounds.state_lock:
                if plain is None or header.epoch != rounds.epoch or header.step != table.received + 1:
                    return
                table.incoming[header.step] = plain
                table.received, table.known = header.step, max(table.known, plain.known)
        else:
            with rounds.memory_lock:
                if plain is None or header.epoch != rounds.epoch or header.step != table.arrived + 1:
                    return
                if rounds.tables.get(header.table) is not table:
                    return
                total = sum_of(table, header, body)
                if plain.buffer is total.buffer:
                    total = plain
                self._rounds.take(table, header.step, total, plain)
        self._rounds.run(table)

    def _hear(self, header: RoundHeader, table: RoundTable, theirs: Reached) -> None:
        """The peer says how far it is."""
        rounds, peer = self._rounds, self._peer
        check_same(table, theirs, peer)
        peers = {peer}
        with rounds.state_lock:
            near = peer in (rounds.before, rounds.next)
            if header.epoch != rounds.epoch or peer in table.theirs or not near:
                return
            if not header.flags & UNPLACED:
                if not table.placed and peer == rounds.before:
                    table.place(theirs.arrived)
                    if rounds.next is not None:
                        rounds.report_progress(rounds.next, table)
                        peers.add(rounds.next)
                if not table.placed:
                    return  # it says so again once it knows about this host
                table.theirs.add(peer)
                if peer == rounds.next:
                    table.pushed = theirs.received
                else:
                    table.returned = max(theirs.arrived, table.arrived - WINDOW)
            if table.placed:
                rounds.report_progress(peer, table)  # when it was said before, the peer may not have had the table
            rounds.pass_on(table)
        for other in peers:
            rounds.wake(other)

    def _want(self, table: RoundTable, header: RoundHeader) -> None:
        """A host behind waits for a round, or lacks the values."""
        with self._rounds.state_lock:
            if header.flags & LACKING:
                table.lacking = max(header.step - 1, -1 if table.lacking is None else table.lacking)
                return
            table.wanted = max(table.wanted, header.step)
            asked = self._rounds.request_round(table, header.step)
        if asked is not None:
            self._rounds.wake(asked)
