"""Rows under words: never read torn, added to wholly or not at all, and a killed call has done a prefix of its rows."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np

from interleavings.laws.locking import judge_words
from interleavings.source import Source
from interleavings.world import DRAWN, How, World, schedule_of

_COLUMNS = 2


def rows(source: Source, seed: int, how: How = DRAWN) -> int:
    """Adds, reads and exchanges of rows, with or without an updater's state, some killed, whose numbers come again.

    Each worker has eight bits of every element for itself, and adds 1 there to all numbers of a row.
    """
    random = Random(seed)
    workers, number, height = random.choice((2, 2, 3, 4)), random.choice((1, 2, 3)), random.choice((1, 2, 4))
    reach = 60 * workers * number
    source["layout.words"].BLOCK_BYTES = 8 * _COLUMNS * random.choice((1, 2))
    world = World(source, schedule_of(random, seed, reach, how), workers, continues=True)
    source.memory.torn = True
    for worker in range(workers):
        world.begin(worker)
    stateful = random.random() < 0.5
    table = world.table(height * _COLUMNS, world.at.ASYNCHRONOUS, _COLUMNS, states=int(stateful))
    for worker in range(workers):
        table.enrol(worker)
    job = _Job(world, table, int(stateful))
    plans = {w: _plan(random, number, height) for w in range(2 * workers)}

    def live(worker: int) -> None:
        source["locking"].enter(world.control.address, table.base, worker)
        for what, ids in plans[worker]:
            job.do(worker, what, ids)

    def again(worker: int) -> None:
        """A second life of a number, once its first is known to be over."""
        for _ in range(200):
            if world.admit(worker):
                break
            world.scheduler.give_way()
        else:
            return
        job.lives.append(worker)
        if random.random() < 0.3:
            return  # it never comes to this table: the others have to know that its number has another life
        table.enrol(worker)
        source["locking"].enter(world.control.address, table.base, worker)
        for what, ids in plans[worker + workers]:
            job.do(worker, what, ids)

    for worker in range(workers):
        world.run(worker, live)
    if how.script is None:
        mortal = random.sample(range(workers), random.choice((0, 1, workers - 1, workers - 1)))
        for _ in mortal:
            world.scheduler.at(random.randrange(1, reach), lambda: job.kill_one(random, mortal))
        for worker in mortal:
            if random.random() < 0.5:
                world.join_at(random.randrange(1, reach), worker, again)
    world.scheduler.run()
    job.judge(height)
    return world.scheduler.steps


def _plan(random: Random, number: int, height: int) -> list[tuple[str, list[int]]]:
    plan = []
    for _ in range(number):
        what = random.choice(("add", "add", "get", "exchange", "all"))
        ids = [random.randrange(height) for _ in range(random.choice((1, 2, 3)))]
        plan.append((what, sorted(set(ids)) if random.random() < 0.5 else ids))
    return plan


class _Job:
    """What the workers of a schedule have done, and what they are at."""

    def __init__(self, world: World, table: Any, update: int) -> None:
        self.world, self.table, self.update = world, table, update
        self.lives: list[int] = []  # numbers that came again
        workers, height = world.capacity, table.spec.rows
        self.done = np.zeros((workers, height), np.int64)  # by finished calls
        self.doing: dict[int, list[list[int]]] = {}  # the ids of calls that were never finished
        self.seen = np.zeros((workers, height), np.int64)

    def do(self, me: int, what: str, ids: list[int]) -> None:
        kernels, control, base = self.world.source["rows"], self.world.control.address, self.table.base
        call = self.world.call()
        named = np.array(ids, np.int64)
        size = len(ids) * _COLUMNS
        one = 1 << (8 * me)

        def until_done(kernel: Callable[..., int], *arguments: Any) -> None:
            code = self.world.until_done(kernel, control, base, *arguments, call)
            assert code == 0, f"code {code}"

        if what in ("add", "exchange"):
            self.doing.setdefault(me, []).append(ids)
        if what == "add":
            until_done(kernels.add_rows, self.update, me, named, np.full(size, one, np.int64))
        elif what == "exchange":
            local, last = np.full(size, one, np.int64), np.zeros(size, np.int64)
            until_done(kernels.exchange_rows, self.update, me, named, local, last, 0)
            assert np.array_equal(local, last), f"worker {me}: an exchange left its two arrays unequal"
        if what in ("add", "exchange"):
            self.doing[me].remove(ids)
            np.add.at(self.done[me], ids, 1)
        if what == "exchange":
            self._look(me, ids, local)
        elif what == "get":
            out = np.zeros(size, np.int64)
            until_done(kernels.get_rows, me, named, out, 0)
            self._look(me, ids, out)
        elif what == "all":
            out = np.zeros(self.table.spec.elements, np.int64)
            until_done(self.world.source["dense"].get, me, out, 0)
            self._look(me, list(range(self.table.spec.rows)), out)

    def kill_one(self, random: Random, mortal: list[int]) -> None:
        """Kills a worker that may die, rather one that holds a word."""
        alive = [w for w in mortal if w not in self.world.dead and w in self.world.actors]
        words = self.world.source["stripe_words"]
        guards = self.table.stripe_words()
        each = self.world.at.UNDO_SLOTS_EACH
        holders = {words.undo_slot_in(int(word)) // each for word in guards if int(word) & words.OWNER}
        at_work = [w for w in alive if w in holders] if random.random() < 0.8 else []
        if alive:
            self.world.kill(random.choice(at_work or alive))
        if at_work and random.random() < 0.7:  # and who takes its word over, perhaps
            self.world.scheduler.at(
                self.world.scheduler.steps + random.randrange(1, 30), lambda: self.kill_one(random, mortal)
            )

    def _look(self, me: int, ids: list[int], out: Any) -> None:
        found = out.reshape(-1, _COLUMNS)
        assert (found == found[:, :1]).all(), f"worker {me} reads a torn row: {found.tolist()}"
        mine = (found[:, 0] >> (8 * me)) & 0xFF
        if me not in self.lives:
            assert (mine == self.done[me][ids]).all(), f"worker {me} does not read its own adds"
        for row, value in zip(ids, found[:, 0].tolist(), strict=True):
            for other in range(self.world.capacity):
                before = (int(self.seen[me, row]) >> (8 * other)) & 0xFF
                assert (value >> (8 * other)) & 0xFF >= before, f"row {row} went back"
        for row, value in zip(ids, found[:, 0].tolist(), strict=True):
            self.seen[me, row] = value

    def judge(self, height: int) -> None:
        """The end: everything that is there was added, in whole rows, a prefix of what was never finished."""
        judge_words(self.world, self.table)
        values = self.world.quietly(self.table.values).reshape(height, _COLUMNS)
        arrays = [values, *(s.reshape(height, _COLUMNS) for s in self.world.quietly(self.table.states))]
        for array in arrays:
            assert (array == array[:, :1]).all(), f"a torn row: {array.tolist()}"
            for worker in range(self.world.capacity):
                more = ((array[:, 0] >> (8 * worker)) & 0xFF) - self.done[worker]
                doing = self.doing.get(worker, [])
                assert self._is_prefix(more, doing, self._told(worker)), (
                    f"worker {worker}: {more.tolist()} beside what it finished, while at {doing}; its undo slot tells "
                    f"{self._told(worker)}"
                )

    def _told(self, worker: int) -> int | None:
        """How many rows were done when a worker was killed, by its undo slot; None: that says nothing of its call."""
        if worker in self.lives:
            return None
        at, header = self.world.at, self.table.header
        undo = self.table.base + self.table.places.undo_slots + int(header["undo_stride"]) * at.UNDO_SLOTS_EACH * worker
        load64 = self.world.source["memory.words"].load64
        user, position = self.world.quietly(lambda: (load64(undo + at.UNDO_USER), load64(undo + at.UNDO_POSITION)))
        return int(position) if user > 0 and position >= 0 else None

    @staticmethod
    def _is_prefix(more: Any, doing: list[list[int]], told: int | None) -> bool:
        if not doing:
            return not more.any()
        (ids,) = doing
        possible = range(len(ids) + 1) if told is None else range(told, min(told + 1, len(ids)) + 1)
        return any(np.array_equal(np.bincount(ids[:n], minlength=len(more)), more) for n in possible)
