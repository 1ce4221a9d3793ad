"""This host's part in a job on several: what its node tells the coordinator, and what moves the tables' values.

Three threads beside the node's: one tells what this host's workers do (twenty times a second, and at once where
somebody waits for it), one moves tables' values (attach, push, take, one after another), and one receives the
coordinator's orders. What they find out reaches the node's thread as orders.
"""

from __future__ import annotations

import functools
import itertools
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from multiverso import layout as at
from multiverso.deadline import Deadline
from multiverso.errors import MultiversoError, StartupError
from multiverso.hosts.channel import Channel
from multiverso.hosts.control_connections import Centre, Outpost, credentials_of
from multiverso.hosts.exchange import Exchange
from multiverso.hosts.fabric import Fabric
from multiverso.hosts.mail import Mail
from multiverso.hosts.pace import Every
from multiverso.hosts.roster import Roster
from multiverso.hosts.stream import Body
from multiverso.hosts.transport import MAIL, Hello, Listener
from multiverso.memory.segment import Segment
from multiverso.memory.words import load64
from multiverso.node_log import log
from multiverso.runtime.clocks import Clocks, Lines
from multiverso.runtime.control import Control
from multiverso.runtime.following import RoundFollower
from multiverso.runtime.mirror import Line, read_lines, read_progress, write_line, write_progress
from multiverso.runtime.reductions import Reductions
from multiverso.runtime.wait_graph import WorkerState
from multiverso.shards.shard import Shard
from multiverso.wire.messages import Message

_LOOK_SECONDS = 0.05
_STATISTICS_EVERY = 10  # looks
_MOVE_SECONDS = 1800.0
_JOIN_SECONDS = 10.0

Post = Callable[[Message | Callable[[], None]], None]


class Carrier(Protocol):
    """What moves values between hosts: `multiverso.hosts.fabric.Fabric`. Every method may be called by any thread."""

    def listen(self) -> tuple[str, int]:
        """Begins to take connections; returns where."""

    def connect(self, peer: int, address: tuple[str, int]) -> None:
        """Begins to connect to a host of a lower number, and keeps it up."""

    def attach(
        self,
        table_id: int,
        shard: Shard,
        *,
        wire: str = "native",
        every: Every | None = None,
        rule: str = "sum",
        control: int = 0,
    ) -> None:
        """Begins to keep a table near the other hosts' copies."""

    def attach_rounds(self, table_id: int, shard: Shard, control: int, local: Iterable[int]) -> None:
        """Begins to take part in the rounds of a synchronous table."""

    def turns(self) -> dict[int, int]:
        """Returns how far each synchronous table is here."""

    def overwrite(self, written: Mapping[int, Sequence[int]]) -> None:
        """At a barrier: what workers have overwritten synchronous tables with becomes everybody's."""

    def follow_rounds(self) -> float | None:
        """Does what this host's workers are ready for; returns the seconds until it is to be called at the latest."""

    def detach(self, table_id: int) -> None:
        """Lets go of a table."""

    def settle(self, deadline: Deadline, tables: Iterable[int] | None = None) -> None:
        """Waits until what is in this host's copies now is at the homes."""

    def take(self, deadline: Deadline, tables: Iterable[int] | None = None) -> None:
        """Waits until what is at the homes now is in this host's copies."""

    def lost(self, peer: int) -> None:
        """Says that a host is lost: waits for it end with an error."""

    def regroup(self, live: Sequence[int]) -> None:
        """Goes on without lost hosts: what had its home there gets a new one. Waits for them end with an error."""

    def begin_anew(self, lives: Sequence[Sequence[int]], lost: Iterable[int]) -> None:
        """In a host that takes a lost one's place, before any table: who was left after each loss, who is lost now."""

    def joined(self, peer: int) -> None:
        """A lost host has come again; a higher one then connects to it."""

    def statistics(self) -> dict[str, Any]:
        """Returns what went to and came from each peer."""

    def answer(self, role: int, taker: Callable[[Channel, Hello], None]) -> None:
        """Says who takes connections of another role; before it listens."""

    def close(self) -> None:
        """Ends all connections."""


