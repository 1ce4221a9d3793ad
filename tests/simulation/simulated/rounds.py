"""Synchronous rounds on simulated hosts: the same bits everywhere in every schedule, whoever is lost in between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, NamedTuple

import numpy as np

from multiverso.hosts.codecs import Wire
from multiverso.hosts.peer.frames import HEADER_BYTES
from multiverso.hosts.rounds.frames import SUM, RoundHeader
from multiverso.hosts.rounds.memory import RoundMemory
from multiverso.hosts.rounds.neighbour import Neighbour
from multiverso.hosts.rounds.rounds import Rounds
from simulated.world import Host, Memory, Scene, World, random_scene

TABLE = 1


class Coding(NamedTuple):
    """How sums travel, and whether that leaves out anything of the numbers that are added here."""

    wire: str = "native"
    leaves_out: bool = False


CODINGS = (
    Coding(), Coding(), Coding("int8"), Coding("bfloat16"), Coding("int8", True), Coding("topk:0.3", True)
)  # fmt: skip


def seed_of(scene: Scene) -> int:
    """Returns a number that the schedule decides, and that decides nothing of it."""
    return Random(str(scene)).randrange(1 << 32)


@dataclass(eq=False)
class Staged(RoundMemory):
    """A host's table in plain NumPy: what its workers contribute to each round is known beforehand."""

    elements: int
    chunk: int
    first: np.ndarray
    parts: list[list[np.ndarray | None]]  # of each round from 1, of each of its workers
    dtype: Any = field(default_factory=lambda: np.dtype("float32"))
    ready: int = 0  # the last round that its workers are ready for
    values: list[np.ndarray] = field(default_factory=list)  # after each round
    chunks: list[list[np.ndarray]] = field(default_factory=list)
    decided: int = 0

    def members(self, number: int) -> int | None:
        return 1 if self.ready >= number else None

    def wanted(self, number: int) -> bool:
        return 0 < number <= self.ready

    def decide(self, number: int, members: int) -> int:
        assert number == self.decided + 1
        self.decided = number
        return members

    def place(self, chunk: int) -> slice:
        return slice(chunk * self.chunk, min(self.elements, (chunk + 1) * self.chunk))

    def fold(self, number: int, chunk: int, members: int, total: np.ndarray, count: int) -> int:
        place = self.place(chunk)
        if number == 0:
            total[:] = self.first[place] if count == 0 else total + self.first[place]
            return count + 1
        assert members == 1
        for part in self.parts[number - 1]:
            if part is not None:
                begin = np.float32(0) if self.is_coded else self.values[number - 1][place]
                total[:] = (begin if count == 0 else total) + part[place]
                count += 1
        return count

    def written(self, chunk: int, total: np.ndarray) -> None:
        total[:] = self.values[-1][self.place(chunk)]

    def overwrite(self, chunk: int, total: np.ndarray) -> None:
        self.values[-1][self.place(chunk)] = total

    def finish(self, number: int, chunk: int, members: int, total: np.ndarray, count: int) -> int:
        count = self.fold(number, chunk, members, total, count)
        self.take(number, chunk, total, count)
        return count

    def take(self, number: int, chunk: int, total: np.ndarray, count: int) -> None:
        assert len(self.values) == number, "a round has begun before the one before was over"
        if chunk == 0:
            self.chunks.append([])
        assert len(self.chunks[number]) == chunk, "chunks come in their order"
        old = self.values[number - 1][self.place(chunk)] if number else None
        new = old + total if self.is_coded and number and count else total.copy()
        self.chunks[number].append(new if count else old)  # type: ignore[arg-type]
        if self.is_coded and number and count:
            total[:] = np.nan  # it is this host's alone: values are made of it in place
        if (chunk + 1) * self.chunk >= self.elements:
            self.values.append(np.concatenate(self.chunks[number]))


