"""Rounds with a quorum on simulated hosts: workers that are late or stopped, whose adds are in one round each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random

import numpy as np

from multiverso.hosts.rounds.roll import Came
from simulated.rounds import TABLE, RoundsWorld, Staged
from simulated.world import Host, Scene, random_scene

_POLLS = (2e-4, 5e-3)
_FOREVER = 1e9


@dataclass(eq=False)
class Worker:
    """What stands in a worker's line and slot, and what it has done.

    Attributes:
        delta: what is in its slot.
        staged: the round that this is ready for; included: the last one that it was in.
        waits: whether it is in a read; held: whether it is in the barrier; left: whether it has left.
        came: when, of each round that it came to.
        reads: the round that it was in, and the one whose values it got.
    """

    delta: np.ndarray | None = None
    staged: int = 0
    included: int = 0
    waits: bool = False
    held: bool = False
    left: bool = False
    stopped_until: float = 0.0
    came: dict[int, float] = field(default_factory=dict)
    reads: list[tuple[int, int]] = field(default_factory=list)


@dataclass(eq=False)
class Rolled(Staged):
    """A table as ``QuorumMemory`` has it."""

    by_quorum = True
    host: int = 0
    needed: tuple[int, int] = (1, 0)
    grace: float = 0.0
    workers: list[Worker] = field(default_factory=list)
    now: Callable[[], float] = lambda: 0.0
    nudged: Callable[[], None] = lambda: None
    members_of: dict[int, dict[int, np.ndarray | None]] = field(default_factory=dict)
    closed_at: dict[int, float] = field(default_factory=dict)
    behind: dict[tuple[int, int], float] = field(default_factory=dict)

    @property
    def committed(self) -> int:
        return len(self.values) - 1

    def who_came(self, number: int) -> Came:
        ready = [worker for worker in self.workers if worker.staged == number]
        rest = [worker for worker in self.workers if worker.staged != number and not worker.left]
        awaiting = [worker for worker in ready if not worker.left]
        held = sum(worker.held for worker in rest)
        grace = round(self.grace * 1e9) if awaiting else 0
        needed, of = self.needed if awaiting else (0, 0)
        elsewhere = 0  # there is one table here
        return Came(len(ready), len(awaiting), len(rest) - held, elsewhere, held, 0, needed, of, grace)

    def wake(self) -> None:
        self.nudged()

    def wanted(self, number: int) -> bool:
        return False

    def decide(self, number: int, members: int) -> int:
        assert number == self.decided + 1 == self.committed + 1
        self.decided = number
        found = [i for i, worker in enumerate(self.workers) if worker.staged == number]
        self.members_of[number] = {i: self.workers[i].delta for i in found}
        self.closed_at[number] = self.now()
        return sum(1 << i for i in found)

    def fold(self, number: int, chunk: int, members: int, total: np.ndarray, count: int) -> int:
        if number == 0:
            return super().fold(0, chunk, members, total, count)
        place, numbers = self.place(chunk), total[: total.size - self.extra]
        assert members == sum(1 << i for i in self.members_of[number])
        for i, worker in enumerate(self.workers):
            if members >> i & 1 and worker.delta is not None:
                assert worker.staged == number, "its slot is another round's by now"
                if not count:
                    total[numbers.size :] = self.host
                begin = np.float32(0) if self.is_coded else self.values[number - 1][place]
                numbers[:] = (numbers if count else begin) + worker.delta[place]
                count += 1
        return count

    def take(self, number: int, chunk: int, total: np.ndarray, count: int) -> None:
        if self.extra and number and count:
            self.behind[number, chunk] = float(total[-1])
        super().take(number, chunk, total[: total.size - self.extra] if number and count else total, count)
        if number and self.committed == number:
            for i in self.members_of[number]:
                self.workers[i].included = number


class QuorumWorld(RoundsWorld):
    """Hosts whose workers come to rounds when they like; ``adds`` rounds, and then a barrier."""

    def __init__(self, scene: Scene, random: Random, trace: Callable[[str], None] | None = None) -> None:
        super().__init__(scene, random, trace)
        everyone = sum(self.workers)
        self.needed = random.choice(((random.randint(1, everyone), 0), (random.choice((1, 2)), 2)))
        grace, extra = random.choice((0.0, 0.003, 0.1, _FOREVER)), random.choice((0, 2))
        self.rolled = [
            Rolled(*self.sizes, staged.first, [], host=number, needed=self.needed, grace=grace)
            for number, staged in enumerate(self.staged)
        ]
        self.staged = self._coded(self.rolled)
        self.ending, self.early = False, 0  # rounds that were closed without somebody
        for host, staged in zip(self.hosts, self.rolled, strict=True):
            staged.extra = extra
            staged.now = lambda: self.clock.now
            staged.nudged = lambda host=host: self.clock.after(0, lambda: self._look_at_rounds(host))  # type: ignore[misc]
            staged.workers = [Worker() for _ in range(self.workers[host.number])]
        alone = everyone - (self.needed[0] if not self.needed[1] else -(-self.needed[0] * everyone // 2))
        self.stopped = 0 if scene.crashes or grace == _FOREVER else random.randint(0, alone)
        for worker in random.sample([w for staged in self.rolled for w in staged.workers], self.stopped):
            worker.stopped_until = _FOREVER

    def _work(self, host: Host) -> None:
        """The table is there."""
        self._follow(host)
        for worker in self.rolled[host.number].workers:
            self._later(0.01, self._turn, host, worker)

    def _look_at_rounds(self, host: Host) -> None:
        if self._when_up(host, lambda: self._look_at_rounds(host)):
            left = self.rounds[host.number].look(self.clock.now)
            if left is not None and left < 10:
                self.clock.after(left, lambda: self._look_at_rounds(host))

    def _follow(self, host: Host) -> None:
        """As the node's thread, which looks now and then also where no worker does anything."""
        self._look_at_rounds(host)
        if not host.dead:
            self.clock.after(0.1, lambda: self._follow(host))

    def _turn(self, host: Host, worker: Worker) -> None:
        if not self._when_up(host, lambda: self._turn(host, worker)) or worker.left:
            return
        if self.clock.now < worker.stopped_until:
            self.clock.after(0.05, lambda: self._turn(host, worker))
            return
        staged, pause = self.rolled[host.number], self.random.choice(_POLLS)
        if not worker.waits:
            worker.held = staged.committed >= self.scene.adds
            if not worker.held and staged.committed >= 0:
                worker.delta = self._part(self.sizes[0])
                worker.waits = True
                self._come(staged, worker, staged.committed + 1)
        elif staged.committed >= worker.staged > worker.included:
            self._come(staged, worker, staged.committed + 1)
        elif staged.committed >= worker.staged:
            worker.waits = False
            worker.reads.append((worker.staged, staged.committed))
            pause = self.random.choice((0.0, 1e-3, 0.02, 0.3))
            if self.random.random() < 0.02:
                worker.stopped_until = self.clock.now + self.random.choice((0.01, 1.0))
            elif not self.stopped and self.random.random() < 0.01 and sum(not w.left for w in staged.workers) > 1:
                self._leave(staged, worker)
        self._look_at_rounds(host)
        self._later(pause, self._turn, host, worker)

    def _come(self, staged: Rolled, worker: Worker, number: int) -> None:
        worker.staged = number
        worker.came[number] = self.clock.now

    def _leave(self, staged: Rolled, worker: Worker) -> None:
        """It leaves an add, which is in the first round that is not closed."""
        worker.delta = self._numbers(self.sizes[0])
        self._come(staged, worker, max(staged.committed, staged.decided) + 1)
        worker.left = True

    def _done(self) -> bool:
        tables = [self.rolled[host.number] for host in self.live]
        if not self.ending and all(staged.committed >= self.scene.adds for staged in tables):
            self.ending = True  # those that are stopped have to come to the barrier, too
            for worker in (worker for staged in tables for worker in staged.workers):
                worker.stopped_until = 0.0
        return self.ending and all(worker.held or worker.left for staged in tables for worker in staged.workers)

    def run(self) -> None:
        self.schedule_faults()
        self._until(self._done, "the rounds")
        tables = [self.rolled[host.number] for host in self.live]
        last = max(staged.committed for staged in tables)
        self._until(lambda: all(staged.committed == last for staged in tables), "the last round")
        for staged in tables:
            for number, values in enumerate(staged.values):
                assert np.array_equal(values, tables[0].values[number]), f"round {number} differs on host {staged.host}"
            assert staged.behind == tables[0].behind, "what travels behind a sum differs"
        for number in range(1, last + 1):
            if not self.coding.leaves_out:
                self._check_sum(number)
            self._check_grace(number)
        for staged in tables:
            for worker in staged.workers:
                self._check_reads(worker, staged)
        self._overwrite_at_a_barrier()

    def _check_sum(self, number: int) -> None:
        """A round has those that were there when it passed by; of a lost host all that were, or nobody."""
        first = self.rolled[self.live[0].number]
        for low in range(0, first.elements, first.chunk):
            place, found = slice(low, low + first.chunk), False
            for lost in (True, False):
                total = first.values[number - 1][place]
                for host, staged in zip(self.hosts, self.rolled, strict=True):
                    for delta in staged.members_of.get(number, {}).values() if lost or not host.dead else ():
                        total = total if delta is None else total + delta[place]
                found |= np.array_equal(total, first.values[number][place])
            assert found, f"round {number} at {low}"

    def _check_grace(self, number: int) -> None:
        """Where not all that were there were in it, so many had come to it, and for so long."""
        workers = [worker for staged in self.rolled for worker in staged.workers]
        if number > self.scene.adds or self.scene.crashes or any(worker.left for worker in workers):
            return  # some were in the barrier, or gone
        closed = self.rolled[0].closed_at[number]
        came = sorted(worker.came[number] for worker in workers if worker.came.get(number, _FOREVER) <= closed)
        needed = -(-self.needed[0] * len(workers) // self.needed[1]) if self.needed[1] else self.needed[0]
        if len(came) < len(workers):
            assert len(came) >= needed, f"round {number} was closed with {len(came)} of {needed}"
            had = closed - came[needed - 1]
            assert had >= self.rolled[0].grace - 1e-6, f"round {number} was closed {had} after its quorum had come"
            self.early += 1

    def _check_reads(self, worker: Worker, staged: Rolled) -> None:
        before = 0
        for joined, got in worker.reads:
            assert before < joined <= got
            before = got


def run(seed: int, trace: Callable[[str], None] | None = None) -> QuorumWorld:
    """Runs the schedule of a seed; an AssertionError says what is wrong with it."""
    random = Random(seed)
    scene = replace(random_scene(random), adds=random.choice((3, 8, 20)))
    if trace is not None:
        trace(str(scene))
    world = QuorumWorld(scene, random, trace)
    world.run()
    assert TABLE in world.rounds[0].tables
    return world
