"""The hosts' control connections and the coordinator on a simulated network; all of it decided by one seed.

Real are `WatchedStream` and `Coordinator`. The hosts' nodes are programs of a few lines: each says hello and who its
workers are, has some tables made, settles some barriers, and goes. Faults: cuts, silence, slow links, nodes that stall
or are killed, the coordinator among them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import msgspec

from multiverso.hosts.control.coordinator import Coordinator
from multiverso.hosts.control.messages import (
    Begin,
    Create,
    Done,
    Gone,
    Hello,
    Line,
    Make,
    Order,
    Over,
    Report,
    Settled,
    Take,
    ToHost,
    Workers,
    encoded,
    order_of,
    report_of,
)
from multiverso.hosts.peer.frames import Header
from multiverso.hosts.peer.watched_stream import Timeouts, WatchedStream, ending
from multiverso.hosts.roster import Roster
from multiverso.layout import words as at
from multiverso.spec.table import TableSpec

TICK = 0.1
TIMEOUTS = Timeouts.of(12.0)
_COUNTED = "it counts as lost"
SPEC = msgspec.json.decode(msgspec.json.encode(TableSpec("array", 1, 10).as_message()))
FAULTS_END, END = 40.0, 120.0


@dataclass(eq=False)
class Connection:
    """A TCP connection: what is under way in each direction, until one side ends it or the link is cut."""

    delay: float
    under_way: tuple[deque[tuple[float, Header, bytes]], deque[tuple[float, Header, bytes]]] = field(
        default_factory=lambda: (deque(), deque())
    )
    open: bool = True

    def send(self, towards: int, end: WatchedStream, now: float) -> None:
        """Carries whatever an end has to send."""
        while self.open and (out := end.next(now)) is not None:
            body = b"".join((out.body, *out.more))
            self.under_way[towards].append((now + self.delay, out.header, body))


@dataclass(eq=False)
class Host:
    """A node other than the coordinator's."""

    number: int
    mine: WatchedStream
    theirs: WatchedStream  # the coordinator's end
    connection: Connection | None = None
    has_come: bool = False
    known: set[int] = field(default_factory=set)  # hosts whose workers it has been told of
    dials_at: float = 0.0
    silent_until: float = 0.0  # the link carries nothing
    down_until: float = 0.0  # and lets nobody connect
    stalled_until: float = 0.0
    busy_until: float = 0.0  # what it needs to show that it belongs to the job takes as long
    begun: bool = False  # that: its connection has been taken
    unheard: float = 0.0  # how long the link or a node is away
    longest: float = 0.0  # that it was
    unproven: float = 0.0  # the same, and while it was too busy to connect
    longest_unproven: float = 0.0
    killed: bool = False
    over: bool = False
    alone: str = ""
    takes: list[int] = field(default_factory=list)
    made: list[Any] = field(default_factory=list)
    said: list[bytes] = field(default_factory=list)
    arrived: int = 0  # of these, at the coordinator
    ordered: list[bytes] = field(default_factory=list)
    heard: int = 0  # of these, here


