"""Synchronous rounds between hosts: a chain over which each chunk's sum goes once up and once down. No sockets.

The hosts that are left stand in their order. A *turn* is one passage of a whole table through the chain. Turn 0 brings
the initial values; the others are the workers' *rounds*, counted from 1, and now and then a turn that overwrites the
values with one host's, which is no round of theirs. A *step* is one chunk of one turn; steps are counted through all
turns from 1, and every host goes through them one after another::

    host 0 (head)                 host 1                          host 2 (tail)
    t + its slots    SUM n ---->  + its slots    SUM n ------->   + its slots: the total
    takes it   <---- TOTAL n      takes it      <---- TOTAL n     takes it

So the additions have one order, that of the workers in host order, whatever the network does: the same bits as on one
host, in every run. Up and down together carry a chunk twice over each connection, one direction each, however many
workers there are; a window of steps is under way at a time.

A host adds a chunk when its own workers are ready for the round; who of them takes part is decided once, at the
round's first step. A sum is kept until its total has come, totals for as long as another host may still lack them (the
window). After a cut connection both sides say how far they are (AT) and continue from there.

When a host is lost the others form the chain without it: a new *epoch*. Sums under way are dropped and made again,
from the slots that are still there, except where somebody has the total already: totals go from the tail to the head,
so whoever has one is behind all that lack it in the chain, and sends it down. So all that are left get the same bits,
and a lost host's contributions are in the same chunks everywhere. The head is the coordinator's host; its loss ends
the job.

Any thread may call. ``memory_lock`` is held by whoever touches tables' memory, ``state_lock`` for a moment by whoever
reads or changes the state (``chain.py``, of a table ``state.py``); in this order, and peers are woken
without the latter. How the steps of what has come are gone through is in ``steps.py``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

from multiverso.errors import MultiversoError
from multiverso.hosts.peer.frames import Outgoing, ProtocolError
from multiverso.hosts.peer.resources import view
from multiverso.hosts.rounds import frames, refills
from multiverso.hosts.rounds.chain import Chain, ChainState
from multiverso.hosts.rounds.frames import (
    CONFIRMS,
    UNPLACED,
    Reached,
    RoundHeader,
    check_same,
    check_step,
    memory_for_word,
    step_frame,
    sum_of,
)
from multiverso.hosts.rounds.state import WINDOW, Giving, Refill, RoundTable, Staged
from multiverso.hosts.rounds.steps import ChainSteps


class Rounds:
    """This host's part in the rounds of all tables.

    Args:
        host: its number.
        live: the hosts of the job.
        wake: called with a peer's number when there may be something to send to it.
        moved: called when all totals of a turn have come.
    """

    def __init__(
        self, host: int, live: Sequence[int], wake: Callable[[int], None], moved: Callable[[], None] = lambda: None
    ) -> None:
        self.host = host
        self._state = ChainState(host, Chain(host, live, WINDOW), wake, moved)
        self._steps = ChainSteps(self._state)
        self.look, self.look_now = self._steps.look, self._steps.look_now

    def at_distance(self, peer: int, seconds: float) -> None:
        """Sets the shortest round-trip time to a host, in seconds."""
        self._state.chain.at_distance(peer, seconds)

    @property
    def live(self) -> list[int]:
        """The hosts of the chain."""
        return self._state.chain.live

    def begin_anew(self, live: Sequence[int], epoch: int) -> None:
        """In a host that takes a lost one's place, before any table: who is there, and how often that has changed."""
        with self._state.state_lock:
            self._state.chain.begin_anew(live, epoch)

    def regroup(self, live: Sequence[int]) -> None:
        """Continues without lost hosts, or with one that has come again; every host there has to call it alike."""
        with self._state.memory_lock, self._state.state_lock:
            self._state.chain.regroup(live)
            for table in self._state.tables.values():
                # their memory may be on its way to a peer: it is not used again
                table.sums.clear()
                table.incoming.clear()
                table.theirs.clear()
                table.folded = table.received = table.arrived
                table.told = 0
                refills.regrouped(table, self._state.chain.live)
            self._state.say_all()
        self._state.wake_neighbours()
        self.look_now()

    # -- tables ----------------------------------------------------------------------------------------------

    def attach(
        self, number: int, staged: Staged, *, blank: bool = False, overwrites: Mapping[int, int] | None = None
    ) -> None:
        """A table has been made. Its initial values go round once this host has said :meth:`begin`.

        Args:
            number: the table's, in the job.
            staged: how its memory is reached.
            blank: the other hosts have it already, and this one has none of its values until it asks: :meth:`refill`.
            overwrites: the last turns that were given to :meth:`overwrite` before this host came, and whose values.
        """
        with self._state.memory_lock, self._state.state_lock:
            if number in self._state.tables:
                raise MultiversoError(f"table {number} is attached already")
            self._state.closed.discard(number)
            self._state.tables[number] = table = RoundTable(
                number, staged, began=blank, blank=blank, placed=not blank, overwrites=dict(overwrites or {})
            )
            table.gives = self._state.early.pop(number, {})
            for peer in self._state.outboxes:
                self._state.say(peer, table)
        self._state.wake_neighbours()

    def begin(self, number: int) -> None:
        """What this host's workers have written as initial values is there."""
        with self._state.state_lock:
            table = self._state.tables[number]
            table.began = True
        self._steps.run(table)

    def is_whole(self, number: int) -> bool:
        """Returns whether the initial values of all hosts, and what :meth:`overwrite` has said last, are here."""
        with self._state.state_lock:
            table = self._state.tables.get(number)
            return table is None or table.arrived >= (table.awaited + 1) * table.chunks

    def turns(self) -> dict[int, int]:
        """Returns the first turn of each table that this host is not ready for, while its workers are at a barrier."""
        with self._state.state_lock:
            return {table.number: table.decided + 1 for table in self._state.tables.values() if not table.blank}

    def overwrite(self, number: int, host: int, turn: int, awaited: bool = True) -> None:
        """At a barrier: the values of a host, whose worker has overwritten them, become everybody's.

        Args:
            number: of the table.
            host: whose values.
            turn: of the head, which all that are behind it have to go through in its order: a reading that was given
                up can have made the head ready for a round that others are not ready for.
            awaited: whether all are as far as the head, so that `is_whole` can wait for the values.
        """
        with self._state.memory_lock, self._state.state_lock:
            table = self._state.tables.get(number)
            if table is None:
                return
            table.forget()
            table.overwrites[turn] = host
            if awaited:
                table.awaited = turn
        self._steps.run(table)

    def detach(self, number: int) -> None:
        """Forgets a table: its memory may be freed afterwards."""
        with self._state.memory_lock, self._state.state_lock:
            table = self._state.tables.pop(number, None)
            if table is not None:
                self._state.closed.add(number)
        if table is not None and table.refill is not None and not table.refill.over:
            table.refill.then(False)

    # -- a host that lacks the values ------------------------------------------------------------------------

    def refill(self, number: int, then: Callable[[bool], None]) -> None:
        """Begins no more turn of a table here, and gets its values from another host where they are not here.

        Args:
            number: of the table.
            then: called by any thread, with whether they are here; the next turn waits for :meth:`release`.
        """
        with self._state.memory_lock, self._state.state_lock:
            table = self._state.tables.get(number)
            known = table is not None and table.refill is not None and table.refill.over
            if table is not None and not known:
                table.refill = Refill(then)
        if table is None or known:
            then(known)
            return
        self._steps.run(table)

    def release(self, number: int) -> None:
        """Whoever waited for the values takes part from here on."""
        with self._state.memory_lock, self._state.state_lock:
            table = self._state.tables.get(number)
            if table is not None:
                table.refill = None
        if table is not None:
            self._steps.run(table)

    @property
    def numbers(self) -> set[int]:
        """The tables."""
        return set(self._state.tables)

    def __contains__(self, number: int) -> bool:
        return number in self._state.tables

    def __bool__(self) -> bool:
        return bool(self._state.tables)

    @property
    def passing(self) -> int:
        """Steps that have arrived of tables in the middle of a turn: what comes moves them, not workers."""
        with self._state.state_lock:
            tables = self._state.tables.values()
            return sum(table.arrived for table in tables if table.arrived < (table.decided + 1) * table.chunks)

    # -- connections -----------------------------------------------------------------------------------------

    def connect(self, peer: int) -> None:
        """A connection has begun; nothing came over it yet."""
        with self._state.state_lock:
            self._state.outboxes[peer] = deque()
            self._state.forget_questions(peer)
            for table in self._state.tables.values():
                table.theirs.discard(peer)
                self._state.say(peer, table)
                if table.refill is not None and table.refill.source == peer:
                    self._state.ask(table, peer)

    def cut(self, peer: int) -> None:
        """It has ended."""
        with self._state.state_lock:
            self._state.outboxes.pop(peer, None)
            self._state.forget_questions(peer)
            for table in self._state.tables.values():
                table.theirs.discard(peer)
                table.told = 0

    # -- sending ---------------------------------------------------------------------------------------------

    def may_have(self, peer: int) -> bool:
        """Returns whether there may be something to send: without a table, and what was said of it, there is not."""
        return bool(self._state.tables or self._state.outboxes.get(peer))

    def has(self, peer: int) -> bool:
        """Returns whether there is something to send."""
        with self._state.state_lock:
            return self._state.find(peer) is not None or self._state.asked_by(peer) is not None

    def next(self, peer: int, most: int) -> Outgoing | None:
        """Returns the next frame for a peer, unless its body has more bytes than that."""
        with self._state.state_lock:
            found = self._state.find(peer)
            if isinstance(found, Outgoing):
                if len(found.body) > most:
                    return None
                return self._state.outboxes[peer].popleft()
            if found is None:
                asked = self._state.asked_by(peer)
                return None if asked is None else refills.answer(asked, peer, most)
            table, kind, step, passed = found
            if passed.count and passed.length > most:
                return None
            if kind == frames.SUM:
                table.pushed = step
            else:
                table.returned = step
            return step_frame(kind, table, self._state.chain.epoch, step, passed)

    # -- receiving -------------------------------------------------------------------------------------------

    def accept(self, peer: int, header: RoundHeader) -> memoryview | None:
        """Checks a header; returns memory for its body, or None for one that nobody wants any more.

        Raises:
            ProtocolError: no node sends this.
        """
        if header.kind in (frames.AT, frames.WANT, frames.ASK):
            return memory_for_word(header)
        with self._state.state_lock:
            table = self._state.tables.get(header.table)
            if table is None:
                if header.table in self._state.closed:
                    return None
                raise ProtocolError(f"a step of table {header.table}, which this side has not opened")
            if header.kind == frames.FILL:
                return refills.room(table, peer, header, self._state.pool)
            from_whom = self._state.chain.before if header.kind == frames.SUM else self._state.chain.next
            if header.epoch != self._state.chain.epoch or peer != from_whom or peer not in table.theirs:
                return None
            last = table.received if header.kind == frames.SUM else table.arrived
            if header.number <= last:
                return None
            check_step(table, header, last)
            size = table.size(table.turn_and_chunk(header.number)[1])
            return view(self._state.pool.take(size), header.length)

    def arrived(self, peer: int, header: RoundHeader, body: memoryview) -> None:
        """A frame is whole.

        Raises:
            ProtocolError: it says that a table is another one.
        """
        if header.kind == frames.ASK:
            self._note_question(peer, header)
            return
        table = self._state.tables.get(header.table)
        if table is None:
            return  # opened there before it is here: it is said again when it is
        if header.kind == frames.AT:
            self._hear(peer, header, table, Reached.unpack(body))
        elif header.kind == frames.WANT:
            self._want(table, header.number)
        elif header.kind == frames.FILL:
            with self._state.memory_lock, self._state.state_lock:
                if self._state.tables.get(header.table) is table:
                    refills.take(table, peer, header, body, self._state.pool)
        elif header.kind == frames.SUM:
            found = sum_of(table, header, body)
            with self._state.state_lock:
                if header.epoch != self._state.chain.epoch or header.number != table.received + 1:
                    return
                table.incoming[header.number] = found
                table.received, table.known = header.number, max(table.known, found.known)
        else:
            with self._state.memory_lock:
                if header.epoch != self._state.chain.epoch or header.number != table.arrived + 1:
                    return
                if self._state.tables.get(header.table) is not table:
                    return
                self._steps.take(table, header.number, sum_of(table, header, body))
        self._steps.run(table)

    def _note_question(self, peer: int, header: RoundHeader) -> None:
        """Two hosts may come again at once, and one be through with that before the other has made the table."""
        giving = Giving(header.number, header.epoch, bool(header.flags & CONFIRMS))
        with self._state.state_lock:
            table = self._state.tables.get(header.table)
            if table is not None:
                table.gives[peer] = giving
            elif header.table not in self._state.closed:
                self._state.early.setdefault(header.table, {})[peer] = giving
        if table is not None:
            self._steps.run(table)

    def _hear(self, peer: int, header: RoundHeader, table: RoundTable, theirs: Reached) -> None:
        check_same(table, theirs, peer)
        told = {peer}
        with self._state.state_lock:
            if (
                header.epoch != self._state.chain.epoch
                or peer in table.theirs
                or peer not in (self._state.chain.before, self._state.chain.next)
            ):
                return
            if not header.flags & UNPLACED:
                if not table.placed and peer == self._state.chain.before:
                    refills.place(table, theirs)
                    told |= self._state.say_to_next(table)
                if not table.placed:
                    return  # it says so again when it has heard from here
                table.theirs.add(peer)
                if peer == self._state.chain.next:
                    table.pushed = theirs.received
                else:
                    table.returned = max(theirs.arrived, table.arrived - WINDOW)
            if table.placed:
                self._state.say(peer, table)  # when it was said before, the peer may not have had the table
        for other in told:
            self._state.wake(other)

    def _want(self, table: RoundTable, round_number: int) -> None:
        """Somebody behind waits for a round."""
        with self._state.state_lock:
            table.wanted = max(table.wanted, round_number)
            told = self._state.tell(table, round_number)
        if told is not None:
            self._state.wake(told)
