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
window). After a cut connection both sides say how far they are (AT) and go on from there.

When a host is lost the others form the chain without it: a new *epoch*. Sums under way are dropped and made again,
from the slots that are still there, except where somebody has the total already: totals go from the tail to the head,
so whoever has one is behind all that lack it in the chain, and sends it down. So all that are left get the same bits,
and a lost host's contributions are in the same chunks everywhere. The head is the coordinator's host; its loss ends
the job.

Any thread may call. ``_memory_lock`` is held by whoever touches tables' memory, ``_state_lock`` for a moment by whoever
reads or changes the books (``round_books.py``); in this order, and peers are woken without the latter.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from multiverso.errors import MultiversoError
from multiverso.hosts import frames, refills
from multiverso.hosts.books import Outgoing
from multiverso.hosts.buffers import Buffers, view
from multiverso.hosts.chain import Chain
from multiverso.hosts.frames import ProtocolError, Reached, RoundHeader
from multiverso.hosts.round_books import (
    NO_BYTES,
    WINDOW,
    Giving,
    Refill,
    RoundTable,
    Staged,
    Sum,
    numbers_of,
)
from multiverso.hosts.round_frames import (
    CONFIRMS,
    UNPLACED,
    at_frame,
    check_same,
    check_step,
    memory_for_word,
    step_frame,
    sum_of,
)

_PATIENCE_SECONDS = 0.01  # before the host before is told that somebody waits: it begins by itself as a rule