class RoundsWorld(World):
    """Hosts whose workers go through rounds as fast as they can, with pauses.

    Args:
        scene: what happens; ``adds`` are rounds.
        random: decides when and where.
        trace: gets a line for each thing that happens.
    """

    def __init__(self, scene: Scene, random: Random, trace: Callable[[str], None] | None = None) -> None:
        size = random.choice((1, 5, 24))
        self.coding = CODINGS[seed_of(scene) % len(CODINGS)]
        super().__init__(replace(scene, elements=(), dtypes=(), joins=False), random, Memory(), trace)
        self.left_out = 0.0  # of values, by a format
        self.sizes = (size, random.choice((1, 3, 8)))
        self.workers = [random.randint(1, 3) for _ in self.hosts]
        self.rounds: list[Rounds] = []
        self.whole: dict[int, Callable[[], bool]] = {}
        # turns that the coordinator has named, and whose values they carry
        self.overwritten: dict[int, int] = {}
        tables: list[Staged] = []
        for host in self.hosts:
            parts = [[self._part(size) for _ in range(self.workers[host.number])] for _ in range(scene.adds)]
            tables.append(Staged(*self.sizes, self._numbers(size), parts))
            rounds = Rounds(host.number, range(scene.hosts), lambda peer, host=host: self._wake(host, peer))  # type: ignore[misc]
            self.rounds.append(rounds)
            host.neighbours = {peer: Neighbour(rounds, peer) for peer in host.links}
            self._later(0.005, self._attach, host)
        self.staged: Sequence[Staged] = self._coded(tables)

    def _coded(self, tables: list[Any]) -> list[Any]:
        for staged in tables:
            staged.wire = Wire.of(self.coding.wire, staged.dtype)
        return tables

    def _numbers(self, size: int) -> np.ndarray:
        if self.coding.wire != "native" and not self.coding.leaves_out:  # sums of these fit in the format
            return np.array([float(self.random.randint(-3, 3)) for _ in range(size)], np.float32)
        return np.array([self.random.uniform(-1, 1) for _ in range(size)], np.float32)

    def _part(self, size: int) -> np.ndarray | None:
        return self._numbers(size) if self.random.random() < 0.8 else None

    def _wake(self, host: Host, peer: int) -> None:
        self.clock.after(0, lambda: self._poke(host, peer))

    def _attach(self, host: Host) -> None:
        if self._when_up(host, lambda: self._attach(host)):
            self.rounds[host.number].attach(TABLE, self.staged[host.number])
            self._later(0.005, self._begin, host)

    def _begin(self, host: Host) -> None:
        if self._when_up(host, lambda: self._begin(host)):
            self.rounds[host.number].begin(TABLE)
            self._work(host)

    def _work(self, host: Host) -> None:
        """The workers of a host become ready for the next round when they have the last one."""
        if not self._when_up(host, lambda: self._work(host)):
            return
        staged, rounds = self.staged[host.number], self.rounds[host.number]
        if len(staged.values) > staged.ready and staged.ready < self.scene.adds:
            staged.ready += 1
        rounds.look(self.clock.now)
        if len(staged.values) <= self.scene.adds:
            self._later(self.random.choice((1e-5, 1e-3, 0.02)), self._work, host)

    def _fault_crash(self) -> None:
        if len(self.hosts) > 1:
            alive = [host for host in self.hosts[1:] if not host.dead]
            self._crash(self.random.choice(alive)) if alive else None

    def _regroup(self, host: Host, dead: Host) -> None:
        up = not host.dead and self.clock.now >= host.stalled_until
        super()._regroup(host, dead)
        if up:
            self.rounds[host.number].regroup([other.number for other in self.live])

    def _done(self) -> bool:
        return all(len(self.staged[host.number].values) > self.scene.adds for host in self.live)

    def run(self) -> None:
        """Lets all go through their rounds beside the faults; then everyone has the same bits, and the right ones."""
        self.schedule_faults()
        self._until(self._done, "the rounds")
        first = self.staged[self.live[0].number]
        for host in self.live[1:]:
            for number, values in enumerate(self.staged[host.number].values):
                same = np.array_equal(values, first.values[number])
                assert same, f"round {number} differs between hosts 0 and {host.number}"
        self._check_sums_made_again()
        if not self.coding.leaves_out:
            self._check_each_round()
        elif not self.moves:
            self._check_what_is_left()
        self._overwrite_at_a_barrier()

    def _check_sums_made_again(self) -> None:
        """What the head sends of a step is the same, however often it has been made."""
        sums: dict[int, bytes] = {}
        for frame in (frame for (host, _), kept in self.history.items() if host == 0 for frame in kept):
            header = RoundHeader.unpack(frame)
            if header.kind == SUM:
                assert sums.setdefault(header.step, frame[HEADER_BYTES:]) == frame[HEADER_BYTES:], header.step

    def _check_what_is_left(self) -> None:
        """What a format has left out of the sums is what the hosts keep of it: all together has been added once."""
        tables = [(self.staged[host.number], self.rounds[host.number].tables[TABLE]) for host in self.live]
        added = sum(part for staged, _ in tables for parts in staged.parts for part in parts if part is not None)
        kept = sum(table.rest for _, table in tables if table.rest is not None)
        values = tables[0][0].values
        assert np.allclose(values[-1].astype(np.float64) + kept, values[0].astype(np.float64) + added, atol=1e-4)
        self.left_out = float(np.max(np.abs(kept)))

    def _check_each_round(self) -> None:
        first = self.staged[self.live[0].number]
        gone = [host.number for host in self.hosts if host.dead]
        old = first.values[0]
        everyone = list(range(len(self.hosts)))
        for number in range(self.scene.adds + 1):
            new = first.values[number]
            for low in range(0, first.elements, first.chunk):
                place = slice(low, low + first.chunk)
                kinds = [self._sum(number, everyone, old, place)]
                kinds += [self._sum(number, [h for h in everyone if h not in gone], old, place)] if gone else []
                assert any(np.array_equal(new[place], kind) for kind in kinds), f"round {number} at {low}"
            old = new

    def _overwrite_at_a_barrier(self) -> None:
        """One host's values become everybody's."""
        writer = self.random.choice(self.live)
        new = self._numbers(self.sizes[0])
        self.staged[writer.number].values[-1][:] = new
        turn = max(self.rounds[host.number].turns()[TABLE] for host in self.live)
        self.overwritten[turn] = writer.number
        for host in self.live:
            self._later(0.01, self._begin_overwriting, host, writer.number, turn)
        self._until(lambda: all(self.whole.get(host.number, lambda: False)() for host in self.live), "set values")
        self._check_set(writer, new)

    def _check_set(self, writer: Host, new: np.ndarray) -> None:
        for host in self.live:
            values = self.staged[host.number].values[-1]
            if writer.dead:
                assert np.array_equal(values, self.staged[0].values[-1])
            else:
                assert np.array_equal(values, new), f"host {host.number} has not got what was set"

    def _begin_overwriting(self, host: Host, writer: int, turn: int) -> None:
        if self._when_up(host, lambda: self._begin_overwriting(host, writer, turn)):
            rounds = self.rounds[host.number]
            rounds.overwrite(TABLE, writer, turn)
            self.whole[host.number] = lambda: not rounds.missing(TABLE)

    def _sum(self, number: int, hosts: list[int], old: np.ndarray, place: slice) -> np.ndarray:
        """What a worker after another adds on one host."""
        if number == 0:
            total = self.staged[hosts[0]].first[place]
            for host in hosts[1:]:
                total = total + self.staged[host].first[place]
            return total
        total = old[place]
        for host in hosts:
            for part in self.staged[host].parts[number - 1]:
                total = total if part is None else total + part[place]
        return total


def run(seed: int, trace: Callable[[str], None] | None = None) -> RoundsWorld:
    """Runs the schedule of a seed; an AssertionError says what is wrong with it."""
    random = Random(seed)
    scene = random_scene(random)
    if trace is not None:
        trace(str(scene))
    world = RoundsWorld(scene, random, trace)
    world.run()
    return world
