"""Hosts with real tables and real links, workers that add, and faults; all of it decided by one seed."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import numpy as np

from multiverso.hosts.codecs import Wire
from multiverso.hosts.options import Every
from multiverso.hosts.peer.frames import HEADER_BYTES, Numbered, ProtocolError, Reader
from multiverso.hosts.peer.resources import Pace
from multiverso.hosts.transport.channel import FAR
from multiverso.hosts.values.copies import Changes, Copy, homes_of, rehomed
from multiverso.hosts.values.link import Link
from multiverso.hosts.values.state import Held, Ticket
from multiverso.layout import words as at
from multiverso.layout.worker_index import ALONE
from multiverso.memory import heap
from multiverso.memory.segment import Segment
from multiverso.shards.shard import Shard, initialise
from multiverso.spec.table import Places, TableSpec
from simulated.network import Card, Clock, Direction, Line

CHUNK_BYTES = 64
_RECONNECT_SECONDS = 0.02
_KERNEL_SECONDS = 2e-5


class Memory:
    """Tables, made once and used by one schedule after another."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int, str, bool], Shard] = {}

    def shard(self, host: int, elements: int, dtype: str, convex: bool = False) -> Shard:
        key = (host, elements, dtype, convex)
        if key not in self._kept:
            spec = TableSpec("array", 1, elements, dtype, convex=convex)
            descriptor = heap.create("simulated", Places.of(spec, ALONE, False).size)
            try:
                segment = Segment(descriptor)
            finally:
                os.close(descriptor)
            initialise(segment.address, spec, 1, ALONE, at.ASYNCHRONOUS)
            self._kept[key] = Shard(segment, spec, ALONE, at.ASYNCHRONOUS)
        shard = self._kept[key]
        shard.values()[:] = 0
        return shard


@dataclass(eq=False)
class Host:
    """A host: copies of the tables, links, when it goes on after a stall."""

    number: int
    pace: Pace
    copies: dict[int, Copy] = field(default_factory=dict)
    changes: dict[int, Changes] = field(default_factory=dict)
    links: dict[int, Link] = field(default_factory=dict)
    neighbours: dict[int, Numbered] = field(default_factory=dict)  # in rounds: what is carried instead of links
    stalled_until: float = 0.0
    incarnation: int = 1
    dead: bool = False
    ready: bool = True  # whether its workers have begun: in a lost host's place once it has taken all values
    card: Card = field(default_factory=Card)
    homes: dict[int, list[int]] = field(default_factory=dict)

    def carried(self, peer: int) -> Numbered | None:
        """What goes over the connection to a peer."""
        return self.neighbours.get(peer, self.links[peer]) if peer in self.links else None


@dataclass(eq=False)
class Connection:
    """One connection of a pair: a wire in each direction."""

    wires: dict[int, Direction]  # by the host that sends
    readers: dict[int, Reader]  # by the host that receives
    inbox: dict[int, deque[bytes]] = field(default_factory=dict)  # what has come, by the host that receives
    ended: set[int] = field(default_factory=set)
    busy: dict[int, bool] = field(default_factory=dict)


@dataclass(frozen=True)
class Scene:
    """What a schedule is made of.

    Attributes:
        hosts: how many.
        elements: of each table.
        dtypes: of the tables.
        wire: how differences travel.
        line: what connections are like.
        adds: of each host to each table.
        seconds: over which the adds are spread.
        cuts: connections that break at a random byte.
        stalls: hosts that stand still for a while.
        silences: connections over which nothing comes for a while.
        replays: frames that come a second time.
        crashes: hosts that are lost, 0 or 1; then each host adds to elements of its own, so that losses can be told.
        joins: whether a lost host comes again, as one that has nothing.
        star: only the first host has connections; each of the first ones is the home of one chunk.
        share: of a core that a node may use; 0 for no limit.
        every: how often passes begin.
        window: chunks under way; 0 for a random number.
        convex: values stay between those of the hosts, as statistics have to.
    """

    hosts: int = 3
    elements: tuple[int, ...] = (40,)
    dtypes: tuple[str, ...] = ("float32",)
    wire: str = "native"
    line: Line = field(default_factory=Line)
    adds: int = 10
    seconds: float = 0.05
    cuts: int = 3
    stalls: int = 1
    silences: int = 1
    replays: int = 1
    crashes: int = 0
    share: float = 0.0
    every: Every = field(default_factory=Every)
    window: int = 0
    convex: bool = False
    joins: bool = False
    star: bool = False


