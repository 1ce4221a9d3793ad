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
from multiverso.hosts.fabric import Fabric
from multiverso.hosts.roster import Roster
from multiverso.hosts.values.options import ExchangeOptions
from multiverso.kernels import waits
from multiverso.kernels.between_hosts import node as chained_node
from multiverso.layout import words as at
from multiverso.memory.words import load32
from multiverso.runtime.job.control import Control
from multiverso.runtime.several_hosts.mirror import read_progress, show_progress, write_progress
from multiverso.runtime.several_hosts.moving import Mover, move_deadline
from multiverso.runtime.several_hosts.spread_tables import SpreadTables
from multiverso.shards.shard import Shard

_LONGEST_SECONDS = 0.5


class Follower:
    """A thread that looks after each event of this host's workers. Owner: its maker; ``close`` ends it.

    Args:
        control: address of the control segment, whose event word is watched.
        name: what is followed.
        look: returns the seconds after which it wants to be called without an event, or None.
        mover: whose node ends if this thread does.
    """

    def __init__(self, control: int, name: str, look: Callable[[], float | None], mover: Mover) -> None:
        self._control, self._look = control, look
        self._sleep, self._wake = chained_node.sleep.compiled(), waits.wake.compiled()
        self._closing = threading.Event()
        self._thread = mover.thread(f"multiverso-hosts-{name}", self._run)
        self._thread.start()

    def wake(self) -> None:
        """Wakes it, and all of this host that wait for an event."""
        self._wake(self._control)

    def close(self) -> None:
        """Ends the thread, once what it waits for has ended."""
        self._closing.set()
        self.wake()

    def join(self) -> None:
        """Waits for its end."""
        self._thread.join()

    def _run(self) -> None:
        while not self._closing.is_set():
            event = load32(self._control + at.EVENT)
            wait = self._look()
            seconds = _LONGEST_SECONDS if wait is None else min(wait, _LONGEST_SECONDS)
            if not self._closing.is_set():
                self._sleep(self._control, event, int(seconds * 1e9))


class Clocks:
    """Tells this host's clocks and shows the others'. Owner: its maker; ``close`` ends its thread.

    Args:
        control: address of the control segment.
        local: the workers of this host.
        shards: returns the tables by number.
        fabric: moves their values.
        tell: reports to the coordinator.
        mover: whose node ends if this thread does.
    """

    def __init__(
        self,
        control: int,
        local: Iterable[int],
        shards: Callable[[], Mapping[int, Shard]],
        fabric: Fabric,
        tell: Callable[[Report], None],
        mover: Mover,
    ) -> None:
        self._local, self._shards = list(local), shards
        self._fabric, self._tell = fabric, tell
        self._tables: set[int] = set()
        self._reported: Reached = {}
        self._received: Reached = {}
        self._lock = threading.Lock()
        self._follower = Follower(control, "clocks", self._look, mover)
        self.close, self.join = self._follower.close, self._follower.join

    def follow(self, number: int) -> None:
        """A table has joined the exchange between hosts."""
        with self._lock:
            self._tables.add(number)
        self._follower.wake()

    def forget(self, number: int) -> None:
        """It is about to leave."""
        with self._lock:
            self._tables.discard(number)
            self._reported.pop(number, None)
            self._received.pop(number, None)

    def hear(self, lines: Reached) -> None:
        """Another host has reported how far its workers are; what they have added is at the homes."""
        with self._lock:
            for number, workers in lines.items():
                self._received.setdefault(number, {}).update(workers)
        self._follower.wake()

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
        self._fabric.take(move_deadline(), heard)
        shards = self._shards()
        with self._lock:  # one that is forgotten after this may be freed, and its memory another's
            for number, lines in heard.items():
                if number in self._tables and number in shards:
                    for worker, progress in lines.items():
                        write_progress(shards[number], worker, progress)
        self._follower.wake()
        return True

    def _say(self) -> bool:
        """Reports how far this host's workers are, once what they have added is at the homes."""
        shards = self._shards()
        with self._lock:
            tables = [number for number in self._tables if number in shards]
        found = {number: {i: read_progress(shards[number], i) for i in self._local} for number in tables}
        changed = {number: lines for number, lines in found.items() if lines != self._reported.get(number)}
        if not changed:
            return False
        self._fabric.settle(move_deadline(), changed)
        self._tell(ClocksReport(changed))
        with self._lock:
            self._reported.update({number: lines for number, lines in changed.items() if number in self._tables})
        return True


