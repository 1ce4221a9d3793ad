"""Barriers between hosts: nobody passes before the node says so, and everybody does when it has.

The workers of this host run the kernel. The node does what it really does with the others: it writes their lines
(``runtime/several_hosts/mirror.py``), some of them late, and lets a barrier go (``Control.release``) when all that
live, here and there, have come.
"""

from __future__ import annotations

from functools import partial
from random import Random

from interleavings.source import Source
from interleavings.world import DRAWN, LOST, How, World, schedule_of
from multiverso.hosts.control.messages import Line


class Elsewhere:
    """The workers of other hosts, and what this host's node has heard of them. Owner: the node's actor."""

    def __init__(self, world: World, here: int, there: int, hears_on: bool) -> None:
        self._world, self._mirror = world, world.source["runtime.several_hosts.mirror"]
        self._here = range(here)
        self.reached = dict.fromkeys(range(here, here + there), 0)
        self.ended: dict[int, int] = {}
        self.arrived: dict[int, int] = {}
        self.released = 0
        self.losses: list[int] = []  # the barrier that was let go last, at each elsewhere
        self._hears_on = hears_on  # of the others, after a loss

    def tell(self, worker: int) -> None:
        """A line of a worker has come."""
        at, liveness = self._world.at, self.ended.get(worker, self._world.at.ALIVE)
        state = at.LEFT if liveness == at.GONE else at.ACTIVE
        line = Line(worker, 1, liveness, state, self.reached[worker])
        self._mirror.write_line(self._world.control, line)
        self.look()

    def come(self, worker: int, late: bool) -> None:
        """A worker elsewhere has come to its next barrier; its line is ``late``: it comes with the next one."""
        if worker not in self.ended:
            self.reached[worker] += 1
            (self.look if late else partial(self.tell, worker))()

    def end(self, worker: int, liveness: int) -> None:
        """A worker elsewhere has left, or was lost."""
        if worker not in self.ended:
            self.ended[worker] = liveness
            if liveness == self._world.at.LOST:
                self.losses.append(self.released)
            self.tell(worker)

    def arrive(self, worker: int, target: int) -> None:
        """A worker of this host is about to wait."""
        self.arrived[worker] = target
        self.look()

    def look(self) -> None:
        """Lets the barriers go that all have come to who live, after a loss too: that is the workers' to notice."""
        control = self._world.control
        everybody = range(len(self._here) + len(self.reached))
        while self._hears_on or control.continues or self._world.at.LOST not in map(control.liveness, everybody):
            target = self.released + 1
            live = [w for w in map(control.worker, self._here) if w.is_live]
            mine = all(max(w.barrier, self.arrived.get(w.worker_id, 0)) >= target for w in live)
            theirs = all(n >= target for w, n in self.reached.items() if w not in self.ended)
            if not (live and mine and theirs):
                return
            self.released = target
            control.release(target)


def gates(source: Source, seed: int, how: How = DRAWN) -> int:
    """Who passes a barrier does so after the node let it go, and nobody waits for ever."""
    random = Random(seed)
    here, there, number = random.choice((1, 2, 2, 3)), random.choice((1, 1, 2)), random.choice((1, 2, 3))
    reach = 150 * (here + there)
    world = World(source, schedule_of(random, seed, reach, how, here), here + there, continues=random.random() < 0.6)
    waits, at, control = source["waits"], world.at, world.control
    control.span_hosts()
    elsewhere = Elsewhere(world, here, there, hears_on=random.random() < 0.5)
    kill = world.kill

    def kill_and_look(worker: int) -> None:
        elsewhere.losses.append(0)  # it may have said that it comes, and die before its word says so
        kill(worker)
        world.tell_node(elsewhere.look)

    world.kill = kill_and_look  # type: ignore[method-assign]
    world.scheduler.scripted_kill = lambda name: kill_and_look(int(name.split()[1]))
    for worker in range(here + there):
        world.begin(worker)

    def work(worker: int) -> None:
        for target in range(1, number + 1):
            world.tell_node(partial(elsewhere.arrive, worker, target))
            code = world.until_done(waits.barrier, control.address, worker, target)
            if code:
                lost = [w for w, liveness in elsewhere.ended.items() if liveness == at.LOST]
                assert code == LOST, f"worker {worker}: code {code}"
                assert not world.continues, f"worker {worker} did not go on without the lost"
                assert world.dead or lost, f"worker {worker} was told of a loss, and nobody died"
                assert min(elsewhere.losses) < target, f"worker {worker} was told of a loss after {target} was let go"
                break
            assert elsewhere.released >= target, (
                f"worker {worker} passed barrier {target}, and {elsewhere.released} was let go"
            )
            without = [w for w, n in elsewhere.reached.items() if elsewhere.ended.get(w) == at.LOST and n < target]
            assert world.continues or not without, f"worker {worker} went on without the lost {without}"
        world.leave(worker)
        world.tell_node(elsewhere.look)

    for worker in range(here):
        world.run(worker, work)
    world.disturb(random, reach, how, random.choice((0, 0, 1)), random.choice((0, 0, 2)))
    for worker in elsewhere.reached:
        for _ in range(number):
            come = partial(elsewhere.come, worker, random.random() < 0.5)
            world.scheduler.at(random.randrange(1, reach), partial(world.tell_node, come))
        if random.random() < 0.4:
            liveness = random.choice((at.LOST, at.GONE))
            end = partial(elsewhere.end, worker, liveness)
            world.scheduler.at(random.randrange(1, reach), partial(world.tell_node, end))
    world.scheduler.run()
    return world.scheduler.steps
