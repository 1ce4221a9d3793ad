"""Synchronous rounds between hosts: a chain over which each chunk's sum goes once up and once down. No sockets.

The hosts that are left stand in their order. A *turn* is one passage of a whole table through the chain. Turn 0
brings the initial values; the others are the workers' *rounds*, counted from 1, and now and then a turn that
overwrites the values with one host's or brings them to hosts that lack them, which is no round of theirs. A *step* is
one chunk of one turn; steps are counted through all turns from 1, and every host goes through them one after
another::

    host 0 (head)                 host 1                          host 2 (tail)
    t + its slots    SUM n ---->  + its slots    SUM n ------->   + its slots: the total
    takes it   <---- TOTAL n      takes it      <---- TOTAL n     takes it

So the additions have one order, that of the workers in host order, whatever the network does: the same bits as on one
host, in every run. Up and down together carry a chunk twice over each connection, one direction each, however many
workers there are; a window of steps is under way at a time.

A host adds a chunk when its own workers are ready for the round; who of them takes part is decided once, at the
round's first step. A sum is kept until its total has come, totals for as long as another host may still lack them (the
window). Two neighbours begin by saying how far they are (AT), and continue from there.

When a host is lost the others form the chain without it: a new *epoch*. Sums under way are dropped and made again, from
the slots that are still there, except where a host has the total already: totals go from the tail to the head, so a
host that has one is behind all that lack it in the chain, and sends it down. So all that are left get the same bits,
and a lost host's contributions are in the same chunks everywhere. The head is the coordinator's host; its loss ends the
job.

A host may lack the values: it takes a lost one's place, or had no worker to run the updater. The first is *blank*: a
mere relay that begins where the host before it is. When its workers ask for the table it asks the hosts before for a
turn that brings them (`FILL`), which the head begins when it can, and the first host in the chain that has the values
gives them. A host that waits for this turn lets no later one pass until its workers have joined; only a turn of which
it has seen the first step, and whose last total this chain has made, counts: what was under way when it came may have
gone through the hosts behind without it.

Any thread may call. ``memory_lock`` is held while tables' memory is touched, ``state_lock`` for a moment by a thread
that reads or changes the state (``chain.py``, of a table ``state.py``); in this order, and peers are woken without the
latter. What goes over each connection is in ``neighbour.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from multiverso.errors import MultiversoError
from multiverso.hosts.rounds import coding
from multiverso.hosts.rounds.chain import Chain
from multiverso.hosts.rounds.frames import came_frame
from multiverso.hosts.rounds.memory import RoundMemory
from multiverso.hosts.rounds.roll import Came
from multiverso.hosts.rounds.state import FILL, FILLS, NO_BYTES, OVERWRITES, Refill, RoundTable, Sum, numbers_of

_PATIENCE_SECONDS = 0.01  # before the host before learns that a worker waits: it begins by itself as a rule


class Rounds(Chain):
    """This host's part in the rounds of all tables."""

    def regroup(self, live: Sequence[int]) -> None:
        """Continues without lost hosts, or with one that has returned; every host there has to call it alike."""
        with self.memory_lock, self.state_lock:
            self.form(live, self.epoch + 1)
            for table in self.tables.values():
                # their memory may be on its way to a peer: it is not used again
                table.sums.clear()
                table.incoming.clear()
                table.theirs.clear()
                coding.made_again(table)
                for total in table.totals.values():
                    total.earlier = True
                table.folded = table.received = table.arrived
                table.expected = 0  # perhaps a lost host alone had it
                table.forget_requests()
                table.roll.told = {host: told for host, told in table.roll.told.items() if host in live}
                if table.blank:
                    table.placed = False
                    table.totals.clear()
                    table.ask_anew()
                for peer in self.ways:
                    self.report_progress(peer, table)
        self.wake_neighbours()
        for table in list(self.tables.values()):
            self.run(table)

    # -- tables ----------------------------------------------------------------------------------------------

    def attach(self, number: int, staged: RoundMemory, overwrites: Mapping[int, int] | None = None) -> None:
        """A table has been made. Its initial values go round once this host has said `begin`.

        Args:
            number: the table's, in the job.
            staged: how its memory is reached.
            overwrites: where the other hosts have it already: the last turns that were given to `overwrite` before this
                host came, and whose values. This one has none of its values until it asks: `refill`.
        """
        blank = overwrites is not None
        with self.memory_lock, self.state_lock:
            if number in self.tables:
                raise MultiversoError(f"table {number} is attached already")
            self.closed.discard(number)
            self.tables[number] = table = RoundTable(
                number, staged, began=blank, blank=blank, placed=not blank, overwrites=dict(overwrites or {})
            )
            for peer in self.ways:
                self.report_progress(peer, table)
        self.wake_neighbours()

    def begin(self, number: int) -> None:
        """What this host's workers have written as initial values is there."""
        with self.state_lock:
            table = self.tables[number]
            table.began = True
        self.run(table)

    def missing(self, number: int) -> int:
        """Returns how many chunks are not here: of all hosts' initial values, or what `overwrite` or `expect` said."""
        with self.state_lock:
            table = self.tables.get(number)
            if table is None:
                return 0
            return max(0, (max(table.awaited, table.expected) + 1) * table.chunks - table.arrived)

    def turns(self) -> dict[int, int]:
        """Returns the first turn of each table that this host is not ready for, while its workers are at a barrier."""
        with self.state_lock:
            return {table.number: table.next_turn for table in self.tables.values() if not table.blank}

    def turns_here(self) -> dict[int, int]:
        """Returns the last turn whose values are here, of each table with a quorum.

        Workers that have not come to a round may be in a barrier before its values are with them.
        """
        with self.memory_lock, self.state_lock:  # a worker may have read them before they are counted
            tables = [table for table in self.tables.values() if table.staged.by_quorum and not table.blank]
            return {table.number: table.arrived // table.chunks - 1 for table in tables}

    def expect(self, number: int, turn: int) -> None:
        """At a barrier: another host has the values of a turn, and `missing` tells when they are here."""
        with self.state_lock:
            table = self.tables.get(number)
            if table is not None and not table.blank:
                table.expected = turn

    def overwrite(self, number: int, host: int, turn: int, awaited: bool = True) -> None:
        """At a barrier: the values of a host, whose worker has overwritten them, become everybody's.

        Args:
            number: of the table.
            host: whose values.
            turn: of the head, which all that are behind it have to go through in its order: a reading that was given
                up can have made the head ready for a round that others are not ready for.
            awaited: whether all are as far as the head, so that `missing` tells when the values are here.
        """
        with self.memory_lock, self.state_lock:
            table = self.tables.get(number)
            if table is None:
                return
            table.forget()
            table.overwrites[turn] = host
            if awaited:
                table.awaited = turn
        self.run(table)

    def detach(self, number: int) -> None:
        """Forgets a table: its memory may be freed afterwards."""
        with self.memory_lock, self.state_lock:
            table = self.tables.pop(number, None)
            if table is not None:
                self.closed.add(number)
        if table is not None and table.refill is not None and not table.refill.over:
            table.refill.then(False)

    # -- a host that lacks the values ------------------------------------------------------------------------

    def refill(self, number: int, then: Callable[[bool], None]) -> None:
        """Begins no more turn of a table here, and gets its values from another host where they are not here.

        Args:
            number: of the table.
            then: called by any thread, with whether they are here; the next turn waits for `release`.
        """
        with self.memory_lock, self.state_lock:
            table = self.tables.get(number)
            known = table is not None and table.refill is not None and table.refill.over
            if table is not None and not known:
                table.refill = Refill(then)
        if table is None or known:
            then(known)
            return
        self.run(table)

    def release(self, number: int) -> None:
        """A worker that waited for the values takes part from here on."""
        with self.memory_lock, self.state_lock:
            table = self.tables.get(number)
            if table is not None:
                table.refill = None
        if table is not None:
            self.run(table)

    @property
    def passing(self) -> int:
        """Steps that have arrived of tables in the middle of a turn: what comes moves them, not workers."""
        with self.state_lock:
            tables = self.tables.values()
            return sum(table.arrived for table in tables if table.arrived < (table.decided + 1) * table.chunks)

    # -- going through the steps: this host adds its part to what has come, and takes totals -----------------

    def look(self, now: float) -> float | None:
        """Does what this host's workers are ready for; returns the seconds until it should be called again."""
        soonest: float | None = None
        for table in list(self.tables.values()):
            grace = self._call_roll(table, now) if table.staged.by_quorum else None
            self.run(table)
            with self.state_lock:
                if self.tables.get(table.number) is not table:
                    continue  # its memory may be another's by now
                left, asked = self._request_late_round(table, now)
                if table.filling or (table.refill is not None and not table.refill.over):
                    left = _PATIENCE_SECONDS  # workers that make values of a sum say nothing when these are there
            if asked is not None:
                self.wake(asked)
            soonest = min((wait for wait in (soonest, left, grace) if wait is not None), default=None)
        return soonest

    def _call_roll(self, table: RoundTable, now: float) -> float | None:
        """Counts who has come here to the next round, and tells the head; returns how long its grace lasts."""
        head = self.live[0]
        with self.memory_lock, self.state_lock:
            number = table.next_round if self.tables.get(table.number) is table else None
            if number is None:
                return None
            came = number, table.staged.who_came(number)
            if self.host == head:
                table.roll.told[head] = came
                return table.roll.close(number, self.live, now)
            if table.said == came:
                return None
            table.said = came
            self.ways[head].post(came_frame(table, *came))
        self.wake(head)
        return None

    def note_came(self, table: RoundTable, peer: int, number: int, came: Came, now: float) -> None:
        """Another host has told this one, the head, who has come to a round."""
        with self.state_lock:
            table.roll.told[peer] = number, came
            due = table.next_round
            left = None if due is None else table.roll.close(due, self.live, now)
        if left is not None:
            table.staged.wake()  # who looks after each event: it knows how long

    def _request_late_round(self, table: RoundTable, now: float) -> tuple[float | None, int | None]:
        """Whether a worker waits for a round that the head has not begun: it may have no worker left.

        Returns:
            the seconds after which to ask for it, or None; the host that was asked, or None.
        """
        round_number = table.wanted if table.blank else table.round_of(table.decided + 1)
        if self.before is None or not table.is_wanted(round_number):
            table.waits_since = None
            return None, None
        if table.waits_since is None:
            table.waits_since = now
        left = table.waits_since + _PATIENCE_SECONDS - now
        asked = self.request_round(table, round_number) if left <= 0 else None
        return (None, asked) if asked is not None else (max(left, _PATIENCE_SECONDS), None)

    def run(self, table: RoundTable) -> None:
        """Adds this host's part to whatever has come."""
        with self.memory_lock:
            while self.tables.get(table.number) is table and (self._step(table) or self._refill(table)):
                pass

    def _step(self, table: RoundTable) -> bool:
        step = table.folded + 1
        heads, after = self.before is None, self.next
        with self.state_lock:
            found = table.incoming.get(step)
            if heads and step <= table.arrived + self.ahead:
                found = Sum(0, NO_BYTES, 0, known=table.arrived)
        turn, chunk = table.turn_and_chunk(step)
        if found is None:
            return False
        if found.overwrites == FILLS:
            table.overwrites[turn] = FILL
        members = table.members_if_ready(turn, bool(found.overwrites), heads)
        if members is None:
            return False
        if turn in table.overwrites:
            found.overwrites = FILLS if table.overwrites[turn] == FILL else OVERWRITES
        if found.overwrites == FILLS and not self._may_pass(table, turn, chunk, found):
            return False
        table.fix_members(turn, members)
        size = table.size_of(step, found.overwrites)
        if found.buffer.size < size and not table.blank:
            found.buffer, found.length = self.pool.take(size), size
        room = coding.room_for(table, step, self.pool) if table.is_coded(step) and not table.blank else None
        total = numbers_of(table, found)
        round_number = table.round_of(turn)
        if table.blank:
            pass  # what comes passes on
        elif found.overwrites == FILLS:
            if not found.count and table.staged.complete(round_number - 1):
                table.staged.give(chunk, found.buffer[:size])
                found.count = 1
        elif turn in table.overwrites:
            if table.overwrites[turn] == self.host:
                table.staged.written(chunk, total)
                found.count = 1
        elif after is None and round_number > 0 and room is None:
            found.count = table.staged.finish(round_number, chunk, table.members, total, found.count)
            self._note_total(table, step, found)
            return True
        else:
            found.count = table.staged.fold(round_number, chunk, table.members, total, found.count)
        plain = found if room is None else coding.code(table, step, found, room, self.pool)
        if after is None:
            self.take(table, step, found, plain)
            return True
        if plain is not found:
            self.pool.give(plain.buffer)
        with self.state_lock:
            table.incoming.pop(step, None)
            table.folded = step
            table.sums[step] = found
            self.pass_on(table)
        self.wake(after)
        return True

    def take(self, table: RoundTable, step: int, total: Sum, plain: Sum) -> None:
        """A step's total is here, and ``plain``, not coded. The caller has the memory lock."""
        turn, chunk = table.turn_and_chunk(step)
        if table.blank and turn > table.decided:  # it has gone through the others without this host
            table.decided = turn
            table.ask_anew()
        if total.overwrites == FILLS:
            self._take_values(table, turn, chunk, total)
        elif table.blank:
            pass
        elif turn not in table.overwrites:
            table.staged.take(table.round_of(turn), chunk, numbers_of(table, plain), total.count)
        elif total.count:  # the host whose values they were may be lost
            table.staged.overwrite(chunk, numbers_of(table, total))
        if plain is not total:
            self.pool.give(plain.buffer)
        self._note_total(table, step, total)

    def _note_total(self, table: RoundTable, step: int, total: Sum) -> None:
        """A step's total is where the workers read it, and goes to the host before until all have it."""
        before = self.before
        coding.keep_rest(table, step, total)
        with self.state_lock:
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
                    self.pool.give(found.buffer)
            self.pass_on(table)
        if before is not None:
            self.wake(before)
        if step % table.chunks == 0:
            self.moved()

    # -- a turn that brings the values to those that lack them -------------------------------------------------

    def _refill(self, table: RoundTable) -> bool:
        """Looks whether values that are wanted are here, and asks for them. Returns whether there is another step."""
        refill = table.refill
        if refill is None and table.lacking is None:
            return False
        with self.state_lock:
            if refill is not None and not refill.over and refill.since is None:
                if table.blank:
                    complete: bool | None = False if table.placed else None
                else:
                    all_here = table.arrived >= (max(table.decided, 0) + 1) * table.chunks
                    complete = table.staged.complete(table.round_of(table.decided + 1) - 1) if all_here else None
                if complete:
                    refill.over = True
                    refill.then(True)
                elif complete is False:
                    refill.since = table.lacking = table.decided
            asked = self.request_values(table)
        if asked is not None and asked != self.host:
            self.wake(asked)
        return asked == self.host

    def _may_pass(self, table: RoundTable, turn: int, chunk: int, found: Sum) -> bool:
        """A step of such a turn is here: those who have the values give them, where no host before has."""
        refill = table.refill
        if refill is not None and not refill.over and turn > table.decided and refill.since is not None:
            if chunk == 0:
                refill.turn, refill.here = turn, True
            else:
                table.ask_anew()  # the first chunks have gone through without this host
        if table.blank or found.count > 0:
            return True
        if table.arrived < turn * table.chunks:
            return False  # one that overwrites the values may be on its way
        return table.staged.complete(table.round_of(turn) - 1) is not None

    def _take_values(self, table: RoundTable, turn: int, chunk: int, total: Sum) -> None:
        refill = table.refill
        if refill is None or refill.over or refill.turn != turn:
            return
        refill.here &= total.count > 0
        if refill.here:
            table.staged.put(chunk, total.buffer[: total.length])
        if chunk < table.chunks - 1:
            return
        if total.earlier:  # rounds may have followed it without this host
            table.ask_anew()
            return
        if refill.here:
            done = table.staged.filled()
            table.passed = turn - done - sum(other <= turn for other in table.overwrites)
            table.blank = False
        refill.over = True
        refill.then(refill.here)
