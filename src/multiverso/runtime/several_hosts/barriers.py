"""Barriers between hosts, on each of them: when its workers are all there, and have gone, and when they may continue.

Before a host says so, what its workers have added is brought to the homes; before it lets them go, what the others
have brought is taken. A *gathering* is the same without a wait: one host asks for what the others have not sent yet.
"""

from __future__ import annotations

from collections.abc import Callable

from multiverso.hosts.control.messages import Bring, Gather, Gone, Report, Settled, Take
from multiverso.layout import words as at
from multiverso.memory.words import load64
from multiverso.runtime.several_hosts.exchanged_tables import ExchangedTables
from multiverso.runtime.several_hosts.this_host import ThisHost


class HostBarriers:
    """Owner: the node's thread; what moves values runs in the thread for that.

    Args:
        here: this host.
        tables: what is moved between the hosts, and by what.
        comes_again: whether another process may come for a worker of this host that died.
    """

    def __init__(self, here: ThisHost, tables: ExchangedTables, comes_again: Callable[[int], bool]) -> None:
        self._here, self._tables, self._comes_again = here, tables, comes_again
        self._released = self._settling = 0
        self._gone = False
        self._written: dict[int, int] = {}  # how often each synchronous table was overwritten here

    def begin_at(self, barrier: int) -> None:
        """In a host that takes a lost one's place: the others have passed so many."""
        self._released = self._settling = barrier
        self._here.control.release(barrier)

    # -- what this host's workers do -------------------------------------------------------------------------

    def look(self) -> None:
        """Looks whether all workers of this host have reached a barrier, or all have gone."""
        workers = [w for w in map(self._here.control.worker, self._here.roster.local) if w.liveness != at.FREE]
        live = [w for w in workers if w.is_live]
        barrier = self._released + 1
        reached = all(worker.barrier >= barrier for worker in live)
        if live and reached and self._settling < barrier:
            self._settling = barrier
            rounds = self._here.fabric.rounds
            self._here.put(
                lambda: self._settle(
                    lambda: Settled(barrier, self._newly_written(), rounds.turns(), rounds.turns_here())
                )
            )
        lost = [w for w in workers if w.liveness == at.LOST and not self._comes_again(w.worker_id)]
        ended = [w for w in workers if w.liveness == at.GONE] + lost
        if len(ended) == len(self._here.roster.local) and not self._gone:
            self._gone = True
            self._tables.rows.nobody_comes()
            self._here.put(lambda: self._settle(Gone))

    # -- what the coordinator orders -------------------------------------------------------------------------

    def take(self, order: Take) -> None:
        """Takes the others' values, as all hosts have settled, and releases this host's workers."""
        barrier = order.barrier
        for number, turn in order.expected.items():  # at once: a loss that is heard of next ends it
            self._here.fabric.rounds.expect(number, turn)

        def take() -> None:
            for number, (host, turn, all_are_there) in order.written.items():
                self._here.fabric.rounds.overwrite(number, host, turn, all_are_there)
            self._tables.take_all()

        self._here.do(take, lambda: self._release(barrier))

    def bring(self, order: Bring) -> None:
        """Another host gathers what has not been sent yet."""
        self._here.put(lambda: self._settle(lambda: order))

    def gathered(self, order: Gather) -> None:
        """Takes the values that this host has asked for, as all have brought them, and tells its workers."""
        self._here.do(self._tables.take_all, lambda: self._here.control.note_gathered(order.number))

    # -- in the thread that moves values -------------------------------------------------------------------------------

    def _settle(self, report: Callable[[], Report]) -> None:
        """Brings what was added to the homes, and says so."""
        self._tables.settle()
        self._tables.report(report())

    def _newly_written(self) -> list[int]:
        """The synchronous tables that workers of this host have overwritten since the last barrier."""
        shards = self._here.catalogue.shards
        now = {n: load64(s.base + at.WRITTEN) for n, s in shards.items() if s.consistency.in_rounds}
        before, self._written = self._written, now
        return [number for number, times in now.items() if times != before.get(number, 0)]

    def _release(self, barrier: int) -> None:
        self._released = barrier
        self._here.control.release(barrier)
        self.look()