def random_scene(random: Random) -> Scene:
    """Returns what a seed makes of everything that can be chosen."""
    tables = random.randint(1, 2)
    return Scene(
        hosts=random.choice((2, 2, 3, 3, 4)),
        elements=tuple(random.choice((1, 15, 40, 100)) for _ in range(tables)),
        dtypes=tuple(random.choice(("float32", "float32", "int64")) for _ in range(tables)),
        wire=random.choice(("native", "native", "bfloat16", "int8", "topk:0.3")),
        line=Line(
            latency=random.choice((1e-5, 1e-4, 5e-3)),
            rate=random.choice((1e5, 1e6, 1e9)),
            pieces=random.choice((0, 0, 0, 30)),
        ),
        adds=random.randint(1, 12),
        seconds=random.choice((0.001, 0.02, 0.2)),
        cuts=random.choice((0, 1, 3, 8)),
        stalls=random.choice((0, 0, 1, 2)),
        silences=random.choice((0, 0, 1)),
        replays=random.choice((0, 0, 1, 3)),
        crashes=random.choice((0, 0, 0, 1)),
        share=random.choice((0.0, 0.0, 0.2)),
        every=random.choice((Every(), Every(), Every(seconds=0.01), Every(changes=3))),
        joins=random.choice((False, True)),
    )


