"""Synchronous rounds: all who finish a round have the same in it, and everyone's contribution is in exactly once.

Each life of a worker has eight bits of every element for itself: it adds one there with each operation, so that a
value tells whose contributions it holds, and how often. A life that ends by a kill may be in a round with the one
operation that it did not finish: an ``add`` as a whole, an ``exchange`` with its first chunks.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import numpy as np

from interleavings.scheduler import Scheduler
from interleavings.source import Source
from interleavings.world import DRAWN, LOST, How, World, schedule_of

_LIVES = 7  # of eight bits each in an int64


@dataclass
class Life:
    """One worker from its beginning to its end.

    Attributes:
        counts: its contributions up to and in each round that it finished.
        values: what it read in each.
        given: its contributions so far; ``asked``: with the operation that it is at.
        chunked: whether that one is an exchange.
        latest: of one that left an add, the round in flight then and one more.
        end: "" while it runs, then "left" or "lost"; of one that was killed, "".
    """

    number: int
    worker: int
    late: bool
    counts: dict[int, int] = field(default_factory=dict)
    values: dict[int, Any] = field(default_factory=dict)
    given: int = 0
    asked: int = 0
    chunked: bool = False
    first: int = 0
    latest: int = 0
    end: str = ""


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
            (
                random.randrange(1, reach // 2),
                random.choice((workers + i, workers + i, random.randrange(workers))),
            )
            for i in range(late)
        ),
    )
    plan = replace(
        plan,
        bystander=random.choice(("", "", "", "looks", "looks", "dies")),
        keeps_state=random.random() < 0.3,
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
    """The smallest worlds, for what takes one step out of a hundred: one works, and somebody comes meanwhile.

    The latecomer leaves an add and goes at once; or it works, too; or two come, and the first dies in a round. They
    are stopped at some step, one after the other, and then each goes as far as it can.
    """
    random = Random(seed)
    kind = random.choice(("leaves", "works", "dies"))
    late = 2 if kind == "dies" or random.random() < 0.2 else 1
    latecomers = ((1, 1), (random.choice((1, 30)), 2))[:late]
    names = [f"worker {number}" for number in range(1 + late)]
    script: list[tuple[str, int | str]] = [(name, random.randrange(1, 110)) for name in names]
    if kind == "dies":
        script.insert(1, ("worker 0", "kill"))
    elif random.random() < 0.5:
        script.append(("worker 0", random.randrange(1, 60)))
    works = random.choice(("exchange", "add", "two"))
    plan = Plan(
        operations=(
            (random.choice(OPERATIONS),) * random.choice((1, 2)),
            *(() if kind == "leaves" else (works,) for _ in latecomers),
        ),
        leaves_an_add=(False, *(kind == "leaves" for _ in latecomers)),
        workers=1,
        chunks=random.choice((1, 2)),
        length=random.choice((16, 32)),
        latecomers=latecomers,
        bystander="looks" if kind == "dies" else "",
        keeps_state=random.random() < 0.3,
    )
    script += [(name, "on") for name in random.sample([*names, f"worker {1 + late}"], 2 + late)] * 2
    return run(source, plan, schedule_of(random, seed, 1, How(script=script, trace=how.trace)))


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
    source["layout"].CHUNK_BYTES = 8 * plan.length
    chunks, elements = plan.chunks, plan.chunks * plan.length - plan.short
    world = World(source, scheduler, len(plan.operations) + 1, plan.continues)
    for worker in range(plan.workers):
        world.begin(worker)
    at = world.at
    shard = world.table(elements, at.SYNCHRONOUS, states=int(plan.keeps_state))
    update = int(plan.keeps_state)
    for worker in range(plan.workers):
        shard.enrol(worker)
    rounds, control, base = source["rounds"], world.control.address, shard.base
    lives: list[Life] = []

    def lost_here() -> bool:
        """Whether one that takes part in the table is known to be lost (or its number was given away since)."""
        return bool(world.replaced) or any(
            world.control.liveness(worker) == at.LOST and shard.enrolled(worker)
            for worker in range(len(plan.operations))
        )

    def live(life: Life) -> None:
        me, one = life.worker, 1 << (8 * life.number)
        progress = np.zeros(rounds.MEMBERS + chunks + 1, np.int64)
        progress[rounds.ROUND] = life.first = shard.first_round(me)
        local, last = np.zeros(elements, np.int64), np.zeros(elements, np.int64)
        delta, call = np.full(elements, one, np.int64), world.call()

        def finished() -> None:
            number = int(progress[rounds.ROUND]) - 1
            assert number not in life.values, f"{life} finished round {number} twice"
            life.given = life.asked
            life.counts[number], life.values[number] = life.given, local.copy()

        for operation in plan.operations[me]:
            if operation in ("add", "two", "joined"):
                for _ in range(2 if operation == "two" else 1):
                    life.asked += 1
                    rounds.stage(base, me, progress, delta, call)
            life.chunked = operation == "exchange"
            if operation in ("exchange", "joined"):
                life.asked += 1
                local += one
            known = not plan.continues and not world.replaced and world.quietly(lost_here)
            if operation in ("exchange", "joined"):
                exchange = (control, base, update, me, progress, local, last, call)
                code = world.until_done(rounds.exchange, *exchange)
            else:
                code = world.until_done(rounds.read, control, base, update, me, progress, local, call)
                last[:] = local
            assert code or not known, f"worker {me} finished a round that began after another was lost"
            if code:
                assert code == LOST, f"worker {me}: code {code}"
                assert world.quietly(lost_here), (
                    f"worker {me} was told of a loss, and all of the table are there"
                )
                life.end = "lost"
                world.leave(me)
                return
            finished()
        life.chunked = False
        if plan.leaves_an_add[me]:
            life.asked += 1
            rounds.stage(base, me, progress, delta, call)
            rounds.leave(control, base, me, progress)
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
        world.scheduler.at(
            40,
            lambda: world.tell_node(lambda: world.control.settle(bystander, at.LOST)),
        )
    world.happen(plan.deaths, plan.signals)
    for step, number in plan.latecomers:
        world.join_at(step, number, join)
    world.scheduler.run()
    _judge(world, shard, lives)
    _judge_seen(lives, seen)
    if plan.keeps_state:
        state, values = world.quietly(lambda: (shard.states()[0], shard.values()))
        assert np.array_equal(state, values), "the updater's state is not that of the last finished round"
    return world.scheduler.steps


def _judge(world: World, shard: Any, lives: list[Life]) -> None:
    finished = sorted({number for life in lives for number in life.values})
    for number in finished:
        readers = [life for life in lives if number in life.values]
        value = readers[0].values[number]
        for other in readers[1:]:
            assert np.array_equal(value, other.values[number]), (
                f"round {number}: {readers[0].worker} and {other.worker} read different values"
            )
        for life in lives:
            _judge_counts(
                life,
                number,
                (value >> (8 * life.number)) & 0xFF,
                finished,
                bool(world.dead),
            )
    for life in lives:
        rounds = sorted(life.values)
        assert rounds == list(range(rounds[0], rounds[0] + len(rounds))) if rounds else True, (
            f"{life} left out a round"
        )
        ended = life.end or world.actors[life.worker].dead or life.worker in world.dead
        assert ended, f"worker {life.worker} neither finished nor died"
        if life.end == "lost":
            assert world.dead, f"worker {life.worker} was told that one is lost, and nobody died"
            assert not world.continues, f"worker {life.worker} did not go on without the lost"
    if finished:
        committed = shard.committed
        assert committed >= finished[-1], (
            f"round {finished[-1]} was finished, and {committed} is the last committed"
        )


def _judge_seen(lives: list[Life], seen: list[tuple[int, Any]]) -> None:
    """A snapshot is the values of its round, or of the one before where that was finished by nobody."""
    values = {number: life.values[number] for life in lives for number in life.values}
    for number, copy in seen:
        for life in lives:
            if life.values and 0 <= number < min(life.values):
                assert not ((copy >> (8 * life.number)) & 0xFF).any(), (
                    f"a snapshot of round {number} has what worker {life.worker} gave in a later one"
                )
        before = [known for known in values if known <= number]
        if number == 0 or number in values:
            wanted = values.get(number, np.zeros_like(copy))
            assert np.array_equal(copy, wanted), f"a snapshot of round {number} is not its values"
        elif number > 0 and before:
            assert (copy >= values[max(before)]).all(), f"a snapshot of round {number} is older than it"


def _judge_counts(life: Life, number: int, found: Any, finished: list[int], died: bool) -> None:
    earlier = [r for r in life.values if r <= number]
    least = life.counts[max(earlier)] if earlier else 0
    if number in life.values:
        assert (found == least).all(), (
            f"round {number}: {life.worker} gave {least}, and {np.unique(found)} is in it"
        )
        return
    later = [life.counts[r] for r in life.values if r > number]
    if later:
        assert (found == least).all(), (
            f"round {number}: {life.worker}, not in it, gave {least}: {np.unique(found)}"
        )
        return
    if life.end == "left":
        # what it added last is in the next round; of a latecomer perhaps in the one after that was in flight
        due = max(life.values) + 1 if life.values else life.first
        surely = max(due + 1, life.latest) if life.late else due
        if number < due:
            possible = {least}
        elif number < surely or (died and any(r not in finished for r in range(due, surely + 1))):
            # (a round that only workers took part in who died is made one in which nothing was added)
            possible = {least, life.given}
        else:
            possible = {life.given}
        assert (found == found[0]).all(), f"round {number}: a part of an add of {life.worker}: {found}"
        assert int(found[0]) in possible, (
            f"round {number}: {life.worker} left after {life.given}, and {found[0]} is in it"
        )
        return
    assert ((found >= least) & (found <= life.asked)).all(), (
        f"round {number}: {life.worker} had given {least} to {life.asked}, and {np.unique(found)} is in it"
    )
    if not life.chunked:
        assert (found == found[0]).all(), f"round {number}: a part of an add of {life.worker}: {found}"
    else:
        assert (np.diff(found) <= 0).all(), f"round {number}: not the first chunks of {life.worker}: {found}"
