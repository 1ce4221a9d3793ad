"""Barriers and clocks: nobody goes on before those it has to wait for, and everybody goes on in the end."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

from interleavings.source import Source
from interleavings.world import DRAWN, LOST, How, World, schedule_of


def barriers(source: Source, seed: int, how: How = DRAWN) -> int:
    """Who has passed a barrier has seen everyone come who was there when it came itself, and is there still."""
    random = Random(seed)
    workers, late = random.choice((2, 2, 3, 4)), random.choice((0, 0, 1, 2))
    number, reach = random.choice((1, 2, 3)), 200 * workers
    world = _world(source, random, seed, reach, how, workers, late)
    waits = source["waits"]
    there = dict.fromkeys(range(workers), 0)  # lives, by number
    lost: dict[int, int] = {}
    quota = [random.randint(0, number) if random.random() < 0.3 else number for _ in range(workers + late)]

    # nobody leaves who did all: leaving wakes the others, and hides that a wake is missing before it
    stays = late == 0 and len(set(quota)) == 1 and random.random() < 0.7

    def reached(worker: int) -> int:
        return int(world.quietly(lambda: world.control.worker(worker).barrier))

    def work(worker: int) -> None:
        first, code = reached(worker), 0
        for target in range(first + 1, first + quota[worker] + 1):
            before = dict(there)
            known = _known_lost(world, target, reached)
            code = world.until_done(waits.barrier, world.control.address, worker, target)
            assert code or not known or world.replaced, f"worker {worker} passed barrier {target} without {known}"
            if code:
                assert code == LOST, f"worker {worker}: code {code}"
                lost[worker] = target
                break
            for other in _still_there(world, before, there):
                assert reached(other) >= target, (
                    f"worker {worker} passed barrier {target} when {other} was at {reached(other)}"
                )
        if code or not stays:
            world.leave(worker)

    _run(world, random, reach, how, workers, late, there, work)
    _judge_lost(world, lost, reached)
    return world.scheduler.steps


def clocks(source: Source, seed: int, how: How = DRAWN) -> int:
    """A read goes ahead when every live worker of the table is near enough, and not before."""
    random = Random(seed)
    workers, late = random.choice((2, 2, 3, 4)), random.choice((0, 0, 1, 2))
    number, staleness, reach = (random.choice((1, 2, 4)), random.choice((0, 0, 1, 2)), 200 * workers)
    world = _world(source, random, seed, reach, how, workers, late)
    waits, shard = source["waits"], world.table(4, world.at.BOUNDED)
    for worker in range(workers):
        shard.enrol(worker)
    there = dict.fromkeys(range(workers), 0)
    lost: dict[int, int] = {}
    quota = [random.randint(0, number) if random.random() < 0.3 else number for _ in range(workers + late)]

    stays = late == 0 and len(set(quota)) == 1 and random.random() < 0.7

    def clock(worker: int) -> int:
        return int(world.quietly(lambda: shard.statistics(worker)["clock"]))

    def work(worker: int) -> None:
        control, base, code = world.control.address, shard.base, 0
        for _ in range(quota[worker]):
            target = clock(worker) - staleness
            before = dict(there)
            known = _known_lost(world, target, clock)
            code = world.until_done(waits.wait_clock, control, base, worker, target)
            assert code or not known or world.replaced, f"worker {worker} went on at {target} without {known}"
            if code:
                assert code == LOST, f"worker {worker}: code {code}"
                lost[worker] = target
                break
            for other in _still_there(world, before, there):
                assert clock(other) >= target, (
                    f"worker {worker} went on at {target + staleness} when {other} was at {clock(other)}"
                )
            done = clock(worker)
            waits.tick(control, base, worker)
            assert clock(worker) > done, f"worker {worker}: a tick is lost"
        if code or not stays:
            world.leave(worker)

    _run(world, random, reach, how, workers, late, there, work, shard.enrol)
    _judge_lost(world, lost, clock)
    return world.scheduler.steps


def _world(source: Source, random: Random, seed: int, reach: int, how: How, workers: int, late: int) -> World:
    world = World(source, schedule_of(random, seed, reach, how, workers), workers + late, random.random() < 0.6)
    for worker in range(workers):
        world.begin(worker)
    return world


def _known_lost(world: World, target: int, reached: Callable[[int], int]) -> list[int]:
    """Those that the node has called lost before they came so far, where nobody goes on without the lost."""
    if world.continues or world.replaced:
        return []
    fates = {worker: world.quietly(partial(world.control.liveness, worker)) for worker in world.dead}
    return [worker for worker, liveness in fates.items() if liveness == world.at.LOST and reached(worker) < target]


def _still_there(world: World, before: dict[int, int], there: dict[int, int]) -> list[int]:
    """Those that were there before, and have neither left nor died nor come again since."""
    control = world.control
    return [
        worker
        for worker, life in before.items()
        if there.get(worker) == life and world.quietly(partial(_is_live, control, worker))
    ]


def _run(
    world: World,
    random: Random,
    reach: int,
    how: How,
    workers: int,
    late: int,
    there: dict[int, int],
    work: Callable[[int], None],
    enrol: Callable[[int], None] = lambda worker: None,
) -> None:
    def join(worker: int) -> None:
        if world.admit(worker):
            there.pop(worker, None)
            world.control.activate(worker, joins_late=True)
            enrol(worker)
            there[worker] = world.scheduler.steps
            work(worker)

    for worker in range(workers):
        world.run(worker, work)
    world.disturb(random, reach, how, random.choice((0, 0, 1, 1, 2)), random.choice((0, 0, 2)))
    for joiner in range(late):
        place = random.choice((workers + joiner, random.randrange(workers)))
        world.join_at(random.randrange(1, reach), place, join)
    world.scheduler.run()


def _judge_lost(world: World, lost: dict[int, int], reached: Callable[[int], int]) -> None:
    for worker, target in lost.items():
        assert not world.continues, f"worker {worker} did not go on without the lost"
        behind = [other for other in world.dead if reached(other) < target or other in world.replaced]
        assert behind, f"worker {worker} was told of a loss at {target}, and all who died had come there"


def _is_live(control: Any, worker: int) -> bool:
    return bool(control.worker(worker).is_live)