class World:
    """A job on simulated hosts.

    Args:
        scene: what happens.
        random: decides when and where.
        memory: where the tables lie.
        trace: gets a line for each thing that happens.
    """

    def __init__(
        self, scene: Scene, random: Random, memory: Memory, trace: Callable[[str], None] | None = None
    ) -> None:
        self.scene, self.random, self.clock = scene, random, Clock()
        self.trace = trace
        self.faults = 0
        self.refused = 0
        self.moves = 0  # hosts that were lost or have come again: a barrier begins anew
        self.regrouping = 0
        self.joining = 0  # hosts that are lost and will come again, or are about to take the values
        self.joined = 0
        self._adds_left = 0
        self.total = [np.zeros(size, dtype) for size, dtype in zip(scene.elements, scene.dtypes, strict=True)]
        self.hosts = [Host(number, Pace(scene.share)) for number in range(scene.hosts)]
        self.connections: dict[tuple[int, int], Connection] = {}
        self.history: dict[tuple[int, int], list[bytes]] = {}
        for host in self.hosts:
            for peer in range(scene.hosts):
                if peer != host.number and (not scene.star or 0 in (peer, host.number)):
                    host.links[peer] = self._new_link(host, peer)
            for number, (size, dtype) in enumerate(zip(scene.elements, scene.dtypes, strict=True), 1):
                copy = Copy(memory.shard(10 * host.number + number, size, dtype, scene.convex), CHUNK_BYTES)
                changes = host.changes[number] = Changes()
                host.copies[number] = copy
                chunks = list(range(len(copy.chunks)))
                homes = chunks if scene.star else homes_of(number, len(chunks), list(range(scene.hosts)))
                host.homes[number] = homes
                wire = Wire.of(scene.wire, dtype)
                for link in host.links.values():
                    link.attach(number, Held(copy, changes, homes, wire, scene.every))
        for high in range(scene.hosts):
            for low in range(min(high, 1) if scene.star else high):
                self._later(0.001, self._connect, low, high)
        for host in self.hosts:
            self._later(0.001, self._look, host)

    def _new_link(self, host: Host, peer: int) -> Link:
        return Link(host.number, peer, host.pace, window=self.scene.window or self.random.choice((1, 3, 8)))

    def say(self, what: str) -> None:
        if self.trace is not None:
            self.trace(f"{self.clock.now * 1e3:10.3f} ms  {what}")

    def _later(self, most: float, do: Callable[..., None], *arguments: Any) -> None:
        self.clock.after(self.random.uniform(0, most), lambda: do(*arguments))

    def _when_up(self, host: Host, do: Callable[[], None]) -> bool:
        """Whether a host does anything now; if it stands still, it does this when it goes on."""
        if host.dead:
            return False
        if self.clock.now >= host.stalled_until:
            return True
        self.clock.at(host.stalled_until, do)
        return False

    # -- connections -----------------------------------------------------------------------------------------

    def _connect(self, low: int, high: int) -> None:
        ends = (self.hosts[low], self.hosts[high])
        if any(host.dead for host in ends):
            return
        for host in ends:
            if not self._when_up(host, lambda: self._connect(low, high)):
                return
        old = self.connections.get((low, high))
        if old is not None:  # the older one is fenced: its threads end before the new one begins
            for number in (low, high):
                self._end(low, high, old, number)
        self.say(f"connection {low}-{high}")
        made = Connection({}, {})
        self.connections[low, high] = made
        for sender, receiver in (ends, ends[::-1]):
            end = receiver.carried(sender.number)
            assert end is not None
            made.readers[receiver.number] = Reader()

            made.inbox[receiver.number] = deque()

            def deliver(data: bytes, sender: Host = sender, receiver: Host = receiver) -> None:
                made.inbox[receiver.number].append(data)
                self._deliver(low, high, made, sender, receiver)

            card = sender.card if self.scene.line.shared else Card()
            wire = Direction(self.clock, self.random, self.scene.line, card, deliver)
            wire.broken = lambda: self._break(low, high, made)
            made.wires[sender.number] = wire
            made.busy[sender.number] = False
        for host, peer in (ends, ends[::-1]):
            end = host.carried(peer.number)
            assert end is not None
            end.connect(peer.incarnation)
            end.at_distance(0.0 if host.number % 2 else FAR)
        for host, peer in (ends, ends[::-1]):
            self._send(low, high, made, host, peer)

    def _end(self, low: int, high: int, connection: Connection, number: int) -> None:
        """One side notices the end of a connection."""
        if number in connection.ended:
            return
        connection.ended.add(number)
        connection.wires[low + high - number].cut = True  # nothing more comes to this side
        link = self.hosts[number].carried(low + high - number)
        if link is not None:
            link.cut()

    def _break(self, low: int, high: int, connection: Connection) -> None:
        """The network cuts a connection: both sides notice, each in its time; the higher one connects anew."""
        if self.connections.get((low, high)) is not connection or connection.ended:
            return
        self.faults += 1
        self.say(f"cut {low}-{high}")
        for wire in connection.wires.values():
            wire.cut = True
        first = self.random.choice((low, high))
        self._end(low, high, connection, first)

        def rest() -> None:
            self._end(low, high, connection, low + high - first)

        self._later(0.01, rest)
        self._later(_RECONNECT_SECONDS, self._connect, low, high)

    def _send(self, low: int, high: int, connection: Connection, host: Host, peer: Host) -> None:
        """The sending thread's turn."""
        if self.connections.get((low, high)) is not connection or host.number in connection.ended:
            return
        if connection.busy[host.number]:
            return
        if not self._when_up(host, lambda: self._send(low, high, connection, host, peer)):
            return
        link = host.carried(peer.number)
        if link is None:
            return
        outgoing = link.next(self.clock.now)
        if outgoing is None:
            wait = link.wait(self.clock.now)
            if wait:  # the budget is used up for now
                self.clock.after(wait + 1e-6, lambda: self._send(low, high, connection, host, peer))
            return
        host.pace.spent(self.clock.now, _KERNEL_SECONDS)
        data = b"".join((outgoing.header.pack(), outgoing.body, *outgoing.more))
        if self.trace is not None:
            self.say(f"{host.number} -> {peer.number}  {outgoing.header}")
        kept = self.history.setdefault((host.number, peer.number), [])
        kept.append(data)
        connection.busy[host.number] = True
        wire = connection.wires[host.number]
        go_on = wire.send(data)

        def again() -> None:
            connection.busy[host.number] = False
            self._send(low, high, connection, host, peer)

        self.clock.after(max(go_on - self.clock.now, _KERNEL_SECONDS), again)

    def _deliver(self, low: int, high: int, connection: Connection, sender: Host, receiver: Host) -> None:
        """The receiving thread's turn."""
        if receiver.number in connection.ended:
            return
        if not self._when_up(receiver, lambda: self._deliver(low, high, connection, sender, receiver)):
            return
        data = b"".join(connection.inbox[receiver.number])
        connection.inbox[receiver.number].clear()
        reader, link = connection.readers[receiver.number], receiver.carried(sender.number)
        assert link is not None
        try:
            while data:
                room = reader.room()
                count = min(len(room), len(data))
                room[:count] = data[:count]
                data = data[count:]
                reader.filled(count)
                while True:
                    begun = reader.begin()
                    whole = reader.whole() if begun is None else reader.place(link.accept(begun))
                    if whole is None:
                        break
                    link.arrived(*whole, self.clock.now)
                    receiver.pace.spent(self.clock.now, _KERNEL_SECONDS)
        except ProtocolError as error:
            self.refused += 1
            self.say(f"host {receiver.number} ends {low}-{high}: {error}")
            self._break(low, high, connection)
            return
        self._send(low, high, connection, receiver, sender)

    # -- the hosts --------------------------------------------------------------------------------------------

    def _look(self, host: Host, pause: float = 0.001) -> None:
        """The watching thread's turn: often while something happens."""
        if self._when_up(host, lambda: self._look(host)):
            pause = min(0.05, 1.5 * pause)
            for peer, link in host.links.items():
                if link.look(self.clock.now) == 0.0:
                    pause = 0.001
                    low, high = sorted((host.number, peer))
                    connection = self.connections.get((low, high))
                    if connection is not None:
                        self._send(low, high, connection, host, self.hosts[peer])
            self.clock.after(pause, lambda: self._look(host, pause))

    def add(self, host: Host, table: int) -> None:
        """A worker adds small whole numbers."""
        if host.dead or not host.ready:
            self._adds_left -= 1
            return
        if not self._when_up(host, lambda: self.add(host, table)):
            return
        values = host.copies[table].shard.values()
        delta = np.array([self.random.randint(-3, 3) for _ in range(values.size)], values.dtype)
        if self.scene.crashes:
            delta[self.owners(table) != host.number] = 0
        values += delta
        self.total[table - 1] += delta
        host.changes[table].version += 1
        self._adds_left -= 1

    # -- a whole schedule ---------------------------------------------------------------------------------------

    def run(self) -> None:
        """Lets the workers add beside all faults, then lets everybody come to a barrier, and looks at the sums."""
        scene = self.scene
        self._adds_left = scene.adds * scene.hosts * len(scene.elements)
        for host in self.hosts:
            for table in host.copies:
                for _ in range(scene.adds):
                    self._later(scene.seconds, self.add, host, table)
        self.schedule_faults()
        self._until(lambda: self._adds_left == 0, "the adds")
        self.barrier()
        for table, total in enumerate(self.total, 1):
            for host in self.live:
                values = host.copies[table].shard.values()
                assert np.array_equal(values, total), (
                    f"table {table} of host {host.number}: {values - total} from the sum"
                )

    def schedule_faults(self) -> None:
        """Lets each fault of the scene happen at some moment."""
        scene = self.scene
        for kind, count in (
            (self._fault_cut, scene.cuts),
            (self._fault_stall, scene.stalls),
            (self._fault_silence, scene.silences),
            (self._fault_replay, scene.replays),
            (self._fault_crash, scene.crashes),
        ):
            for _ in range(count):
                self._later(scene.seconds * 1.5, kind)

    def barrier(self) -> None:
        """All hosts give what they have, then take what there is; again if one is lost or has come meanwhile."""
        step = 0
        while step < 2:
            self._until(lambda: self.regrouping == 0 == self.joining, "the loss of a host")
            self._until(lambda: self._adds_left == 0, "the adds of one that has come again")
            moves = self.moves
            tickets: list[Ticket] = []
            for host in self.live:
                for peer, link in host.links.items():
                    tickets.append(link.settle(take=step == 1))
                    self._later(0, self._poke, host, peer)
            self._until(lambda: self.moves != moves or all(t.done for t in tickets), "a barrier")  # noqa: B023
            step = step + 1 if self.moves == moves else 0

    @property
    def live(self) -> list[Host]:
        """The hosts that are left."""
        return [host for host in self.hosts if not host.dead]

    def owners(self, table: int) -> Any:
        """Which host adds to each element, where a host is lost."""
        return np.arange(self.total[table - 1].size) % len(self.hosts)

    def _poke(self, host: Host, peer: int) -> None:
        low, high = sorted((host.number, peer))
        connection = self.connections.get((low, high))
        if connection is not None:
            self._send(low, high, connection, host, self.hosts[peer])

    def _until(self, done: Callable[[], bool], what: str) -> None:
        limit, events = self.clock.now + 600.0, self.clock.events + 200_000 * len(self.hosts)
        while not done():
            assert self.clock.step(), f"nothing happens any more, and {what} is not over"
            assert self.clock.now < limit, f"{what} takes too long"
            assert self.clock.events < events, f"{what} takes too many frames"

    # -- faults -------------------------------------------------------------------------------------------------

    def _fault_cut(self) -> None:
        if self.connections:
            connection = self.connections[self.random.choice(sorted(self.connections))]
            wire = connection.wires[self.random.choice(sorted(connection.wires))]
            wire.left = self.random.randint(0, 3 * (HEADER_BYTES + CHUNK_BYTES))

    def _fault_stall(self) -> None:
        host = self.random.choice(self.hosts)
        host.stalled_until = self.clock.now + self.random.choice((0.001, 0.05, 2.0))
        self.say(f"host {host.number} stands still")
        self.faults += 1

    def _fault_silence(self) -> None:
        if self.connections:
            connection = self.connections[self.random.choice(sorted(self.connections))]
            wire = connection.wires[self.random.choice(sorted(connection.wires))]
            wire.silent_until = self.clock.now + self.random.choice((0.01, 0.5, 5.0))
            self.faults += 1

    def _fault_crash(self) -> None:
        """A host is lost."""
        self._crash(self.random.choice(self.hosts))

    def _crash(self, dead: Host) -> None:
        """The others are told so, each in its time."""
        self.say(f"host {dead.number} is lost")
        self.faults += 1
        self.moves += 1
        dead.dead, dead.ready = True, False
        self.joining += self.scene.joins
        for (low, high), connection in sorted(self.connections.items()):
            if dead.number in (low, high):
                for wire in connection.wires.values():
                    wire.cut = True
                connection.ended.add(dead.number)
                self._later(0.01, self._end, low, high, connection, low + high - dead.number)
        self.regrouping = len(self.live)
        for host in self.live:
            self._tell_loss(host, dead)

    def _tell_loss(self, host: Host, dead: Host) -> None:
        self._later(0.05, self._regroup, host, dead)

    def _regroup(self, host: Host, dead: Host) -> None:
        if not self._when_up(host, lambda: self._regroup(host, dead)):
            return
        self.say(f"host {host.number} goes on without host {dead.number}")
        low, high = sorted((host.number, dead.number))
        if (low, high) in self.connections:
            self._end(low, high, self.connections[low, high], host.number)
        gone = host.links.pop(dead.number)
        live = [other.number for other in self.live]
        for table, old in host.homes.items():
            new = host.homes[table] = rehomed(old, live)
            moved = [chunk for chunk, home in enumerate(old) if new[chunk] != home]
            agreed = gone.hand_over(table)
            for chunk in moved:
                self._count_loss(host, table, chunk, new[chunk], agreed[chunk])
            for peer, link in host.links.items():
                away = {chunk: agreed[chunk] for chunk in moved if new[chunk] == peer}
                link.regroup(table, 1, away, [chunk for chunk in moved if new[chunk] == host.number])
            self._keep_what_was_given(host, table, dead)
        self._expect_again(host, dead)
        self.regrouping -= 1
        if self.regrouping == 0 and self.joining:
            self._later(0.05, self._join, dead)

    def _keep_what_was_given(self, host: Host, table: int, dead: Host) -> None:
        """Of what a lost host had added that is there which it had given to the home, new or old."""
        values, total = host.copies[table].shard.values(), self.total[table - 1]
        for chunk in host.copies[table].chunks:
            if host.homes[table][chunk.number] == host.number:
                place = slice(chunk.low, chunk.high)
                its = self.owners(table)[place] == dead.number
                total[place][its] = values[place][its]

    def _expect_again(self, host: Host, other: Host) -> None:
        """A fresh link to a host of which nothing is known."""
        link = host.links[other.number] = self._new_link(host, other.number)
        for number, copy in host.copies.items():
            wire = Wire.of(self.scene.wire, self.scene.dtypes[number - 1])
            held = Held(copy, host.changes[number], host.homes[number], wire, self.scene.every)
            link.attach(number, held, 1)

    def _join(self, host: Host) -> None:
        """Another node takes a lost host's place: it has nothing, and takes all values before its workers begin."""
        self.say(f"host {host.number} comes again")
        live = [other.number for other in self.live]
        for key in [key for key in self.history if host.number in key]:
            del self.history[key]  # on connections of the old node, which are closed for good
        host.dead, host.incarnation, host.stalled_until = False, host.incarnation + 1, 0.0
        host.links.clear()
        for number, copy in host.copies.items():
            copy.shard.values()[:] = 0
            host.changes[number] = Changes()
            first = homes_of(number, len(copy.chunks), list(range(self.scene.hosts)))
            host.homes[number] = rehomed(first, live)
        for peer in live:
            self._expect_again(host, self.hosts[peer])
            low, high = sorted((host.number, peer))
            self._later(0.02, self._connect, low, high)
        self._later(0.001, self._look, host)
        tickets = [link.settle(take=True) for link in host.links.values()]

        def look() -> None:
            if not all(ticket.done for ticket in tickets):
                self._later(0.01, look)
                return
            self.say(f"host {host.number} has taken all values")
            host.ready = True
            self.joined += 1
            self.joining -= 1
            self.moves += 1
            for table in host.copies:
                for _ in range(self.scene.adds):
                    self._adds_left += 1
                    self._later(self.scene.seconds, self.add, host, table)

        look()

    def _count_loss(self, host: Host, table: int, chunk: int, home: int, agreed: Any) -> None:
        """What is promised to be missing: what this host had agreed on, less what the new home had of it."""
        place = slice(host.copies[table].chunks[chunk].low, host.copies[table].chunks[chunk].high)
        owners, total = self.owners(table)[place], self.total[table - 1][place]
        if host.number == home:
            values = host.copies[table].shard.values()[place]
            others = owners != home
            total[others] += values[others]
        else:
            mine = owners == host.number
            total[mine] -= agreed[mine]

    def _fault_replay(self) -> None:
        """A frame that was sent before, on whatever connection, comes once more."""
        pairs = sorted(key for key, kept in self.history.items() if kept)
        if not pairs:
            return
        sender, receiver = self.random.choice(pairs)
        low, high = sorted((sender, receiver))
        connection = self.connections.get((low, high))
        if connection is not None and not connection.ended and not connection.busy[sender]:
            self.faults += 1
            data = self.random.choice(self.history[sender, receiver])
            self.say(f"{sender} -> {receiver} comes again")
            connection.wires[sender].send(data)


def run(seed: int, memory: Memory, trace: Callable[[str], None] | None = None, joins: bool = False) -> World:
    """Runs the schedule of a seed, with ``joins`` one in which a host is lost and comes again.

    Raises:
        AssertionError: what is wrong with it.
    """
    random = Random(seed)
    scene = random_scene(random)
    world = World(replace(scene, crashes=1, joins=True) if joins else scene, random, memory, trace)
    if trace is not None:
        trace(str(world.scene))
    world.run()
    return world
