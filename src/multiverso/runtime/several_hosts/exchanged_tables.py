"""Tables of a job on several hosts: how each, by its consistency, joins the exchange between hosts and leaves it.

Threads of the node follow what its workers do, woken by the control segment's event word.

Bounded staleness between hosts: a tick counts on another host once what was added before it is there. Each node looks
at the clocks of its own workers, brings what they have added to the homes, and then reports to the other nodes how far
they are. A node that receives this takes what the homes have, and only then shows the clocks to its own workers, whose
reads wait for them. So a read that goes ahead sees all adds of all workers up to its own clock less the bound, whatever
the network does; where that is slow, reads wait.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping

import numpy as np

from multiverso.hosts.control.messages import Clocks as ClocksReport
from multiverso.hosts.control.messages import Line, Reached, Report
from multiverso.hosts.options import ExchangeOptions
from multiverso.kernels.between_hosts import node as chained_node
from multiverso.layout import words as at
from multiverso.memory.words import load32
from multiverso.runtime.node.catalogue import Piece
from multiverso.runtime.node.exchange import Exchange
from multiverso.runtime.several_hosts.mirror import read_progress, show_progress, write_progress
from multiverso.runtime.several_hosts.reporting import Reporter
from multiverso.runtime.several_hosts.spread_tables import SpreadTables
from multiverso.runtime.several_hosts.this_host import ThisHost, move_deadline
from multiverso.shards.shard import Shard

_LONGEST_SECONDS = 0.5


def follow(here: ThisHost, name: str, look: Callable[[], float | None]) -> None:
    """Begins a thread that looks after each event of this host's workers, until everything ends.

    Args:
        here: this host.
        name: what is followed.
        look: returns the seconds after which it wants to be called without an event, or None.
    """
    control, sleep = here.control.address, chained_node.sleep.compiled()

    def run() -> None:
        while not here.closing.is_set():
            event = load32(control + at.EVENT)
            wait = look()
            seconds = _LONGEST_SECONDS if wait is None else min(wait, _LONGEST_SECONDS)
            if not here.closing.is_set():
                sleep(control, event, int(seconds * 1e9))

    here.thread(f"hosts-{name}", run)


class Clocks:
    """Tells this host's clocks and shows the others', in a thread that begins with the first table. Any thread."""

    def __init__(self, here: ThisHost) -> None:
        self._here = here
        self._tables: set[int] = set()
        self._reported: Reached = {}
        self._received: Reached = {}
        self._lock = threading.Lock()
        self._begun = False

    def follow(self, number: int) -> None:
        """A table has joined the exchange between hosts. Of the thread that moves."""
        with self._lock:
            self._tables.add(number)
        if not self._begun:
            self._begun = True
            follow(self._here, "clocks", self._look)
        self._here.control.notify()

    def forget(self, number: int) -> None:
        """Notes that a worker is about to leave."""
        with self._lock:
            self._tables.discard(number)
            self._reported.pop(number, None)
            self._received.pop(number, None)

    def hear(self, lines: Reached) -> None:
        """Another host has reported how far its workers are; what they have added is at the homes."""
        with self._lock:
            for number, workers in lines.items():
                self._received.setdefault(number, {}).update(workers)
        self._here.control.notify()

    def _look(self) -> float | None:
        return 0.0 if self._show() | self._say() else None

    def _show(self) -> bool:
        """Takes what the reporting hosts have added, and shows how far they are."""
        with self._lock:
            heard = {number: lines for number, lines in self._received.items() if number in self._tables}
            for number in heard:
                del self._received[number]
        if not heard:
            return False
        self._here.fabric.take(move_deadline(), heard)
        shards = self._here.catalogue.shards
        with self._lock:  # one that is forgotten after this may be freed, and its memory another's
            for number, lines in heard.items():
                if number in self._tables and number in shards:
                    for worker, progress in lines.items():
                        write_progress(shards[number], worker, progress)
        self._here.control.notify()
        return True

    def _say(self) -> bool:
        """Reports how far this host's workers are, once what they have added is at the homes."""
        shards = self._here.catalogue.shards
        with self._lock:
            tables = [number for number in self._tables if number in shards]
        found = {number: {i: read_progress(shards[number], i) for i in self._here.roster.local} for number in tables}
        changed = {number: lines for number, lines in found.items() if lines != self._reported.get(number)}
        if not changed:
            return False
        self._here.fabric.settle(move_deadline(), changed)
        self._here.tell(ClocksReport(changed))
        with self._lock:
            self._reported.update({number: lines for number, lines in changed.items() if number in self._tables})
        return True


