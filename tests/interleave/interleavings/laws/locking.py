"""Stripes under words: no addition is lost, whoever dies while it holds one, and nothing stays held."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

import numpy as np

from interleavings.source import Source
from interleavings.world import DRAWN, How, World, schedule_of

_STRIPE = 16


def locks(source: Source, seed: int, how: How = DRAWN) -> int:
    """add, exchange and get of a table of some stripes; each worker has eight bits of every element for itself."""
    random = Random(seed)
    workers, number, stripes = (random.choice((2, 2, 3, 4)), random.choice((1, 2, 3)), random.choice((1, 2, 3)))
    reach = 40 * workers * number * stripes
    source["layout.words"].STRIPE_BYTES = 8 * _STRIPE
    world = World(source, schedule_of(random, seed, reach, how), workers, continues=True)
    for worker in range(workers):
        world.begin(worker)
    at, dense = world.at, source["dense"]
    elements = stripes * _STRIPE - random.choice((0, 3))
    shard = world.table(elements, at.ASYNCHRONOUS)
    for worker in range(workers):
        shard.enrol(worker)
    control, base = world.control.address, shard.base
    given, asked = [0] * workers, [0] * workers
    plans = [[random.choice(("add", "add", "exchange", "get")) for _ in range(number)] for _ in range(workers)]

    def work(me: int) -> None:
        one = 1 << (8 * me)
        local, last, out, delta = (np.zeros(elements, np.int64) for _ in range(4))
        delta += one

        call = world.call()

        def until_done(kernel: Callable[..., int], *arguments: Any) -> None:
            code = world.until_done(kernel, control, base, *arguments, call)
            assert code == 0, f"code {code}"

        def mine(values: Any) -> None:
            assert ((values >> (8 * me)) & 0xFF == asked[me]).all(), f"worker {me} does not read its own adds"

        for plan in plans[me]:
            if plan == "add":
                asked[me] += 1
                until_done(dense.add, 0, me, delta)
            elif plan == "get":
                until_done(dense.get, me, out, 0)
                mine(out)
            else:
                asked[me] += 1
                local[:] += one
                until_done(dense.exchange, 0, me, local, last, 0)
                mine(local)
                assert np.array_equal(local, last), f"worker {me}: an exchange left its two arrays unequal"
            given[me] = asked[me]

    for worker in range(workers):
        world.run(worker, work)
    world.disturb(random, reach, how, random.choice((0, 1, 1, 2, 3)), random.choice((0, 0, 2)))
    world.scheduler.run()
    values = world.quietly(shard.values)
    for worker in range(workers):
        found = (values >> (8 * worker)) & 0xFF
        assert ((found >= given[worker]) & (found <= asked[worker])).all(), (
            f"worker {worker} gave {given[worker]} to {asked[worker]}, and {np.unique(found)} is there"
        )
        for lo in range(0, elements, _STRIPE):
            part = found[lo : lo + _STRIPE]
            assert (part == part[0]).all(), f"a part of a stripe of worker {worker}: {part}"
    judge_words(world, shard)
    return world.scheduler.steps


def judge_words(world: World, shard: Any) -> None:
    """What is still held belongs to the dead, who are as many, and one look at everything frees it."""
    at, words = world.at, world.source["stripe_words"]

    def held() -> int:
        return int(np.count_nonzero(shard.stripe_words() & words.OWNER))

    assert world.quietly(held) <= len(world.dead), "a word is held by nobody who died"
    taken = sum(world.quietly(partial(shard.statistics, worker))["locks_recovered"] for worker in range(world.capacity))
    assert taken <= len(world.dead), f"{taken} words were taken over, and {len(world.dead)} workers died"
    alive = [w for w in range(world.capacity) if w not in world.dead or w in world.replaced]
    reader = alive[0] if alive else 0  # a new life
    dead = [w for w in world.dead if w not in world.replaced]
    out = np.zeros(shard.spec.elements, np.int64)

    def look() -> None:
        for worker in dead:
            world.control.settle(worker, at.LOST)
        if not alive:
            world.control.admit(reader, 3000)
            world.source["locking"].enter(world.control.address, shard.base, reader)
        arguments = (world.control.address, shard.base, reader, out, 0, world.call())
        assert world.source["dense"].get(*arguments) == 0

    world.quietly(look)
    assert world.quietly(held) == 0, "a word stays held"