class ExchangedTables:
    """This host's copies of the tables, kept near the other hosts'. Owner: `OtherHosts`.

    Calls return at once; the thread that moves values does what they ask for, one after another.

    Args:
        roster: the job's hosts.
        fabric: moves the values.
        rows: the tables whose rows live on one host each.
        mover: the thread that has it do so.
        control: the control segment.
        shards: returns the tables by number.
        report: reports to the coordinator, after what this host's workers have done so far.
        tell: reports at once.

    Attributes:
        fabric, rows, mover, shards, report: as above.
        exchange: how tables travel, once a worker has said so.
        joined: the tables that a worker may still want; of the thread that moves.
    """

    def __init__(
        self,
        roster: Roster,
        fabric: Fabric,
        rows: SpreadTables,
        mover: Mover,
        control: Control,
        shards: Callable[[], Mapping[int, Shard]],
        report: Callable[[Report], None],
        tell: Callable[[Report], None],
    ) -> None:
        self.exchange = ExchangeOptions()
        self.joined: set[int] = set()
        self._roster = roster
        self.fabric, self.rows = fabric, rows
        self.mover = mover
        self._control = control
        self.shards = shards
        self.report, self._tell = report, tell
        self._attached: set[int] = set()  # those that the fabric knows; of the thread that moves
        self._follower: Follower | None = None  # once there is a synchronous table
        self._clocks: Clocks | None = None  # once there is one with a bound

    def settle(self) -> None:
        """Brings all that this host's workers have added to the homes; of the thread that moves."""
        self.fabric.settle(move_deadline(), self.joined)
        self.rows.settle(move_deadline())

    def take_all(self) -> None:
        """Takes all that the other hosts have brought to the homes; of the thread that moves."""
        self.fabric.take(move_deadline(), self.joined)
        self.rows.drop(move_deadline())

    def close(self) -> None:
        """Ends what follows rounds and clocks; before the fabric is closed."""
        if self._follower is not None:
            self._follower.close()
            self._follower.join()
        if self._clocks is not None:
            self._clocks.close()

    def join(self) -> None:
        """Waits for its end, once the fabric is closed and nothing is moved any more."""
        self.close()  # a table that came to be meanwhile may have begun it
        if self._clocks is not None:
            self._clocks.join()

    # -- a table's steps -------------------------------------------------------------------------------------

    def attach(
        self, number: int, shard: Shard, then: Callable[[], None], overwritten: Mapping[int, int] | None = None
    ) -> None:
        """Lets a table join the exchange between hosts, then calls `then` in the node's thread."""

        def join() -> None:
            if shard.consistency.in_rounds:
                self._join_rounds(number, shard, overwritten)
            else:
                self._join_copies(number, shard)
            self._attached.add(number)
            self.joined.add(number)

        self.mover.do(join, then)

    def _join_rounds(self, number: int, shard: Shard, overwritten: Mapping[int, int] | None) -> None:
        control = self._control.address
        self.fabric.attach_rounds(number, shard, control, self._roster.local, overwritten)
        if self._follower is None:
            self._follower = Follower(control, "rounds", self.fabric.follow_rounds, self.mover)

    def _join_copies(self, number: int, shard: Shard) -> None:
        if shard.consistency.has_clocks and self._clocks is None:
            # others report theirs as soon as this host is attached
            self._clocks = Clocks(
                self._control.address, self._roster.local, self.shards, self.fabric, self._tell, self.mover
            )
        how = self.exchange.of_table(shard.spec.wire, shard.spec.every)
        rule = how.rule_of(np.dtype(shard.spec.dtype))
        self.fabric.attach(number, shard, wire=how.wire, every=how.every, rule=rule, control=self._control.address)
        if shard.consistency.has_clocks and self._clocks is not None:
            self._clocks.follow(number)

    def push(self, number: int, then: Callable[[], None]) -> None:
        """Brings what is in this host's copy to the homes, then calls `then` in the node's thread."""
        self.mover.do(lambda: self.fabric.settle(move_deadline(), [number]), then)

    def take(self, number: int, then: Callable[[], None]) -> None:
        """Brings what the homes have into this host's copy, then calls `then` in the node's thread."""
        self.mover.do(lambda: self.fabric.take(move_deadline(), [number]), then)

    def refill(self, number: int, then: Callable[[bool], None]) -> None:
        """Holds a synchronous table's rounds with its values here, then calls `then` in the node's thread."""
        post = self.mover.post
        self.mover.put(lambda: self.fabric.rounds.refill(number, lambda here: post(lambda: then(here))))

    def release(self, number: int) -> None:
        """Lets the rounds of a table continue, with those who take part now."""
        # now: the thread that moves may be waiting for what this allows to continue
        self.fabric.rounds.release(number)

    def after(self, then: Callable[[], None]) -> None:
        """Calls `then` in the node's thread once all that was asked for before is done."""
        self.mover.do(lambda: None, then)

    def part(self, number: int, then: Callable[[], None]) -> None:
        """From here on no worker of this host waits for a table's values to travel; then calls `then`, as above."""
        self.mover.do(lambda: self.joined.discard(number), then)

    def detach(self, number: int, then: Callable[[], None]) -> None:
        """Ends a table's part in the exchange, then calls `then` in the node's thread."""

        def part() -> None:
            if self._clocks is not None:
                self._clocks.forget(number)
            if number in self._attached:
                self.joined.discard(number)
                self._attached.remove(number)
                self.fabric.detach(number)

        self.mover.do(part, then)

    # -- what other hosts' workers do with them --------------------------------------------------------------

    def hear_clocks(self, tables: Reached) -> None:
        """Other hosts' workers have ticked: shown once what they added before is in this host's copies."""
        if self._clocks is not None:
            self._clocks.hear(tables)

    def show_all(self, lines: Iterable[Line], clocks: Reached) -> None:
        """Shows how far other hosts' workers are, whose adds up to there are in this host's copies."""
        shards = self.shards()
        for line in lines:
            show_progress(line, shards)
        for number in clocks.keys() & shards.keys():
            for worker, progress in clocks[number].items():
                write_progress(shards[number], worker, progress)