class ExchangedTables(Exchange):
    """This host's copies of the tables, kept near the other hosts'. Owner: `OtherHosts`.

    Calls return at once; the thread that moves values does what they ask for, one after another.

    Args:
        here: this host.
        rows: the tables whose rows live on one host each.
        reporter: reports to the coordinator.

    Attributes:
        rows: as above.
        how: how tables travel, once a worker has said so.
        joined: the tables that a worker may still want; of the thread that moves.
        clocks: of those with a bound.
    """

    several = True

    def __init__(self, here: ThisHost, rows: SpreadTables, reporter: Reporter) -> None:
        self.how = ExchangeOptions()
        self.joined: set[int] = set()
        self.here, self.rows, self.name = here, rows, here.name
        self._reporter = reporter
        self._attached: set[int] = set()  # those that the fabric knows; of the thread that moves
        self._follows_rounds = False  # once there is a synchronous table
        self.clocks = Clocks(here)

    def report(self, *reports: Report) -> None:
        """See `Exchange.report`."""
        self._reporter.report(*reports)

    def settle(self) -> None:
        """Brings all that this host's workers have added to the homes; of the thread that moves."""
        self.here.fabric.settle(move_deadline(), self.joined)
        self.rows.settle(move_deadline())

    def take_all(self) -> None:
        """Takes all that the other hosts have brought to the homes; of the thread that moves."""
        self.here.fabric.take(move_deadline(), self.joined)
        self.rows.drop(move_deadline())

    # -- a table's steps -------------------------------------------------------------------------------------

    def move(
        self, step: str, piece: Piece, then: Callable[[], None], overwritten: Mapping[int, int] | None = None
    ) -> None:
        """See `Exchange.move`.

        Args:
            step, piece, then: see there.
            overwritten: of a synchronous table that the other hosts have, see `Fabric.attach_rounds`.
        """
        number, fabric = piece.number, self.here.fabric
        if step == "join":
            shard = self.here.catalogue.whole(piece)
            self.here.do(lambda: self._join(number, shard, overwritten), then)
            return
        moves: dict[str, Callable[[], None]] = {
            "push": lambda: fabric.settle(move_deadline(), [number]),
            "finish": lambda: fabric.take(move_deadline(), [number]),
            "part": lambda: self.joined.discard(number),
            "free": lambda: self._leave(number),
        }
        self.here.do(moves[step], then)

    def _join(self, number: int, shard: Shard, overwritten: Mapping[int, int] | None) -> None:
        here, control = self.here, self.here.control.address
        if shard.consistency.in_rounds:
            wire = self.how.of_table(shard.spec.wire, "").wire
            here.fabric.attach_rounds(number, shard, control, overwritten, wire)
            if not self._follows_rounds:
                self._follows_rounds = True
                follow(here, "rounds", here.fabric.follow_rounds)
        else:
            how = self.how.of_table(shard.spec.wire, shard.spec.every)
            rule = how.rule_of(np.dtype(shard.spec.dtype))
            here.fabric.attach(number, shard, wire=how.wire, every=how.every, rule=rule, control=control)
            if shard.consistency.has_clocks:
                self.clocks.follow(number)
        self._attached.add(number)
        self.joined.add(number)

    def _leave(self, number: int) -> None:
        self.clocks.forget(number)
        if number in self._attached:
            self.joined.discard(number)
            self._attached.remove(number)
            self.here.fabric.detach(number)

    def refill(self, number: int, then: Callable[[bool], None]) -> None:
        """See `Exchange.refill`."""
        here = self.here

        def enter(is_there: bool) -> None:
            then(is_there)
            # now: the thread that moves may be waiting for what this allows to continue
            here.fabric.rounds.release(number)

        here.put(lambda: here.fabric.rounds.refill(number, lambda found: here.post(lambda: enter(found))))

    # -- what other hosts' workers do with them --------------------------------------------------------------

    def show_all(self, lines: Iterable[Line], clocks: Reached) -> None:
        """Shows how far other hosts' workers are, whose adds up to there are in this host's copies."""
        shards = self.here.catalogue.shards
        for line in lines:
            show_progress(line, shards)
        for number in clocks.keys() & shards.keys():
            for worker, progress in clocks[number].items():
                write_progress(shards[number], worker, progress)