class Abroad:
    """Owner: the node; ``close`` ends it.

    Args:
        roster: the job's hosts.
        carrier: moves the values; closed with this.
        listener: where the coordinator listens, on its own host.
        post: hands an order, or something to call, to the node's thread; from any thread.

    Attributes:
        exchange: how tables travel, once a worker has said so.
        over: set when all workers of all hosts have gone, so that nobody needs this host's copies any more.
        comes_again: whether another process may come for a worker of this host that died.
        remote_statistics: what workers of other hosts have done with each table, by its number and theirs.
    """

    def __init__(self, roster: Roster, carrier: Carrier, listener: Listener | None, post: Post) -> None:
        self.roster = roster
        self.exchange = Exchange()
        self.over = threading.Event()
        self.comes_again: Callable[[int], bool] = lambda worker_id: False
        self._carrier = carrier
        self._post = post
        self._control: Control | None = None
        self._told: dict[int, Line] = {}
        self._told_of: dict[int, dict[int, list[int]]] = {}
        self._telling = threading.Lock()
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._arrived: dict[
            int, int
        ] = {}  # workers of this host: the last barrier that each said it has reached
        self._released = self._settling = 0
        self._gone = False
        self._attached: set[int] = set()  # tables that the carrier knows; of the thread that moves
        self._joined: set[int] = set()  # those of them that a worker may still want
        self._lost: set[int] = set()
        self._shards: Callable[[], Mapping[int, Shard]] = dict
        self.remote_statistics: dict[int, dict[int, dict[str, float]]] = {}
        self._addresses: dict[int, tuple[str, int]] = {}
        self._mail = Mail(
            roster.host, roster.hosts, credentials_of(roster), self._addresses.get, self._deliver
        )
        carrier.answer(MAIL, self._mail.offer)
        self.reductions: Reductions | None = None
        self._follower: RoundFollower | None = None  # once there is a synchronous table
        self._written: dict[int, int] = {}  # how often each synchronous table was overwritten here
        self._overwritten = 0  # the last barrier at which what was written elsewhere was asked for
        self._clocks: Clocks | None = None  # once there is one with a bound
        self._regroups = 0  # how often the hosts that are left have given out new homes
        self._regrouping = False  # and whether they are about to
        self._threads = [
            threading.Thread(target=self._move, name="multiverso-hosts-move", daemon=True),
            threading.Thread(target=self._tell, name="multiverso-hosts-report", daemon=True),
        ]
        try:
            self._centre = self._meet(listener)
        except BaseException:
            carrier.close()
            raise

    def _meet(self, listener: Listener | None) -> Centre | Outpost:
        """Begins to listen for the other hosts, and to talk with the coordinator."""
        roster = self.roster
        address = self._carrier.listen()
        if roster.addresses:  # it listens at all of its addresses; this is the one that others know
            address = (roster.addresses[roster.host], address[1])
        if not roster.leads:
            return Outpost(roster, address, self._post)
        if listener is None:
            raise StartupError("the job's first host needs to listen for the others")
        centre = Centre(roster, listener, self._post)
        centre.report({"do": "hello", "address": list(address)})
        return centre

    def begin(
        self,
        control: Control,
        shards: Callable[[], Mapping[int, Shard]],
        memory: Callable[[str], Segment | None],
    ) -> None:
        """The memory is there: from here on this host's workers are told of, and remote ones shown in it.

        Args:
            control: the control segment.
            shards: returns the tables by number; called by any thread.
            memory: returns what this host's workers share under a name; called by any thread.
        """
        self._control = control
        self._shards = shards
        self.reductions = Reductions(self.roster, control, self._mail, memory)
        for thread in self._threads:
            thread.start()

    @property
    def needed(self) -> bool:
        """Whether another host may need this one: not where one has never come, and so no worker's `init` returned."""
        return self._centre.all_came

    def close(self) -> None:
        """Ends everything. The other hosts take it for a loss unless the job is over."""
        self._closing.set()
        self._tasks.put(None)
        self._mail.close()
        if self.reductions is not None:
            self.reductions.close()
        if self._follower is not None:
            self._follower.close()
        if self._clocks is not None:
            self._clocks.close()
        self._carrier.close()
        self._centre.close()
        if self._clocks is not None:
            self._clocks.join()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(_JOIN_SECONDS)

    @property
    def control(self) -> Control:
        """The control segment."""
        assert self._control is not None
        return self._control

    def _deliver(self, host: int, message: Body) -> None:
        """Takes another node's message, also from a host that has begun before this one's workers have."""
        if self.reductions is not None:
            self.reductions.arrived(host, message)

    # -- telling ---------------------------------------------------------------------------------------------

    def report(self, message: Message) -> None:
        """Tells the coordinator something, after what this host's workers have done so far."""
        with self._telling:
            self._tell_changes()
            self._centre.report(message)

    def tell_now(self) -> None:
        """Tells what this host's workers do, without waiting for the next regular look."""
        with self._telling:
            self._tell_changes()

    def _tell(self) -> None:
        told: dict[str, dict[str, dict[str, float]]] = {}
        for look in itertools.count():
            if self._closing.wait(_LOOK_SECONDS):
                return
            self.tell_now()
            if look % _STATISTICS_EVERY == 0:
                found = self._statistics()
                if found != told:
                    told = found
                    self._centre.report({"do": "statistics", "tables": found})

    def _statistics(self) -> dict[str, dict[str, dict[str, float]]]:
        return {
            str(number): {str(i): shard.statistics(i) for i in self.roster.local}
            for number, shard in self._shards().items()
        }

    def _tell_changes(self) -> None:
        if self._control is None:
            return
        now = time.monotonic_ns()
        lines = {line[0]: line for line in read_lines(self._control, self.roster.local)}
        changed = [line for worker_id, line in lines.items() if self._told.get(worker_id) != line]
        lines_of_tables = self._progress()
        if lines_of_tables:
            self._centre.report({"do": "progress", "tables": lines_of_tables})
        if changed:
            self._told = lines
            self._centre.report({"do": "workers", "workers": changed, "now": now})

    def _progress(self) -> dict[int, dict[int, list[int]]]:
        """How far this host's workers are in the rounds and clocks of tables, where that has changed."""
        found = {
            number: read_progress(shard, self.roster.local)
            for number, shard in self._shards().items()
            if shard.consistency.in_rounds
        }
        changed = {number: lines for number, lines in found.items() if lines != self._told_of.get(number)}
        self._told_of = found
        return changed

    # -- moving ----------------------------------------------------------------------------------------------

    def attach(self, number: int, shard: Shard, then: Callable[[], None]) -> None:
        """Lets a table join the exchange between hosts, then calls `then` in the node's thread."""

        def join() -> None:
            if shard.consistency.in_rounds:
                self._carrier.attach_rounds(number, shard, self.control.address, self.roster.local)
                self._attached.add(number)
                self._joined.add(number)
                if self._follower is None:
                    self._follower = RoundFollower(
                        self.control.address, self._carrier.follow_rounds, self._broken
                    )
                return
            if shard.consistency.has_clocks and self._clocks is None:
                self._clocks = self._new_clocks()  # others tell theirs as soon as this host is attached
            how = self.exchange.of_table(shard.spec.wire, shard.spec.every)
            rule = how.rule_of(np.dtype(shard.spec.dtype))
            self._carrier.attach(
                number, shard, wire=how.wire, every=how.every, rule=rule, control=self.control.address
            )
            self._attached.add(number)
            self._joined.add(number)
            if shard.consistency.has_clocks and self._clocks is not None:
                self._clocks.follow(number)

        self._do(join, then)

    def push(self, number: int, then: Callable[[], None]) -> None:
        """Brings what is in this host's copy to the homes, then calls `then` in the node's thread."""
        self._do(lambda: self._carrier.settle(_deadline(), [number]), then)

    def take(self, number: int, then: Callable[[], None]) -> None:
        """Brings what the homes have into this host's copy, then calls `then` in the node's thread."""
        self._do(lambda: self._carrier.take(_deadline(), [number]), then)

    def after(self, then: Callable[[], None]) -> None:
        """Calls `then` in the node's thread once all that was asked for before is done."""
        self._do(lambda: None, then)

    def part(self, number: int, then: Callable[[], None]) -> None:
        """From here on nobody on this host waits for a table's values to travel; then calls `then`, as above."""
        self._do(lambda: self._joined.discard(number), then)

    def detach(self, number: int, then: Callable[[], None]) -> None:
        """Ends a table's part in the exchange, then calls `then` in the node's thread."""

        def part() -> None:
            if self._clocks is not None:
                self._clocks.forget(number)
            if number in self._attached:
                self._joined.discard(number)
                self._attached.remove(number)
                self._carrier.detach(number)
            self.remote_statistics.pop(number, None)

        self._do(part, then)

    def _new_clocks(self) -> Clocks:
        return Clocks(
            self.control.address,
            self.roster.local,
            self._shards,
            lambda tables: self._again(lambda: self._carrier.settle(_deadline(), tables)),
            lambda tables: self._again(lambda: self._carrier.take(_deadline(), tables)),
            lambda lines: self._centre.report({"do": "clocks", "tables": lines}),
            self._broken,
        )

    def _broken(self, error: Exception) -> None:
        self._post({"do": "broken", "why": f"{type(error).__name__}: {error}"})

    def _again(self, action: Callable[[], None]) -> None:
        """Once more, where a host was lost meanwhile and the others go on without it."""
        while True:
            regroups = self._regroups
            try:
                return action()
            except MultiversoError:
                if self._closing.is_set() or not self._goes_on(regroups):
                    raise

    def _goes_on(self, regroups: int) -> bool:
        """Whether the hosts that are left have new homes since, or get them soon."""
        end = Deadline.after(_JOIN_SECONDS)
        while self.control.continues and self._regroups == regroups and (self._regrouping or not end.passed):
            if self._closing.wait(0.01):
                return False
        return self._regroups != regroups

    def _do(self, action: Callable[[], None], then: Callable[[], None]) -> None:
        def task() -> None:
            action()
            self._post(then)

        self._tasks.put(task)

    def _move(self) -> None:
        while (task := self._tasks.get()) is not None:
            while not self._closing.is_set():
                regroups = self._regroups
                try:
                    task()
                    break
                except Exception as error:
                    if self._closing.is_set() or self._goes_on(regroups):
                        continue  # a host was lost meanwhile: once more, without it
                    self._post({"do": "broken", "why": f"{type(error).__name__}: {error}"})
                    break

    # -- what the node's thread does -------------------------------------------------------------------------

    def obey(self, order: Message) -> list[int]:
        """Does what the coordinator says of hosts, workers and barriers; returns workers that came, left or died."""
        do = order["do"]
        if do == "workers":
            return [line[0] for line in order["workers"] if write_line(self.control, line, order["now"])]
        if do == "peers":
            for peer in range(self.roster.host):
                address, port = order["addresses"][peer]
                self._addresses[peer] = to = (str(address), int(port))
                self._tasks.put(functools.partial(self._carrier.connect, peer, to))
        elif do == "lost":
            host = int(order["host"])
            self._lost.add(host)
            if any(self.control.worker(i).is_live for i in self.roster.workers_of(host)):
                log(f"{self.roster.names[host]} is lost: {order['why']}")
            if self.control.continues:
                self._regrouping = True  # whoever waits for the lost host gets an error before this is over
                self._carrier.regroup([h for h in range(self.roster.hosts) if h not in self._lost])
                self._regroups += 1
                self._regrouping = False
            else:
                self._carrier.lost(host)
        elif do == "joined":
            host = int(order["host"])
            self._lost.discard(host)
            self._carrier.joined(host)
            address, port = order["address"]
            self._addresses[host] = to = (str(address), int(port))
            if host < self.roster.host:
                self._tasks.put(functools.partial(self._carrier.connect, host, to))
        elif do == "take":
            barrier = int(order["barrier"])
            written = {int(number): tuple(map(int, how)) for number, how in order["written"].items()}

            def take() -> None:
                if self._overwritten < barrier:
                    self._overwritten = barrier
                    self._carrier.overwrite(written)
                self._carrier.take(_deadline(), self._joined)

            self._do(take, lambda: self._release(barrier))
        elif do == "bring":
            report = {"do": "brought", "host": order["host"], "number": order["number"]}
            self._tasks.put(lambda: self._settle(report))
        elif do == "gathered":
            number = int(order["number"])
            self._do(
                lambda: self._carrier.take(_deadline(), self._joined),
                lambda: self.control.note_gathered(number),
            )
        elif do == "statistics":
            for number, lines in order["tables"].items():
                self.remote_statistics.setdefault(int(number), {}).update(
                    {int(worker): line for worker, line in lines.items()}
                )
        elif do == "progress":
            self._show_progress(order["tables"])
        elif do == "clocks" and self._clocks is not None:
            self._clocks.hear(_lines(order["tables"]))
        elif do == "over":
            self.over.set()
        return []

    def welcome(self, order: Message) -> None:
        """This host takes a lost one's place: who is there, where, and what they have done together so far."""
        self.exchange = Exchange.from_message(order["options"]["exchange"])
        self._lost = {int(host) for host in order["lost"]}
        self._carrier.begin_anew(order["lives"], self._lost)
        for line in order["workers"]:
            write_line(self.control, line, None)
        self._released = self._settling = int(order["released"])
        self.control.release(self._released)
        for peer in set(range(self.roster.host)) - self._lost:
            address, port = order["addresses"][peer]
            self._addresses[peer] = to = (str(address), int(port))
            self._tasks.put(functools.partial(self._carrier.connect, peer, to))

    def show_clocks(self, tables: Message) -> None:
        """Shows how far other hosts' workers are, whose adds up to there are in this host's copies."""
        self._show_progress(tables)

    def _show_progress(self, tables: Message) -> None:
        shards = self._shards()
        for number, lines in _lines(tables).items():
            if number in shards:
                write_progress(shards[number], lines)

    def links(self) -> list[dict[str, Any]]:
        """Returns what went to and came from each other host with the tables' values, for `multiverso top`."""
        counted = self._carrier.statistics()["peers"]
        return [
            {
                "host": self.roster.names[peer],
                "state": "lost" if peer in self._lost else "connected" if link["connected"] else "cut",
                "connections": link["connections"],
                "bytes_sent": link["bytes_sent"],
                "bytes_received": link["bytes_received"],
            }
            for peer, link in sorted(counted.items())
        ]

    @property
    def lost_hosts(self) -> list[str]:
        """The names of the hosts that are lost."""
        return [self.roster.names[host] for host in sorted(self._lost)]

    def arrived(self, worker_id: int, barrier: int) -> None:
        """A worker of this host is about to wait at a barrier."""
        self._arrived[worker_id] = max(barrier, self._arrived.get(worker_id, 0))
        self.look()

    def look(self) -> None:
        """Looks whether all workers of this host have reached a barrier, or all have gone."""
        workers = [w for w in map(self.control.worker, self.roster.local) if w.liveness != at.FREE]
        live = [w for w in workers if w.is_live]
        barrier = self._released + 1
        reached = all(max(w.barrier, self._arrived.get(w.worker_id, 0)) >= barrier for w in live)
        if live and reached and self._settling < barrier:
            self._settling = barrier
            self._tasks.put(lambda: self._settle({"do": "settled", "barrier": barrier}))
        ended = [w for w in workers if w.liveness == at.GONE or self._is_lost_for_good(w)]
        if len(ended) == len(self.roster.local) and not self._gone:
            self._gone = True
            self._tasks.put(lambda: self._settle({"do": "gone"}))

    def _is_lost_for_good(self, worker: WorkerState) -> bool:
        return worker.liveness == at.LOST and not self.comes_again(worker.worker_id)

    def replaced(self, worker_id: int) -> None:
        """A new process takes the place of a worker of this host that died: it has reached no barrier yet."""
        self._arrived.pop(worker_id, None)

    def _settle(self, report: Message) -> None:
        self._carrier.settle(_deadline(), self._joined)
        if report["do"] == "settled":
            report["written"] = self._newly_written()
            report["turns"] = self._carrier.turns()
        self.report(report)

    def _newly_written(self) -> list[int]:
        """The synchronous tables that workers of this host have overwritten since the last barrier."""
        shards = self._shards()
        now = {n: load64(s.base + at.WRITTEN) for n, s in shards.items() if s.consistency.in_rounds}
        before, self._written = self._written, now
        return [number for number, times in now.items() if times != before.get(number, 0)]

    def _release(self, barrier: int) -> None:
        self._released = barrier
        self.control.release(barrier)
        self.look()


def means(roster: Roster, descriptor: int | None) -> tuple[Roster, Carrier, Listener | None]:
    """Returns what a node of a job on several hosts is made with.

    Args:
        roster: the job's hosts.
        descriptor: a listening socket of the coordinator's, where one was opened before this process began.
    """
    listener: Listener | None = None
    if descriptor is not None:
        listener = _Inherited(descriptor)
    elif roster.leads:
        listener = Listener((roster.bind, roster.coordinator[1]))
    return roster, Fabric(roster.host, roster.hosts, credentials_of(roster), bind=(roster.bind, 0)), listener


class _Inherited(Listener):
    """A listening socket that the launcher has opened, so that its port was known before this process began."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._socket.set_inheritable(False)


def _lines(tables: Message) -> Lines:
    return {int(n): {int(worker): line for worker, line in lines.items()} for n, lines in tables.items()}


def _deadline() -> Deadline:
    return Deadline.after(_MOVE_SECONDS)
