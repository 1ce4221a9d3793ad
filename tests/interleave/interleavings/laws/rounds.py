"""Synchronous rounds: all who finish a round have the same in it, and everyone's contribution is in exactly once.

Each life of a worker has eight bits of every element for itself: it adds one there with each operation, so that a
value tells whose contributions it holds, and how often. A life that ends by a kill may be in a round with the one
operation that it did not finish: an ``add`` as a whole, an ``exchange`` with its first chunks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random
from typing import Any

import numpy as np

from interleavings.laws.judging import Life, judge, judge_seen
from interleavings.scheduler import Scheduler
from interleavings.source import Source
from interleavings.world import DRAWN, LOST, How, World, schedule_of

_LIVES = 7  # of eight bits each in an int64

OPERATIONS = ("exchange", "exchange", "add", "two", "joined", "read")


@dataclass(frozen=True)
class Plan:
    """What happens in a world of rounds.

    Attributes:
        operations: of each worker in each of its rounds, by number, latecomers behind the others: "exchange",
            "add" and read, "two" adds and read, an add "joined" by an exchange, or "read" alone.
        leaves_an_add: whether a worker adds something before it leaves, for the others' next round.
        workers: how many are there from the start.
        chunks: how many each round goes through.
        length: elements of a chunk; those of the last are ``short`` fewer.
        continues: whether the others go on without the lost.
        deaths: (step, worker); ``signals`` likewise.
        latecomers: (step, number), which may be that of one who is gone by then.
        bystander: one more of the job, who does not take part in the table: "" for none, "looks" for one that copies
            the last finished round's values, "dies" for one that is lost.
        stays: nobody leaves who has done all: leaving wakes the others, and hides that a wake is missing before it.
        keeps_state: the table has an updater whose state is the sum of all that it was given.
    """

    operations: tuple[tuple[str, ...], ...]
    leaves_an_add: tuple[bool, ...]
    workers: int
    chunks: int = 1
    length: int = 16
    short: int = 0
    continues: bool = True
    deaths: tuple[tuple[int, int], ...] = ()
    signals: tuple[tuple[int, int], ...] = ()
    latecomers: tuple[tuple[int, int], ...] = ()
    bystander: str = ""
    keeps_state: bool = False
    stays: bool = False


def exchanges_and_reads(source: Source, seed: int, how: How = DRAWN) -> int:
    """Workers that are there from the start, that leave and die."""
    return run(source, *_drawn(seed, how, latecomers=False))


def latecomers(source: Source, seed: int, how: How = DRAWN) -> int:
    """The same, and workers that join, some with the number of one that is gone."""
    return run(source, *_drawn(seed, how, latecomers=True))


def joining(source: Source, seed: int, how: How = DRAWN) -> int:
    """A small world in which somebody comes while others go: the shortest ways through what latecomers do."""
    random = Random(seed)
    workers, late = random.choice((1, 2, 2)), random.choice((1, 1, 2))
    chunks = random.choice((1, 1, 2))
    reach = 110 * workers
    operations = [
        [random.choice(OPERATIONS) for _ in range(random.choice((0, 1, 1, 2)))] for _ in range(workers + late)
    ]
    plan = Plan(
        tuple(map(tuple, operations)),
        tuple(random.random() < 0.4 for _ in operations),
        workers,
        chunks,
        length=random.choice((16, 16 * workers)),
        continues=random.random() < 0.85,
        deaths=_events(random, reach, random.choice((0, 0, 1, 1, 2)), workers),
        signals=_events(random, reach, random.choice((0, 1, 3)), workers),
        latecomers=tuple(
            (random.randrange(1, reach // 2), random.choice((workers + i, workers + i, random.randrange(workers))))
            for i in range(late)
        ),
    )
    plan = replace(
        plan, bystander=random.choice(("", "", "", "looks", "looks", "dies")), keeps_state=random.random() < 0.3
    )
    if how.script is not None:
        plan = replace(plan, deaths=(), signals=())
    return run(source, plan, schedule_of(random, seed, reach, how))


def stopped(source: Source, seed: int, how: How = DRAWN) -> int:
    """The same worlds, where one or two workers stop at some step while each other goes as far as it can."""
    random = Random(seed)
    names = [f"worker {number}" for number in range(3)]
    script: list[tuple[str, int | str]] = [
        (random.choice(names), random.randrange(1, 130)) for _ in range(random.choice((1, 1, 2)))
    ]
    script += [(name, "on") for name in random.sample(names, len(names))] * 2
    return joining(source, random.randrange(1 << 20), How(script=script, trace=how.trace))


def corners(source: Source, seed: int, how: How = DRAWN) -> int:
    """The smallest worlds, for what takes one step out of a hundred.

    One works, and a latecomer leaves an add and goes at once, or works, too; or two come, and the first dies in a
    round; or one or two of those that were there leave an add. They are stopped at some step, one after the other, and
    then each goes as far as it can.
    """
    random = Random(seed)
    kind = random.choice(("leaves", "works", "dies", "left", "left"))
    late = 0 if kind == "left" else 2 if kind == "dies" or random.random() < 0.2 else 1
    workers = random.choice((2, 3)) if kind == "left" else 1
    names = [f"worker {number}" for number in range(workers + late)]
    script: list[tuple[str, int | str]] = [
        # a latecomer is through with coming after some thirty steps, and stages and decides in the next
        (name, random.choice((random.randrange(1, 130), random.randrange(25, 65))))
        for name in names
    ]
    works = (random.choice(OPERATIONS),) * random.choice((1, 1, 2))
    if kind == "left":
        operations = (works, *((), works[:1])[: workers - 1])
        others = [(name, random.choice(("on", random.randrange(1, 130)))) for name in names[1:]]
        script = [("worker 0", random.randrange(1, random.choice((45, 160)))), *random.sample(others, len(others))]
        if random.random() < 0.5:
            script.insert(0, (names[1], "on"))
    else:
        operations = (works, *(() if kind == "leaves" else works[:1] for _ in range(late)))
    if kind == "dies":
        script.insert(1, ("worker 0", "kill"))
        if random.random() < 0.6:  # the second closes the round while the first is about to, and somebody looks
            script[2:] = [("worker 1", random.randrange(50, 110)), ("worker 2", "on")]
            script += [("worker 1", random.randrange(1, random.choice((9, 90)))), ("worker 3", "on")]
    elif kind != "left":
        script.insert(2, ("worker 1", "kill") if random.random() < 0.4 else ("worker 0", random.randrange(1, 60)))
    plan = Plan(
        operations=operations,
        leaves_an_add=tuple(kind in ("leaves", "left") and name != "worker 0" for name in names),
        workers=workers,
        chunks=random.choice((1, 2)),
        length=random.choice((16, 32)),
        latecomers=((1, 1), (random.choice((1, 30)), 2))[:late],
        bystander="looks" if kind == "dies" else "",
        keeps_state=random.random() < 0.3,
    )
    script += [(name, "on") for name in random.sample(names, len(names))] * 2
    return run(source, plan, schedule_of(random, seed, 1, How(script=script, trace=how.trace)))


def alone(source: Source, seed: int, how: How = DRAWN) -> int:
    """One works alone, so that its exchanges are rounds of one, and two come, one mostly with the number of the first.

    The first that comes is stopped before its first round, the others go on, and perhaps end, before it does. Or there
    were two, of whom one has left, and its number comes back.
    """
    random = Random(seed)
    if random.random() < 0.3:
        return _alone_again(source, random, seed, how)
    number = random.choice((0, 0, 0, 2))
    second = "worker 2" if number else "worker 0 again"
    script: list[tuple[str, int | str]] = [
        ("worker 0", random.choice((1, random.randrange(1, 160)))),
        ("worker 1", random.randrange(20, 70)),
        ("worker 0", random.choice(("on", "on", random.randrange(1, 120)))),
        (second, random.choice(("on", random.randrange(1, 130)))),
    ]
    if random.random() < 0.3:
        script.insert(3, ("worker 0", "kill"))
    ends: list[tuple[str, int | str]] = [("worker 1", "on"), (second, "on"), ("worker 0", "on")]
    random.shuffle(ends)
    some = ("exchange", *OPERATIONS)
    late = (tuple(random.choice(some) for _ in range(random.choice((0, 1, 2)))) for _ in range(2))
    plan = Plan(
        operations=(("exchange",) * random.choice((1, 1, 2, 3)), *late),
        leaves_an_add=(False, random.random() < 0.3, random.random() < 0.3),
        workers=1,
        chunks=random.choice((1, 1, 2)),
        latecomers=((1, 1), (random.choice((2, random.randrange(2, 150))), number)),
        bystander=random.choice(("", "", "looks")),
    )
    return run(source, plan, schedule_of(random, seed, 1, How(script=script + ends * 2, trace=how.trace)))


def _alone_again(source: Source, random: Random, seed: int, how: How) -> int:
    script: list[tuple[str, int | str]] = [("worker 1", "on"), ("worker 0", "on"), ("worker 1", "on")]
    script += [("worker 0", random.randrange(1, 50)), ("worker 1 again", "on"), ("worker 0", "on")]
    plan = Plan(
        operations=(("exchange",) * random.choice((2, 3)), ("exchange",)),
        leaves_an_add=(False, False),
        workers=2,
        chunks=random.choice((1, 2)),
        latecomers=((random.randrange(70, 190), 1),),
    )
    return run(source, plan, schedule_of(random, seed, 1, How(script=script * 2, trace=how.trace)))


def _events(random: Random, reach: int, number: int, workers: int) -> tuple[tuple[int, int], ...]:
    return tuple((random.randrange(1, reach), random.choice(range(workers))) for _ in range(number))


def _drawn(seed: int, how: How, latecomers: bool) -> tuple[Plan, Scheduler]:
    random = Random(seed)
    workers = random.choice((2, 2, 3, 3, 4))
    late = random.choice((1, 1, 2)) if latecomers else 0
    chunks, number = random.choice((1, 1, 2, 3)), random.choice((1, 2, 3, 4))
    reach = (60 + 60 * chunks) * workers * number
    length = 16 * (workers + late if random.random() < 0.5 else 1)
    short = random.choice((0, 3))
    scheduler, continues = schedule_of(random, seed, reach, how), random.random() < 0.8
    operations = [[random.choice(OPERATIONS) for _ in range(number)] for _ in range(workers + late)]
    for worker in range(workers):
        if random.random() < 0.3:
            del operations[worker][random.randrange(number) :]
    leaves_an_add = tuple(random.random() < 0.5 for _ in range(workers + late))
    counts = random.choice((0, 0, 1, 1, 2, 3)), random.choice((0, 0, 2))
    deaths, signals = (_events(random, reach, count, workers) for count in counts)
    joins = []
    for joiner in range(late):
        place = random.choice((workers + joiner, random.randrange(workers)))
        joins.append((random.randrange(1, reach), place))
    stays = late == 0 and len(set(map(len, operations))) == 1 and random.random() < 0.7
    if stays:
        leaves_an_add = (False,) * workers
    if how.script is not None:
        deaths = signals = ()
    plan = Plan(
        tuple(map(tuple, operations)), leaves_an_add, workers, chunks, length, short, continues,
        deaths, signals, tuple(joins), stays=stays,
    )  # fmt: skip
    return plan, scheduler


def run(source: Source, plan: Plan, scheduler: Scheduler) -> int:
    """Runs one schedule of a plan and judges what came of it; returns its steps."""
    source["layout.words"].CHUNK_BYTES = 8 * plan.length
    chunks, elements = plan.chunks, plan.chunks * plan.length - plan.short
    world = World(source, scheduler, len(plan.operations) + 1, plan.continues)
    for worker in range(plan.workers):
        world.begin(worker)
    at = world.at
    shard = world.table(elements, at.SYNCHRONOUS, states=int(plan.keeps_state))
    update = int(plan.keeps_state)
    for worker in range(plan.workers):
        shard.enrol(worker)
    rounds, steps, control, base = (source["rounds.calls"], source["rounds.steps"], world.control.address, shard.base)
    lives: list[Life] = []

    def lost_here() -> bool:
        """Whether one that takes part in the table is known to be lost (or its number was given away since)."""
        return bool(world.replaced) or any(
            world.control.liveness(worker) == at.LOST and shard.enrolled(worker)
            for worker in range(len(plan.operations))
        )

    def live(life: Life) -> None:
        me, one = life.worker, 1 << (8 * life.number)
        progress = np.zeros(steps.MEMBERS + chunks + 1, np.int64)
        progress[steps.ROUND] = life.first = shard.first_round(me)
        local, last = np.zeros(elements, np.int64), np.zeros(elements, np.int64)
        delta, call = np.full(elements, one, np.int64), world.call()

        def finished() -> None:
            number = int(progress[steps.ROUND]) - 1
            assert number not in life.values, f"{life} finished round {number} twice"
            life.given = life.asked
            life.counts[number], life.values[number] = life.given, local.copy()

        for operation in plan.operations[me]:
            if operation in ("add", "two", "joined"):
                for _ in range(2 if operation == "two" else 1):
                    life.asked += 1
                    rounds.stage(base, me, progress, delta, 0, call)
            life.chunked = operation == "exchange"
            if operation in ("exchange", "joined"):
                life.asked += 1
                local += one
            known = not plan.continues and world.quietly(lost_here)
            if operation in ("exchange", "joined"):
                exchange = (control, base, update, me, progress, local, last, call)
                code = world.until_done(rounds.exchange, *exchange)
            else:
                code = world.until_done(rounds.read, control, base, update, me, progress, local, call)
                last[:] = local
            # (another may have come in the lost one's place, also in the middle of the round)
            assert code or not known or world.replaced, (
                f"worker {me} finished a round that began after another was lost"
            )
            if code:
                assert code == LOST, f"worker {me}: code {code}"
                assert world.quietly(lost_here), f"worker {me} was told of a loss, and all of the table are there"
                life.end = "lost"
                rounds.leave(control, base, me, progress)  # what it added is in the round that is open
                world.leave(me)
                return
            finished()
        life.chunked = False
        if plan.leaves_an_add[me]:
            life.asked += 1
            rounds.stage(base, me, progress, delta, 0, call)
            life.latest = -1
        rounds.leave(control, base, me, progress)  # where nothing was added it does nothing
        if life.latest:
            life.latest = world.quietly(lambda: shard.committed) + 2
        life.end = "left"
        life.given = life.asked
        if not plan.stays:
            world.leave(me)

    def begin(worker: int) -> None:
        life = Life(len(lives), worker, late=False)
        lives.append(life)
        world.run(worker, lambda _: live(life))

    def join(worker: int) -> None:
        if len(lives) >= _LIVES or not world.admit(worker):
            return
        world.control.activate(worker, joins_late=True)
        life = Life(len(lives), worker, late=True)
        lives.append(life)
        shard.enrol(worker)
        live(life)

    def look() -> tuple[int, Any]:
        """What ``table.snapshot`` does; -1 when a round was finished meanwhile."""
        number, out = shard.committed, np.zeros(elements, np.int64)
        rounds.committed_copy(base, number, out)
        return (number if shard.committed == number else -1), out

    for worker in range(plan.workers):
        begin(worker)
    seen: list[tuple[int, Any]] = []
    bystander = len(plan.operations)
    if plan.bystander:
        world.begin(bystander)
    if plan.bystander == "looks":
        world.run(bystander, lambda _: seen.extend(look() for _ in range(4)))
    elif plan.bystander == "dies":
        world.scheduler.at(40, lambda: world.tell_node(lambda: world.control.settle(bystander, at.LOST)))
    world.happen(plan.deaths, plan.signals)
    for step, number in plan.latecomers:
        world.join_at(step, number, join)
    world.scheduler.run()
    judge(world, shard, lives)
    judge_seen(lives, seen)
    if plan.keeps_state:
        state, values = world.quietly(lambda: (shard.states()[0], shard.values()))
        assert np.array_equal(state, values), "the updater's state is not that of the last finished round"
    return world.scheduler.steps
