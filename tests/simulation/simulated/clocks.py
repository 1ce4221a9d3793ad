"""Bounded staleness on simulated hosts: who reads has all that the others had added up to the bound.

The links' own ``settle`` and ``take`` carry the adds. Around them stands what a thread of
``runtime/several_hosts/exchanged_tables.py`` does: a host reads its worker's clock, settles, and tells the others; who
is told takes, and then shows the clock to its worker.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random

from multiverso.hosts.values.state import Ticket
from simulated.world import Host, Memory, World, random_scene

TABLE = 1
_POLL_SECONDS = 5e-4
_CONTROL_SECONDS = 2e-3


@dataclass
class Clock:
    """What a host knows of ticks: its own, and by other host what it was told and what its worker may see."""

    own: int = 0
    told: int = 0
    saying: bool = False
    showing: bool = False
    heard: dict[int, int] = field(default_factory=dict)
    shown: dict[int, int] = field(default_factory=dict)


class Clocked(World):
    """A worker on each host adds one to its own elements, ticks, and reads; a read waits for the slowest.

    Args:
        bound: how many ticks a worker may be ahead of another.
        takes: whether what others have added is taken before their clocks are shown; else reads are too old.
    """

    bound = 1
    takes = True

    def run(self) -> None:
        """Lets every worker do its ticks beside all faults."""
        self.ticks = {host.number: Clock() for host in self.hosts}
        self.turns = 3 * self.scene.adds
        for host in self.hosts:
            for other in self.hosts:
                if other is not host:
                    self.ticks[host.number].shown[other.number] = 0
            self._later(self.scene.seconds, self._turn, host)
            self._later(self.scene.seconds, self._exchange, host)
        self.schedule_faults()
        self._until(lambda: all(clock.own == self.turns for clock in self.ticks.values()), "the ticks")

    def _turn(self, host: Host) -> None:
        """The worker's turn: it reads once it may, adds and ticks."""
        if not self._when_up(host, lambda: self._turn(host)):
            return
        clock, copy = self.ticks[host.number], host.copies[TABLE]
        oldest = clock.own - self.bound
        if min(clock.shown.values()) < oldest:
            self.clock.after(_POLL_SECONDS, lambda: self._turn(host))
            return
        values, owners = copy.shard.values(), self.owners(TABLE)
        for other in self.hosts:
            seen = values[owners == other.number]
            assert (seen >= oldest).all(), f"host {host.number} at {clock.own} reads {seen} of {other.number}"
        values[owners == host.number] += 1
        host.changes[TABLE].version += 1
        clock.own += 1
        if clock.own < self.turns:
            self._later(2 * self.scene.seconds / self.turns, self._turn, host)

    def _exchange(self, host: Host) -> None:
        """The nodes' part: says how far this host is, and shows how far others are."""
        if not self._when_up(host, lambda: self._exchange(host)):
            return
        clock = self.ticks[host.number]
        if clock.own > clock.told and not clock.saying:
            clock.saying, now = True, clock.own

            def tell() -> None:
                clock.told, clock.saying = now, False
                for other in self.hosts:
                    if other is not host:
                        self._later(_CONTROL_SECONDS, self._hear, other, host.number, now)

            self._when_done(host, self._tickets(host, take=False), tell)
        if clock.heard and not clock.showing:
            clock.showing = True
            heard, clock.heard = clock.heard, {}

            def show() -> None:
                clock.showing = False
                clock.shown.update(heard)

            self._when_done(host, self._tickets(host, take=True) if self.takes else [], show)
        self.clock.after(_POLL_SECONDS, lambda: self._exchange(host))

    def _hear(self, host: Host, other: int, ticks: int) -> None:
        if self._when_up(host, lambda: self._hear(host, other, ticks)):
            heard = self.ticks[host.number].heard
            heard[other] = max(ticks, heard.get(other, 0), self.ticks[host.number].shown[other])

    def _tickets(self, host: Host, take: bool) -> list[Ticket]:
        tickets = [link.settle(take=take) for link in host.links.values()]
        for peer in host.links:
            self._later(0, self._poke, host, peer)
        return tickets

    def _when_done(self, host: Host, tickets: list[Ticket], do: Callable[[], None]) -> None:
        if not self._when_up(host, lambda: self._when_done(host, tickets, do)):
            return
        if all(ticket.done for ticket in tickets):
            do()
        else:
            self.clock.after(_POLL_SECONDS, lambda: self._when_done(host, tickets, do))


class Careless(Clocked):
    """Shows clocks before what was added until then is there."""

    takes = False


def run(
    seed: int, memory: Memory, trace: Callable[[str], None] | None = None, kind: type[Clocked] = Clocked
) -> Clocked:
    """Runs the schedule of a seed; an AssertionError says what is wrong with it."""
    random = Random(seed)
    scene = random_scene(random)
    scene = replace(scene, elements=scene.elements[:1], dtypes=scene.dtypes[:1], crashes=0)
    scene = replace(scene, elements=(max(scene.elements[0], scene.hosts),))
    world = kind(scene, random, memory, trace)
    world.bound = random.choice((0, 1, 3))
    world.run()
    return world
