"""all_reduce: everyone gets the same, right sum; who fails has seen someone go who had not done his part."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np

from interleavings.source import Source
from interleavings.world import DRAWN, LOST, How, World, schedule_of

_STRIDE, _MISMATCH = 1024, 257


def reduce_small(source: Source, seed: int, how: How = DRAWN) -> int:
    """Arrays that fit into a slot."""
    return _reduce(source, seed, how, small=True)


def reduce_in_chunks(source: Source, seed: int, how: How = DRAWN) -> int:
    """Arrays that go through in chunks."""
    return _reduce(source, seed, how, small=False)


def _reduce(source: Source, seed: int, how: How, small: bool) -> int:
    random = Random(seed)
    workers, calls = random.choice((2, 2, 3, 4)), random.choice((1, 2, 3))
    chunk = 16 * workers
    elements = 5 if small else 2 * chunk + random.choice((-3, 0, 5))
    reach = 150 * workers * calls if small else 300 * workers * calls
    world = World(source, schedule_of(random, seed, reach, how, workers), workers, random.random() < 0.5)
    reduce, memory, scheduler = source["reduce"], source.memory, world.scheduler
    for worker in range(workers):
        world.begin(worker)
    lines = memory.take(reduce.LINES)
    slots = memory.take(3 * workers * _STRIDE)
    quota = [calls] * workers
    if random.random() < 0.3:
        quota[random.randrange(workers)] = random.randrange(calls + 1)
    # leaving wakes the others, and hides that a wake is missing before it
    stays = set(quota) == {calls} and random.random() < 0.7
    done: list[int] = [0] * workers
    failed_at: dict[int, int] = {}

    # one that calls with something else than the others, in one call
    odd = (random.randrange(workers), random.randrange(1, calls + 1)) if random.random() < 0.15 else (-1, -1)

    def given(worker: int, call: int) -> Any:
        return np.arange(elements, dtype=np.int64) + 1000 * worker + call

    def work(worker: int) -> None:
        progress, code = np.zeros(4, np.int64), 0
        for call in range(1, quota[worker] + 1):
            in_place = (worker + call) % 2
            values = given(worker, call)
            out = values if in_place else np.zeros(elements, np.int64)
            common = (
                world.control.address,
                lines,
                -1,
                slots,
                _STRIDE,
                worker,
                workers,
                reduce.SUM,
                78 if odd == (worker, call) else 77,
            )
            if small:
                code = world.until_done(reduce.reduce_small, *common, values, out, progress)
            else:
                code = world.until_done(reduce.reduce_chunks, *common, values, out, progress, chunk)
            if odd[1] == call and quota[odd[0]] >= call:
                assert code in (LOST, _MISMATCH), f"worker {worker}: code {code} where one called differently"
                done[worker] = quota[worker]
                if code == LOST:
                    failed_at[worker] = int(progress[reduce.PHASE])
                break
            if code:
                assert code == LOST, f"worker {worker}: code {code} in call {call}"
                failed_at[worker] = int(progress[reduce.PHASE])
                break
            wanted = sum(given(other, call) for other in range(workers))
            assert np.array_equal(out, wanted), f"worker {worker}: call {call} gave {out}, not {wanted}"
            progress[reduce.COMPLETE] = 0  # it has returned
            done[worker] = call
        if code or not stays:
            world.leave(worker)

    for worker in range(workers):
        world.run(worker, work)
    world.disturb(random, reach, how, random.choice((0, 0, 0, 1, 1, 2)), random.choice((0, 0, 1, 3)))
    scheduler.run()

    phases = [memory.words64[(lines + world.at.REDUCTION_STRIDE * w - memory.origin) >> 3] for w in range(workers)]
    for worker, phase in failed_at.items():
        behind = [other for other in range(workers) if phases[other] < phase]
        assert behind, (
            f"worker {worker} was told in phase {phase} that another is lost, and all have reached it: {phases}"
        )
    for worker in range(workers):
        if worker not in world.dead and worker not in failed_at:
            assert done[worker] == quota[worker], f"worker {worker} stopped after call {done[worker]}"
    return scheduler.steps
