"""Going through the steps of rounds: this host adds its part to what has come, and takes totals. See ``rounds.py``."""

from __future__ import annotations

from multiverso.hosts.rounds import refills
from multiverso.hosts.rounds.chain import ChainState
from multiverso.hosts.rounds.state import NO_BYTES, RoundTable, Sum, numbers_of

_PATIENCE_SECONDS = 0.01  # before the host before is told that somebody waits: it begins by itself as a rule


class ChainSteps:
    """What this host's workers are ready for, and what has come, is done here. Any thread may call.

    Args:
        state: of this host.
    """

    def __init__(self, state: ChainState) -> None:
        self._state = state

    def look(self, now: float) -> float | None:
        """Does what this host's workers are ready for; returns the seconds until it should be called again."""
        soonest: float | None = None
        for table in list(self._state.tables.values()):
            self.run(table)
            with self._state.state_lock:
                if self._state.tables.get(table.number) is not table:
                    continue  # its memory may be another's by now
                left, told = self._wish(table, now)
                if table.gives or (table.refill is not None and not table.refill.over):
                    left = _PATIENCE_SECONDS  # workers that make values of a sum say nothing when these are there
            if told is not None:
                self._state.wake(told)
            if left is not None:
                soonest = left if soonest is None else min(soonest, left)
        return soonest

    def look_now(self) -> None:
        """:meth:`look` without a clock: no wish for a round is passed on."""
        for table in list(self._state.tables.values()):
            self.run(table)

    def _wish(self, table: RoundTable, now: float) -> tuple[float | None, int | None]:
        """Whether somebody waits for a round that the head has not begun, as it may have no worker any more.

        Returns:
            the seconds after which that should be said, or None; the host that it was said to, or None.
        """
        round_number = table.wanted if table.blank else table.round_of(table.decided + 1)
        if self._state.chain.before is None or not table.is_wanted(round_number):
            table.waits_since = None
            return None, None
        if table.waits_since is None:
            table.waits_since = now
        left = table.waits_since + _PATIENCE_SECONDS - now
        told = self._state.tell(table, round_number) if left <= 0 else None
        return (None, told) if told is not None else (max(left, _PATIENCE_SECONDS), None)

    def run(self, table: RoundTable) -> None:
        """Adds this host's part to whatever has come."""
        with self._state.memory_lock:
            while self._state.tables.get(table.number) is table and self._step(table):
                pass
        if table.refill is not None or table.gives:
            self._proceed_with_refill(table)

    def _step(self, table: RoundTable) -> bool:
        step = table.folded + 1
        heads, after = self._state.chain.before is None, self._state.chain.next
        with self._state.state_lock:
            if heads:
                found = None
                if step <= table.arrived + self._state.chain.ahead:
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
            found.buffer, found.length = self._state.pool.take(size), size
        total = numbers_of(table, found)
        round_number = table.round_of(turn)
        if table.blank:
            pass  # what comes passes on
        elif turn in table.overwrites:
            found.overwrites = True
            if table.overwrites[turn] == self._state.host:
                table.staged.written(chunk, total)
                found.count = 1
        elif after is None and round_number > 0:
            found.count = table.staged.finish(round_number, chunk, table.members, total, found.count)
            self._note_total(table, step, found)
            return True
        else:
            found.count = table.staged.fold(round_number, chunk, table.members, total, found.count)
        if after is None:
            self.take(table, step, found)
            return True
        with self._state.state_lock:
            table.incoming.pop(step, None)
            table.folded = step
            table.sums[step] = found
        self._state.wake(after)
        return True

    def take(self, table: RoundTable, step: int, total: Sum) -> None:
        """A step's total is here. Whoever calls has the memory lock."""
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
        before = self._state.chain.before
        with self._state.state_lock:
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
                    self._state.pool.give(found.buffer)
        if before is not None:
            self._state.wake(before)
        if step % table.chunks == 0:
            self._state.moved()

    def _proceed_with_refill(self, table: RoundTable) -> None:
        with self._state.memory_lock, self._state.state_lock:
            if self._state.tables.get(table.number) is not table:
                return
            asked = refills.proceed(table, self._state.host, self._state.chain.live, self._state.chain.epoch)
            if asked is not None:
                self._state.ask(table, asked)
            ready = refills.look(table, self._state.chain.epoch)
        for peer in ready if asked is None else {*ready, asked}:
            self._state.wake(peer)
