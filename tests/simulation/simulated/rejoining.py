"""Synchronous rounds on simulated hosts that are lost and come again, or have no worker for a while.

Who comes again has nothing: it passes on what the others send, asks for a turn that brings the values, and then its
workers join a round. A host whose workers were all away has old values, as an updater is run by workers, and asks, too.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

import numpy as np

from multiverso.hosts.rounds.neighbour import Neighbour
from multiverso.hosts.rounds.rounds import Rounds
from simulated.rounds import TABLE, RoundsWorld, Staged
from simulated.world import Host, random_scene


@dataclass(eq=False)
class Kept(Staged):
    """A table whose values after a round may be missing.

    Attributes:
        blank: it was never filled.
        away: no worker of the host is there.
        slow: so often `complete` is asked in vain.
        came: the first round that workers take part in who came later.
    """

    blank: bool = False
    away: bool = False
    slow: int = 0
    came: int = 0
    done: int = -1  # the last round whose values are here

    def members(self, number: int) -> int | None:
        return 0 if self.away else super().members(number)

    def wanted(self, number: int) -> bool:
        return not self.away and super().wanted(number)

    def decide(self, number: int, members: int) -> int:
        assert not self.blank
        self.decided = number
        return members

    def fold(self, number: int, chunk: int, members: int, total: np.ndarray, count: int) -> int:
        assert not self.blank
        return count if number and not members else super().fold(number, chunk, members, total, count)

    def take(self, number: int, chunk: int, total: np.ndarray, count: int) -> None:
        assert not self.blank
        while len(self.chunks) < number:
            self.chunks.append([])
        if self.away or self.done < number - 1:  # nobody runs the updater
            return
        assert len(self.values) == number, "a round has begun before the one before was over"
        super().take(number, chunk, total, count)
        if len(self.values) > number:
            self.done = number

    def complete(self, number: int) -> bool | None:
        if self.done >= number:
            assert self.done == number, "the chain has gone on"
            self.slow -= 1
            return None if self.slow >= 0 else True
        return False if self.away else None

    def fill_bytes(self, chunk: int) -> int:
        return 8 + self.first[self.place(chunk)].nbytes

    def give(self, chunk: int, into: np.ndarray) -> None:
        into[:8].view(np.int64)[0] = self.done
        into[8:].view(np.float32)[:] = self.values[self.done][self.place(chunk)]

    def put(self, chunk: int, found: np.ndarray) -> None:
        number = int(found[:8].view(np.int64)[0])
        if chunk == 0:
            self.number, self.found = number, np.full(self.elements, np.nan, np.float32)
        assert self.number == number
        self.found[self.place(chunk)] = found[8:].view(np.float32)

    def filled(self) -> int:
        assert self.number >= self.done
        empty = np.empty(0, np.float32)
        self.values += [empty] * (self.number + 1 - len(self.values))
        self.values[self.number] = self.found
        self.chunks += [[] for _ in range(self.number + 1 - len(self.chunks))]
        self.done, self.blank = self.number, False
        self.decided = self.number
        return self.number


class RejoiningWorld(RoundsWorld):
    """Hosts that are lost, come again and go away, one after another; all are told of it in the same order.

    Attributes:
        keeper: a host that has workers all the time.
        making: seconds that a host which comes again takes to make the table; it may be connected before that.
    """

    def __init__(self, seed: int, trace: Callable[[str], None] | None = None) -> None:
        random = Random(seed)
        scene = random_scene(random)
        scene = replace(scene, crashes=random.choice((1, 1, 2, 3)), adds=random.choice((3, 8, 20)))
        super().__init__(scene, random, trace)
        self.events: list[tuple[str, int]] = []  # of all: losses and returns, in the coordinator's order
        self.obeyed = [0] * scene.hosts
        self.making = 0.3 if seed % 4 == 3 else 0.0
        self.begun: set[int] = set()
        self.keeper = random.choice((0, 0, 1))
        self.kept = [Kept(s.elements, s.chunk, s.first, s.parts, slow=random.choice((0, 0, 3))) for s in self.staged]
        self.staged = self._coded(self.kept)
        self.filled = 0  # how often values were asked for, and came
        others = [host for host in self.hosts if host.number != self.keeper]
        self.optional = {0} - {self.keeper}  # whose part may be missing from a round
        if random.random() < 0.5:
            self._later(scene.seconds, self._go_away, random.choice(others))

    def _attach(self, host: Host) -> None:
        if host.incarnation == 1:
            super()._attach(host)

    def _begin(self, host: Host) -> None:
        if host.incarnation == 1:
            super()._begin(host)
            if (table := self.rounds[host.number].tables.get(TABLE)) is not None and table.began:
                self.begun.add(host.number)

    # -- who is there ----------------------------------------------------------------------------------------

    def _members(self, until: int) -> list[int]:
        there = set(range(len(self.hosts)))
        for kind, host in self.events[:until]:
            there = there | {host} if kind == "joined" else there - {host}
        return sorted(there)

    def _new_link(self, host: Host, peer: int):  # type: ignore[no-untyped-def]
        link = super()._new_link(host, peer)
        if getattr(self, "rounds", None) and len(self.rounds) > host.number:
            host.neighbours[peer] = Neighbour(self.rounds[host.number], peer)
        return link

    def _connect(self, low: int, high: int) -> None:
        for mine, other in ((low, high), (high, low)):
            losses = [i for i, event in enumerate(self.events) if event == ("lost", other)]
            if losses and self.obeyed[mine] <= losses[-1] and not self.hosts[mine].dead:
                self._later(0.01, self._connect, low, high)  # its place has not been made free there
                return
        super()._connect(low, high)

    def _fault_crash(self) -> None:
        keep = {0, self.keeper}
        alive = [host for host in self.hosts if not host.dead and host.number not in keep]
        if alive:
            self._crash(self.random.choice(alive))

    def _crash(self, dead: Host) -> None:
        self.say(f"host {dead.number} is lost")
        self.faults += 1
        self.moves += 1
        self.optional.add(dead.number)
        dead.dead = True
        for (low, high), connection in sorted(self.connections.items()):
            if dead.number in (low, high):
                for wire in connection.wires.values():
                    wire.cut = True
                connection.ended.add(dead.number)
                self._later(0.01, self._end, low, high, connection, low + high - dead.number)
        self._tell(("lost", dead.number))
        self.joining += 1
        self._later(self.random.choice((0.01, 0.1)), self._join, dead)

    def _tell(self, event: tuple[str, int]) -> None:
        self.events.append(event)
        for host in self.live:
            self._later(0.05, self._obey, host, host.incarnation)

    def _obey(self, host: Host, incarnation: int) -> None:
        """A host does what it is told next, if that process of it is still there."""
        if host.incarnation != incarnation or not self._when_up(host, lambda: self._obey(host, incarnation)):
            return
        if self.obeyed[host.number] == len(self.events):
            return
        kind, other = self.events[self.obeyed[host.number]]
        self.obeyed[host.number] += 1
        self.say(f"host {host.number} hears: {kind} {other}")
        if kind == "lost":
            low, high = sorted((host.number, other))
            if (low, high) in self.connections:
                self._end(low, high, self.connections[low, high], host.number)
            host.links[other] = self._new_link(host, other)
        self.rounds[host.number].regroup(self._members(self.obeyed[host.number]))

    def _join(self, host: Host) -> None:
        """Another node takes a lost host's place, once no table is half made: it has nothing."""
        if not all(other.number in self.begun for other in self.live):
            self._later(0.01, self._join, host)
            return
        self.say(f"host {host.number} comes again")
        self.begun.add(host.number)
        for key in [key for key in self.history if host.number in key]:
            del self.history[key]
        host.dead, host.incarnation, host.stalled_until = False, host.incarnation + 1, 0.0
        self.events.append(("joined", host.number))
        self.obeyed[host.number] = number = len(self.events)
        for other in self.live:
            if other is not host:
                self._later(0.05, self._obey, other, other.incarnation)
        old = self.kept[host.number]
        staged = Kept(old.elements, old.chunk, old.first, old.parts, blank=True, away=True)
        staged.wire = old.wire
        self.kept[host.number] = staged
        self.rounds[host.number] = rounds = Rounds(
            host.number, range(len(self.hosts)), lambda peer: self._wake(host, peer)
        )
        rounds.form(self._members(number), number)
        if self.making:
            self._later(self.making, self._make, host, host.incarnation)
        else:
            self._make(host, host.incarnation)
        for peer in range(len(self.hosts)):
            if peer != host.number:
                host.links[peer] = self._new_link(host, peer)
                self._later(0.02, self._connect, *sorted((host.number, peer)))
        self._later(0.001, self._look, host)
        self._work(host)
        self._later(self.random.choice((0.001, 0.2)), self._ask, host, host.incarnation)

    def _make(self, host: Host, incarnation: int) -> None:
        if host.incarnation != incarnation or not self._when_up(host, lambda: self._make(host, incarnation)):
            return
        rounds, staged = self.rounds[host.number], self.kept[host.number]
        rounds.attach(TABLE, staged, self.overwritten)
        if self.overwritten:
            self.whole[host.number] = lambda: not rounds.missing(TABLE)

    def _begin_overwriting(self, host: Host, writer: int, turn: int) -> None:
        if host.incarnation == self.incarnations[host.number]:  # one that comes later hears of it when it comes
            super()._begin_overwriting(host, writer, turn)

    def _overwrite_at_a_barrier(self) -> None:
        self.incarnations = [host.incarnation for host in self.hosts]
        super()._overwrite_at_a_barrier()

    def _check_set(self, writer: Host, new: np.ndarray) -> None:
        kept = self.kept[self.keeper].values[-1]
        for host in self.live:
            staged = self.kept[host.number]
            assert staged.blank or np.array_equal(staged.values[-1], kept)
        if not writer.dead and writer.incarnation == self.incarnations[writer.number]:
            assert np.array_equal(kept, new), "what was set is not there"

    # -- workers that come and go -----------------------------------------------------------------------------

    def _go_away(self, host: Host) -> None:
        """The workers of a host die, one after another as far as its node knows: between two rounds of theirs."""
        staged = self.kept[host.number]
        if host.dead or staged.away or not staged.values:
            return
        if staged.ready >= staged.done + 1:
            self._later(0.01, self._go_away, host)  # what they have given counts
            return
        self.say(f"host {host.number} has no worker any more")
        self.optional.add(host.number)
        staged.away = True
        self.joining += 1
        self._later(self.random.choice((0.001, 0.2)), self._ask, host, host.incarnation)

    def _ask(self, host: Host, incarnation: int) -> None:
        """A worker comes, and wants the values."""
        if host.incarnation != incarnation or not self._when_up(host, lambda: self._ask(host, incarnation)):
            return
        self.say(f"host {host.number} asks for the values")
        rounds, staged = self.rounds[host.number], self.kept[host.number]
        if TABLE not in rounds.tables:
            self._later(0.01, self._ask, host, incarnation)
            return

        def then(here: bool) -> None:
            assert here, f"nobody has the values that host {host.number} lacks"
            self._later(self.random.choice((0.0, 0.05)), enter)

        def enter() -> None:
            if host.incarnation != incarnation or not self._when_up(host, enter):
                return
            self.say(f"host {host.number} goes on after round {staged.done}")
            staged.ready, staged.away, staged.came = staged.done, False, staged.done + 1
            self.filled += 1
            self.joining -= 1
            rounds.release(TABLE)

        rounds.refill(TABLE, then)

    def _work(self, host: Host) -> None:
        incarnation = host.incarnation
        if not self._when_up(host, lambda: self._work_again(host, incarnation)):
            return
        staged, rounds = self.kept[host.number], self.rounds[host.number]
        if not staged.away and staged.done == staged.ready and staged.ready < self.scene.adds:
            staged.ready += 1
        rounds.look(self.clock.now)
        pause = self.random.choice((1e-5, 1e-3, 0.02)) if staged.done < self.scene.adds else 0.02
        self._later(pause, self._work_again, host, incarnation)

    def _work_again(self, host: Host, incarnation: int) -> None:
        if host.incarnation == incarnation:
            self._work(host)

    def _done(self) -> bool:
        return all(
            self.kept[host.number].done >= self.scene.adds and not self.kept[host.number].away for host in self.live
        ) and len(self.live) == len(self.hosts)

    # -- what has to hold -------------------------------------------------------------------------------------

    def run(self) -> None:
        self.schedule_faults()
        self._until(self._done, "the rounds")
        kept = self.kept[self.keeper]
        assert all(values.size for values in kept.values)
        for host in self.hosts:
            for number, values in enumerate(self.kept[host.number].values):
                same = not values.size or np.array_equal(values, kept.values[number])
                assert same, f"round {number} differs between hosts {self.keeper} and {host.number}"
        if not self.coding.leaves_out:
            self._check_sums(kept)
        self._overwrite_at_a_barrier()

    def _check_sums(self, kept: Kept) -> None:
        """Each chunk of each round has what all gave, or all but some of those that were away."""
        everyone = range(len(self.hosts))
        old = kept.values[0]
        for number in range(self.scene.adds + 1):
            came = {host for host in everyone if 0 < self.kept[host].came <= number}
            missing = sorted(self.optional - came)
            for low in range(0, kept.elements, kept.chunk):
                place = slice(low, low + kept.chunk)
                found = any(
                    np.array_equal(kept.values[number][place], self._sum(number, there, old, place))
                    for count in range(len(missing) + 1)
                    for gone in itertools.combinations(missing, count)
                    if (there := [host for host in everyone if host not in gone])
                )
                assert found, f"round {number} at {low}"
            old = kept.values[number]


def run(seed: int, trace: Callable[[str], None] | None = None) -> RejoiningWorld:
    """Runs the schedule of a seed; an AssertionError says what is wrong with it."""
    world = RejoiningWorld(seed, trace)
    world.run()
    return world