class Rounds:
    """This host's part in the rounds of all tables.

    Args:
        host: its number.
        live: the hosts of the job.
        wake: called with a peer's number when there may be something to send to it.
        moved: called when all totals of a turn have come.
    """

    def __init__(
        self,
        host: int,
        live: Sequence[int],
        wake: Callable[[int], None],
        moved: Callable[[], None] = lambda: None,
    ) -> None:
        self.host = host
        self._wake, self._moved = wake, moved
        self._chain = Chain(host, live, WINDOW)
        self._tables: dict[int, RoundTable] = {}
        self._closed: set[int] = set()
        self._early: dict[
            int, dict[int, Giving]
        ] = {}  # what others have asked for of tables that are not here yet
        self._outboxes: dict[int, deque[Outgoing]] = {}  # of each connected peer: what is not a sum
        self._pool = Buffers(2 * WINDOW)
        self._memory_lock = threading.RLock()
        self._state_lock = threading.RLock()

    def at_distance(self, peer: int, seconds: float) -> None:
        """Sets the shortest round-trip time to a host, in seconds."""
        self._chain.at_distance(peer, seconds)

    @property
    def live(self) -> list[int]:
        """The hosts of the chain."""
        return self._chain.live

    def begin_anew(self, live: Sequence[int], epoch: int) -> None:
        """In a host that takes a lost one's place, before any table: who is there, and how often that has changed."""
        with self._state_lock:
            self._chain.begin_anew(live, epoch)

    def regroup(self, live: Sequence[int]) -> None:
        """Goes on without lost hosts, or with one that has come again; every host there has to call it alike."""
        with self._memory_lock, self._state_lock:
            self._chain.regroup(live)
            for table in self._tables.values():
                # their memory may be on its way to a peer: it is not used again
                table.sums.clear()
                table.incoming.clear()
                table.theirs.clear()
                table.folded = table.received = table.arrived
                table.told = 0
                refills.regrouped(table, self._chain.live)
            self._say_all()
        self._wake_neighbours()
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
        with self._memory_lock, self._state_lock:
            if number in self._tables:
                raise MultiversoError(f"table {number} is attached already")
            self._closed.discard(number)
            self._tables[number] = table = RoundTable(
                number, staged, began=blank, blank=blank, placed=not blank, overwrites=dict(overwrites or {})
            )
            table.gives = self._early.pop(number, {})
            for peer in self._outboxes:
                self._say(peer, table)
        self._wake_neighbours()

    def begin(self, number: int) -> None:
        """What this host's workers have written as initial values is there."""
        with self._state_lock:
            table = self._tables[number]
            table.began = True
        self._run(table)

    def is_whole(self, number: int) -> bool:
        """Returns whether the initial values of all hosts, and what :meth:`overwrite` has said last, are here."""
        with self._state_lock:
            table = self._tables.get(number)
            return table is None or table.arrived >= (table.awaited + 1) * table.chunks

    def turns(self) -> dict[int, int]:
        """Returns the first turn of each table that this host is not ready for, while its workers are at a barrier."""
        with self._state_lock:
            return {table.number: table.decided + 1 for table in self._tables.values() if not table.blank}

    def overwrite(self, number: int, host: int, turn: int, awaited: bool = True) -> None:
        """At a barrier: the values of a host, whose worker has overwritten them, become everybody's.

        Args:
            number: of the table.
            host: whose values.
            turn: of the head, which all that are behind it have to go through in its order: a reading that was given
                up can have made the head ready for a round that others are not ready for.
            awaited: whether all are as far as the head, so that `is_whole` can wait for the values.
        """
        with self._memory_lock, self._state_lock:
            table = self._tables.get(number)
            if table is None:
                return
            table.forget()
            table.overwrites[turn] = host
            if awaited:
                table.awaited = turn
        self._run(table)

    def detach(self, number: int) -> None:
        """Forgets a table: its memory may be freed afterwards."""
        with self._memory_lock, self._state_lock:
            table = self._tables.pop(number, None)
            if table is not None:
                self._closed.add(number)
        if table is not None and table.refill is not None and not table.refill.over:
            table.refill.then(False)

    # -- a host that lacks the values ------------------------------------------------------------------------

    def refill(self, number: int, then: Callable[[bool], None]) -> None:
        """Begins no more turn of a table here, and gets its values from another host where they are not here.

        Args:
            number: of the table.
            then: called by any thread, with whether they are here; the next turn waits for :meth:`release`.
        """
        with self._memory_lock, self._state_lock:
            table = self._tables.get(number)
            known = table is not None and table.refill is not None and table.refill.over
            if table is not None and not known:
                table.refill = Refill(then)
        if table is None or known:
            then(known)
            return
        self._run(table)

    def release(self, number: int) -> None:
        """Whoever waited for the values takes part from here on."""
        with self._memory_lock, self._state_lock:
            table = self._tables.get(number)
            if table is not None:
                table.refill = None
        if table is not None:
            self._run(table)

    def _go_on_with_refill(self, table: RoundTable) -> None:
        with self._memory_lock, self._state_lock:
            if self._tables.get(table.number) is not table:
                return
            asked = refills.go_on(table, self.host, self._chain.live, self._chain.epoch)
            if asked is not None:
                self._ask(table, asked)
            ready = refills.look(table, self._chain.epoch)
        for peer in ready if asked is None else {*ready, asked}:
            self._wake(peer)

    def _ask(self, table: RoundTable, peer: int) -> None:
        if peer in self._outboxes and table.refill is not None and not table.refill.over:
            self._outboxes[peer].append(refills.question(table))

    @property
    def numbers(self) -> set[int]:
        """The tables."""
        return set(self._tables)

    def __contains__(self, number: int) -> bool:
        return number in self._tables

    def __bool__(self) -> bool:
        return bool(self._tables)

    @property
    def passing(self) -> int:
        """Steps that have arrived of tables in the middle of a turn: what comes moves them, not workers."""
        with self._state_lock:
            tables = self._tables.values()
            return sum(
                table.arrived for table in tables if table.arrived < (table.decided + 1) * table.chunks
            )

    # -- connections -----------------------------------------------------------------------------------------

    def connect(self, peer: int) -> None:
        """A connection has begun; nothing came over it yet."""
        with self._state_lock:
            self._outboxes[peer] = deque()
            self._forget_questions(peer)
            for table in self._tables.values():
                table.theirs.discard(peer)
                self._say(peer, table)
                if table.refill is not None and table.refill.source == peer:
                    self._ask(table, peer)

    def cut(self, peer: int) -> None:
        """It has ended."""
        with self._state_lock:
            self._outboxes.pop(peer, None)
            self._forget_questions(peer)
            for table in self._tables.values():
                table.theirs.discard(peer)
                table.told = 0

    def _forget_questions(self, peer: int) -> None:
        for gives in (*self._early.values(), *(table.gives for table in self._tables.values())):
            gives.pop(peer, None)

    def _say_all(self) -> None:
        for peer in self._outboxes:
            for table in self._tables.values():
                self._say(peer, table)

    def _say(self, peer: int, table: RoundTable) -> None:
        if peer in self._outboxes and peer in (self._chain.before, self._chain.next):
            self._outboxes[peer].append(at_frame(table, self._chain.epoch))

    def _wake_neighbours(self) -> None:
        for peer in (self._chain.before, self._chain.next):
            if peer is not None:
                self._wake(peer)

    # -- sending ---------------------------------------------------------------------------------------------

    def has(self, peer: int) -> bool:
        """Returns whether there is something to send."""
        with self._state_lock:
            return self._find(peer) is not None or self._asked_by(peer) is not None

    def next(self, peer: int, most: int) -> Outgoing | None:
        """Returns the next frame for a peer, unless its body has more bytes than that."""
        with self._state_lock:
            found = self._find(peer)
            if isinstance(found, Outgoing):
                if len(found.body) > most:
                    return None
                return self._outboxes[peer].popleft()
            if found is None:
                asked = self._asked_by(peer)
                return None if asked is None else refills.answer(asked, peer, most)
            table, kind, step, passed = found
            if passed.count and passed.length > most:
                return None
            if kind == frames.SUM:
                table.pushed = step
            else:
                table.returned = step
            return step_frame(kind, table, self._chain.epoch, step, passed)

    def _asked_by(self, peer: int) -> RoundTable | None:
        """A table whose values a peer has asked for and can have."""
        if peer not in self._outboxes:
            return None
        return next((table for table in self._tables.values() if refills.can_answer(table, peer)), None)

    def _find(self, peer: int) -> Outgoing | tuple[RoundTable, int, int, Sum] | None:
        outbox = self._outboxes.get(peer)
        if outbox is None:
            return None
        if outbox:
            return outbox[0]
        before, after = self._chain.before, self._chain.next
        for table in self._tables.values():
            if peer not in table.theirs:
                continue
            if peer == after:
                step = max(table.pushed, table.arrived) + 1
                found = table.sums.get(step)
                if found is not None:
                    return table, frames.SUM, step, found
            elif peer == before:
                step = table.returned + 1
                found = table.totals.get(step)
                if found is not None:
                    return table, frames.TOTAL, step, found
        return None

    # -- receiving -------------------------------------------------------------------------------------------

    def accept(self, peer: int, header: RoundHeader) -> memoryview | None:
        """Checks a header; returns memory for its body, or None for one that nobody wants any more.

        Raises:
            ProtocolError: no node sends this.
        """
        if header.kind in (frames.AT, frames.WANT, frames.ASK):
            return memory_for_word(header)
        with self._state_lock:
            table = self._tables.get(header.table)
            if table is None:
                if header.table in self._closed:
                    return None
                raise ProtocolError(f"a step of table {header.table}, which this side has not opened")
            if header.kind == frames.FILL:
                return refills.room(table, peer, header, self._pool)
            from_whom = self._chain.before if header.kind == frames.SUM else self._chain.next
            if header.epoch != self._chain.epoch or peer != from_whom or peer not in table.theirs:
                return None
            last = table.received if header.kind == frames.SUM else table.arrived
            if header.number <= last:
                return None
            check_step(table, header, last)
            size = table.size(table.turn_and_chunk(header.number)[1])
            return view(self._pool.take(size), header.length)

    def arrived(self, peer: int, header: RoundHeader, body: memoryview) -> None:
        """A frame is whole.

        Raises:
            ProtocolError: it says that a table is another one.
        """
        if header.kind == frames.ASK:
            self._note_question(peer, header)
            return
        table = self._tables.get(header.table)
        if table is None:
            return  # opened there before it is here: it is said again when it is
        if header.kind == frames.AT:
            self._hear(peer, header, table, Reached.unpack(body))
        elif header.kind == frames.WANT:
            self._want(table, header.number)
        elif header.kind == frames.FILL:
            with self._memory_lock, self._state_lock:
                if self._tables.get(header.table) is table:
                    refills.take(table, peer, header, body, self._pool)
        elif header.kind == frames.SUM:
            found = sum_of(table, header, body)
            with self._state_lock:
                if header.epoch != self._chain.epoch or header.number != table.received + 1:
                    return
                table.incoming[header.number] = found
                table.received, table.known = header.number, max(table.known, found.known)
        else:
            with self._memory_lock:
                if header.epoch != self._chain.epoch or header.number != table.arrived + 1:
                    return
                if self._tables.get(header.table) is not table:
                    return
                self._take(table, header.number, sum_of(table, header, body))
        self._run(table)

    def _note_question(self, peer: int, header: RoundHeader) -> None:
        """Two hosts may come again at once, and one be through with that before the other has made the table."""
        giving = Giving(header.number, header.epoch, bool(header.flags & CONFIRMS))
        with self._state_lock:
            table = self._tables.get(header.table)
            if table is not None:
                table.gives[peer] = giving
            elif header.table not in self._closed:
                self._early.setdefault(header.table, {})[peer] = giving
        if table is not None:
            self._run(table)

    def _hear(self, peer: int, header: RoundHeader, table: RoundTable, theirs: Reached) -> None:
        check_same(table, theirs, peer)
        told = {peer}
        with self._state_lock:
            if (
                header.epoch != self._chain.epoch
                or peer in table.theirs
                or peer not in (self._chain.before, self._chain.next)
            ):
                return
            if not header.flags & UNPLACED:
                if not table.placed and peer == self._chain.before:
                    refills.place(table, theirs)
                    told |= self._say_to_next(table)
                if not table.placed:
                    return  # it says so again when it has heard from here
                table.theirs.add(peer)
                if peer == self._chain.next:
                    table.pushed = theirs.received
                else:
                    table.returned = max(theirs.arrived, table.arrived - WINDOW)
            if table.placed:
                self._say(peer, table)  # when it was said before, the peer may not have had the table
        for other in told:
            self._wake(other)

    def _say_to_next(self, table: RoundTable) -> set[int]:
        if self._chain.next is None:
            return set()
        self._say(self._chain.next, table)
        return {self._chain.next}

    def _want(self, table: RoundTable, round_number: int) -> None:
        """Somebody behind waits for a round."""
        with self._state_lock:
            table.wanted = max(table.wanted, round_number)
            told = self._tell(table, round_number)
        if told is not None:
            self._wake(told)

    def _tell(self, table: RoundTable, round_number: int) -> int | None:
        """Asks the host before for a round; returns which host that is, or None where it need not be asked."""
        before = self._chain.before
        if before is None or before not in table.theirs or round_number <= table.told:
            return None
        table.told = round_number
        self._outboxes[before].append(
            Outgoing(RoundHeader(frames.WANT, table=table.number, number=round_number))
        )
        return before

    # -- going on --------------------------------------------------------------------------------------------

    def look(self, now: float) -> float | None:
        """Does what this host's workers are ready for; returns the seconds until it should be called again."""
        soonest: float | None = None
        for table in list(self._tables.values()):
            self._run(table)
            with self._state_lock:
                if self._tables.get(table.number) is not table:
                    continue  # its memory may be another's by now
                left, told = self._wish(table, now)
                if table.gives or (table.refill is not None and not table.refill.over):
                    left = _PATIENCE_SECONDS  # workers that make values of a sum say nothing when these are there
            if told is not None:
                self._wake(told)
            if left is not None:
                soonest = left if soonest is None else min(soonest, left)
        return soonest

    def look_now(self) -> None:
        """:meth:`look` without a clock: no wish for a round is passed on."""
        for table in list(self._tables.values()):
            self._run(table)

    def _wish(self, table: RoundTable, now: float) -> tuple[float | None, int | None]:
        """Whether somebody waits for a round that the head has not begun, as it may have no worker any more.

        Returns:
            the seconds after which that should be said, or None; the host that it was said to, or None.
        """
        round_number = table.wanted if table.blank else table.round_of(table.decided + 1)
        if self._chain.before is None or not table.is_wanted(round_number):
            table.waits_since = None
            return None, None
        if table.waits_since is None:
            table.waits_since = now
        left = table.waits_since + _PATIENCE_SECONDS - now
        told = self._tell(table, round_number) if left <= 0 else None
        return (None, told) if told is not None else (max(left, _PATIENCE_SECONDS), None)

    def _run(self, table: RoundTable) -> None:
        """Adds this host's part to whatever has come."""
        with self._memory_lock:
            while self._tables.get(table.number) is table and self._step(table):
                pass
        if table.refill is not None or table.gives:
            self._go_on_with_refill(table)

    def _step(self, table: RoundTable) -> bool:
        step = table.folded + 1
        heads, after = self._chain.before is None, self._chain.next
        with self._state_lock:
            if heads:
                found = None
                if step <= table.arrived + self._chain.ahead:
                    found = Sum(0, NO_BYTES, 0, known=table.arrived)
            else:
                found = table.incoming.get(step)
        turn, chunk = table.turn_and_chunk(step)
        members = None if found is None else table.members_if_ready(turn, found.overwrites, heads)
        if found is None or members is None:
            return False
        table.fix_members(turn, members)
        size = table.size(chunk)
        if found.buffer.size < size and not table.blank:
            found.buffer, found.length = self._pool.take(size), size
        total = numbers_of(table, found)
        round_number = table.round_of(turn)
        if table.blank:
            pass  # what comes passes on
        elif turn in table.overwrites:
            found.overwrites = True
            if table.overwrites[turn] == self.host:
                table.staged.written(chunk, total)
                found.count = 1
        elif after is None and round_number > 0:
            found.count = table.staged.finish(round_number, chunk, table.members, total, found.count)
            self._note_total(table, step, found)
            return True
        else:
            found.count = table.staged.fold(round_number, chunk, table.members, total, found.count)
        if after is None:
            self._take(table, step, found)
            return True
        with self._state_lock:
            table.incoming.pop(step, None)
            table.folded = step
            table.sums[step] = found
        self._wake(after)
        return True

    def _take(self, table: RoundTable, step: int, total: Sum) -> None:
        turn, chunk = table.turn_and_chunk(step)
        if table.blank:
            refills.gone_through(table, turn)
        elif turn not in table.overwrites:
            table.staged.take(table.round_of(turn), chunk, numbers_of(table, total), total.count)
        elif total.count:  # the host whose values they were may be lost
            table.staged.overwrite(chunk, numbers_of(table, total))
        self._note_total(table, step, total)

    def _note_total(self, table: RoundTable, step: int, total: Sum) -> None:
        """A step's total is where the workers read it, and goes to the host before until all have it."""
        before = self._chain.before
        with self._state_lock:
            table.arrived = step
            table.folded, table.received = max(table.folded, step), max(table.received, step)
            used = [table.sums.pop(step, None), table.incoming.pop(step, None)]
            if before is not None:
                table.totals[step] = total
            else:
                used.append(total)
            while table.totals and (oldest := next(iter(table.totals))) <= table.known:
                used.append(table.totals.pop(oldest))
            kept = table.totals.get(step)
            for found in used:
                # its receiver has it: the total came after it, or the head says so
                if found is not None and (kept is None or found.buffer is not kept.buffer):
                    self._pool.give(found.buffer)
        if before is not None:
            self._wake(before)
        if step % table.chunks == 0:
            self._moved()