class Control:
    """A job's nodes. ``run`` ends with every host over, lost for a reason, or told that it is alone.

    Args:
        seed: decides everything.
        trace: gets what happens, in words.
    """

    def __init__(self, seed: int, trace: Callable[[str], None] = lambda _: None) -> None:
        self.random = random = Random(seed)
        self._trace = trace
        self.faults = self.lost = 0
        self.history: dict[int, list[Any]] = {}  # of frames, of which there are none here
        hosts = random.randint(2, 4)
        names = tuple(f"h{i}" for i in range(hosts))
        self.roster = Roster(0, names, (1,) * hosts, ("127.0.0.1", 1))
        self.coordinator = Coordinator(self.roster)
        self.barriers, self.tables = random.randint(1, 4), random.randint(0, 3)
        self.dead = False  # the coordinator
        self.settled: dict[int, set[int]] = {}
        self.now = 0.0
        self.why_lost: dict[int, str] = {}
        self.hosts = [self._new_host(i) for i in range(hosts)]
        for host in self.hosts:
            self._say(host, Hello(("x", host.number)))
            line = Line(host.number, 100 + host.number, at.ALIVE, at.ACTIVE)
            self._say(host, Workers([line]))

    def _new_host(self, number: int) -> Host:
        def clock() -> float:
            return self.now

        mine = WatchedStream(lambda order: self._hear(host, order), TIMEOUTS, clock)
        theirs = WatchedStream(lambda report: self._take(host, report), TIMEOUTS, clock)
        host = Host(number, mine, theirs, dials_at=self.random.random())
        return host

    # -- what a node does -----------------------------------------------------------------------------------

    def _ask(self, host: Host, number: int) -> None:
        self._say(host, Create(("order", number), SPEC, "async", [host.number], []))

    def _settle(self, host: Host, barrier: int) -> None:
        self.settled.setdefault(barrier, set()).add(host.number)
        self._say(host, Settled(barrier))

    def _obey(self, host: Host, order: Order) -> None:
        self._trace(f"{self.now:6.1f} host {host.number} hears {order}")
        if isinstance(order, Workers):
            begun = len(host.known) == len(self.hosts) - 1
            host.known |= {line.worker_id for line in order.workers} - {host.number}
            if not begun and len(host.known) == len(self.hosts) - 1:
                self._ask(host, 1) if self.tables else self._settle(host, 1)
        elif isinstance(order, Make):
            self._say(host, Done(order.key, "make"))
        elif isinstance(order, Begin) and order.step != "finish":
            self._say(host, Done(order.key, order.step))
        elif isinstance(order, Begin):
            host.made.append(order.key)
            number = len(host.made)
            self._ask(host, number + 1) if number < self.tables else self._settle(host, 1)
        elif isinstance(order, Take):
            barrier = order.barrier
            host.takes.append(barrier)
            there = {h.number for h in self.hosts if h.number not in self.why_lost and not h.over}
            missing = there - self.settled[barrier] - {h.number for h in self.hosts if h.killed}
            assert not missing, f"barrier {barrier} has ended without the live hosts {missing}"
            if barrier < self.barriers:
                self._settle(host, barrier + 1)
            else:
                self._say(host, Gone())
        elif isinstance(order, Over):
            host.over = True

    # -- between them ---------------------------------------------------------------------------------------

    def _say(self, host: Host, report: Report) -> None:
        if host.number == 0:
            self._give(self.coordinator.receive(0, report))
            return
        host.said.append(encoded(report))
        host.mine.put(host.said[-1])
        if host.connection is not None:
            host.connection.send(0, host.mine, self.now)

    def _give(self, orders: list[ToHost]) -> None:
        for number, order in orders:
            host = self.hosts[number]
            if number == 0:
                self._obey(host, order)
            elif not self.dead:
                host.ordered.append(encoded(order))
                host.theirs.put(host.ordered[-1])
                if host.connection is not None:
                    host.connection.send(1, host.theirs, self.now)

    def _end(self, host: Host) -> None:
        if host.connection is not None:
            host.connection.open = False
            host.connection = None
            for end in (host.mine, host.theirs):
                end.cut()
            host.begun = False
            host.dials_at = self.now + 0.05 + self.random.random() * 0.3

    def _dial(self, host: Host) -> None:
        host.begun = not self.dead and self.now >= max(host.down_until, host.silent_until)
        if not host.begun:
            host.dials_at = self.now + 0.2
            return
        if self.now < host.busy_until:
            return
        host.begun = False
        if host.number in self.why_lost:
            refusal = ending(_COUNTED)
            host.mine.arrived(refusal.header, refusal.body, self.now)
            return
        host.has_come = True
        host.connection = Connection(self.random.choice([0.0, 0.05, 0.3, 1.0]))
        for towards, end in enumerate((host.mine, host.theirs)):
            end.connect(1)
            host.connection.send(towards, end, self.now)

    def _carry(self, host: Host) -> None:
        connection = host.connection
        if connection is None or self.now < host.silent_until:
            return
        to_coordinator, to_host = connection.under_way
        while to_coordinator and to_coordinator[0][0] <= self.now and host.connection is connection:
            if self.dead:
                break
            self._receive(host.theirs, *to_coordinator.popleft()[1:])
            connection.send(1, host.theirs, self.now)
        while to_host and to_host[0][0] <= self.now and host.connection is connection:
            if host.killed or self.now < host.stalled_until:
                break
            self._receive(host.mine, *to_host.popleft()[1:])
            connection.send(0, host.mine, self.now)

    def _receive(self, end: WatchedStream, header: Header, body: bytes) -> None:
        room = end.accept(header)
        if room is not None:
            room[:] = body
        end.arrived(header, room, self.now)

    def _take(self, host: Host, report: memoryview) -> None:
        assert report == host.said[host.arrived], "a report is lost, repeated or out of order"
        host.arrived += 1
        self._give(self.coordinator.receive(host.number, report_of(report)))

    def _hear(self, host: Host, order: memoryview) -> None:
        assert order == host.ordered[host.heard], "an order is lost, repeated or out of order"
        host.heard += 1
        self._obey(host, order_of(order))

    def _look(self, host: Host) -> None:
        connection = host.connection
        if not host.killed and self.now >= host.stalled_until:
            if connection is not None:
                connection.send(0, host.mine, self.now)
            host.mine.look(self.now, host.begun)
            if host.mine.is_silent(self.now):
                self._end(host)
            why = host.mine.why_lost(self.now)
            if why and not host.over and not host.alone:
                host.alone = why
                self._trace(f"{self.now:6.1f} host {host.number} is alone: {why}")
                self._end(host)
            if host.connection is None and not host.alone and self.now >= host.dials_at:
                self._dial(host)
        if self.dead or not host.has_come or host.number in self.why_lost:
            return
        if host.connection is not None:
            host.connection.send(1, host.theirs, self.now)
        host.theirs.look(self.now, any(each.begun for each in self.hosts))  # it does not know yet which
        if host.theirs.is_silent(self.now):
            self._end(host)
        why = host.theirs.why_lost(self.now)
        if why and not self.coordinator.over:
            self.why_lost[host.number] = why
            self.lost += 1
            self._trace(f"{self.now:6.1f} host {host.number} is lost: {why}")
            self._end(host)
            self._give(self.coordinator.lose(host.number, why))

    # -- faults ---------------------------------------------------------------------------------------------

    def _fault(self) -> None:
        random = self.random
        host = random.choice(self.hosts[1:])
        kinds = {"cut": 8, "silence": 4, "down": 3, "stall": 3, "busy": 3, "kill": 0.3, "coordinator": 0.1}
        kind = random.choices(list(kinds), list(kinds.values()))[0]
        self.faults += 1
        seconds = random.choice([0.5, 2.0, 4.0, 8.0, 20.0])
        self._trace(f"{self.now:6.1f} {kind} of host {host.number} ({seconds} s)")
        if kind == "cut":
            self._end(host)
        elif kind == "silence":
            host.silent_until = max(host.silent_until, self.now + seconds)
        elif kind == "down":
            host.down_until = max(host.down_until, self.now + seconds)
            self._end(host)
        elif kind == "stall":
            host.stalled_until = max(host.stalled_until, self.now + seconds)
        elif kind == "busy":
            host.busy_until = max(host.busy_until, self.now + min(seconds, TIMEOUTS.grace_seconds / 2))
            self._end(host)
        elif kind == "kill":
            host.killed, host.begun = True, False
            self._end(host)
        elif not self.dead:
            self.dead = True
            for each in self.hosts[1:]:
                self._end(each)

    def _note_absence(self, host: Host) -> None:
        """How long a host was out of reach in one go, by the faults alone."""
        away = max(host.silent_until, host.down_until, host.stalled_until) > self.now
        host.unheard = host.unheard + TICK if away else max(host.unheard - TICK, 0.0)
        host.longest = max(host.longest, host.unheard)
        unproven = away or host.busy_until > self.now
        host.unproven = host.unproven + TICK if unproven else max(host.unproven - TICK, 0.0)
        host.longest_unproven = max(host.longest_unproven, host.unproven)

    def _was_away(self, host: Host) -> bool:
        """Whether a host had no chance to show in time that it is there."""
        return host.longest >= TIMEOUTS.ended_seconds - 1 or host.longest_unproven >= TIMEOUTS.grace_seconds - 1

    def run(self) -> None:
        """Runs to the end and looks whether all is as it is promised."""
        fault_at = 2.0 + self.random.random() * 3
        while self.now < END:
            self.now = round(self.now + TICK, 3)
            if self.now >= fault_at and self.now < FAULTS_END:
                self._fault()
                fault_at = self.now + self.random.expovariate(0.3)
            for host in self.hosts[1:]:
                self._note_absence(host)
                self._carry(host)
                self._look(host)
            if all(h.over or h.alone or h.killed for h in self.hosts[1:]) and (self.dead or self.hosts[0].over):
                break
        for host in self.hosts[1:]:
            if host.killed or host.over:
                continue
            assert host.alone, f"host {host.number} waits for ever"
            assert self.dead or host.number in self.why_lost or self._was_away(host), (
                f"host {host.number} ended for no reason: {host.alone}"
            )
        for number, why in self.why_lost.items():
            host = self.hosts[number]
            gone = host.killed or host.alone not in ("", _COUNTED)
            assert gone or self._was_away(host), f"host {number} was given up for no reason: {why}"
        if not self.dead:
            first = self.hosts[0]
            assert first.over, "the coordinator's host waits for ever"
            assert first.takes == list(range(1, self.barriers + 1))
            for host in self.hosts[1:]:
                if host.over:
                    assert (host.takes, host.made) == (first.takes, first.made), "not the same for all"
