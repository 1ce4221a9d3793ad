"""Rounds with a quorum: each add is in exactly one round, a round has the same bits for all, and none waits too long.

As in ``rounds`` each life of a worker has eight bits of every element for itself, and adds one there with each add. So
a value tells whose adds are in it, and how often. A worker may also be *stopped* at any step: it takes no other until
all others have ended, or are too few for a round without it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import numpy as np

from interleavings.source import Source
from interleavings.world import DRAWN, LOST, How, World, schedule_of

_LIVES = 7
_FIRST = 1 << 60  # what each element is at first, above what the lives add
_FOREVER = 1 << 40  # steps: a grace that no schedule sees the end of
OPERATIONS = ("exchange", "add", "two", "joined", "read")


@dataclass(frozen=True)
class Plan:
    """What happens in a world of rounds with a quorum.

    Attributes:
        operations, leaves_an_add, workers, length, continues, deaths, signals, latecomers, keeps_state, bystander: as
            in `rounds`.
        needed, of: the quorum.
        grace: in steps.
        unexpected: workers that say themselves that they do not come just now; the others say that they do, or nothing.
        stops: (step, worker, for so many steps; 0: for good).
        rounds: of a replay, the members and readers of each.
        turns: of a replay, each worker's reads.
    """

    operations: tuple[tuple[str, ...], ...]
    leaves_an_add: tuple[bool, ...]
    workers: int
    needed: int
    of: int = 0
    grace: int = 0
    unexpected: tuple[int, ...] = ()
    length: int = 16
    continues: bool = True
    deaths: tuple[tuple[int, int], ...] = ()
    signals: tuple[tuple[int, int], ...] = ()
    stops: tuple[tuple[int, int, int], ...] = ()
    latecomers: tuple[tuple[int, int], ...] = ()
    keeps_state: bool = False
    bystander: str = ""
    rounds: Any = None
    turns: tuple[tuple[tuple[int, int], ...], ...] = ()


@dataclass
class Read:
    """One read: the round that has the adds before it, the one that it read (0: none), when it began and ended."""

    joined: int
    got: int
    given: int
    values: Any = None
    began: int = 0
    ended: int = 0


@dataclass
class Life:
    """One worker from its beginning to its end; ``reads``: also one without values, of an add that it left."""

    number: int
    worker: int
    late: bool
    reads: list[Read] = field(default_factory=list)
    asked: int = 0
    begun: int = 0
    opened: int = 0
    end: str = ""


def quorum(source: Source, seed: int, how: How = DRAWN) -> int:
    """Workers that are there from the start, that leave, die and stop."""
    random = Random(seed)
    return _run(source, *_drawn(random, seed, how, late=0))[0]


def quorum_joining(source: Source, seed: int, how: How = DRAWN) -> int:
    """The same, and workers that join, some with the number of one that is gone."""
    random = Random(seed)
    return _run(source, *_drawn(random, seed, how, late=random.choice((1, 1, 2))))[0]


def quorum_stopped(source: Source, seed: int, how: How = DRAWN) -> int:
    """Small worlds in which one or two workers stop at some step for good, while each other goes as far as it can."""
    random = Random(seed)
    workers = random.choice((2, 3, 3, 4))
    names = [f"worker {number}" for number in range(workers)]
    script: list[tuple[str, int | str]] = []
    for name in random.sample(names, random.choice((1, 1, 2))):
        script += [(name, random.randrange(1, 160)), (name, random.choice(("stop", "stop", "stop", "kill")))]
        if random.random() < 0.5:
            script.insert(0, (random.choice(names), random.choice(("on", random.randrange(1, 160)))))
    script += [(name, "on") for name in random.sample(names, len(names))] * 2
    number = random.choice((1, 2, 3))
    plan = Plan(
        operations=tuple(tuple(random.choice(OPERATIONS) for _ in range(number)) for _ in names),
        leaves_an_add=tuple(random.random() < 0.3 for _ in names),
        workers=workers,
        needed=random.choice((1, 1, max(1, workers - 1))),
        grace=random.choice((0, 0, 30, 400, _FOREVER)),
        unexpected=tuple(worker for worker in range(workers) if random.random() < 0.3),
        keeps_state=random.random() < 0.3,
        bystander=random.choice(("", "", "looks")),
        of=random.choice((0, 0, workers)),
    )
    return _run(source, plan, schedule_of(random, seed, 1, How(script=script, trace=how.trace)))[0]


def quorum_replayed(source: Source, seed: int, how: How = DRAWN) -> int:
    """A run and another one of the same program, by the record of the first and in another order: the same bits."""
    random = Random(seed)
    plan, scheduler = _drawn(random, seed, DRAWN, late=0)
    plan = replace(plan, deaths=(), continues=True, bystander="")
    steps, lives = _run(source, plan, scheduler)
    last = max((max(read.joined, read.got) for life in lives for read in life.reads), default=0)
    rounds = np.zeros((last + 2, 2), np.int64)
    for life in lives:
        for read in life.reads:
            rounds[read.joined, 0] |= 1 << life.worker
            rounds[read.got, 1] |= (1 << life.worker) if read.got else 0
    turns = tuple(tuple((read.joined, read.got) for read in life.reads) for life in lives)
    again = replace(plan, rounds=rounds, turns=turns, stops=(), needed=random.choice((1, plan.needed)))
    more, others = _run(source, again, schedule_of(random, seed + 1, 400, how))
    for life, other in zip(lives, others, strict=True):
        for read, second in zip(life.reads, other.reads, strict=True):
            assert (read.joined, read.got) == (second.joined, second.got), f"{life.worker}: {read} became {second}"
            assert read.values is None or np.array_equal(read.values, second.values), f"{life.worker}: other bits"
    return steps + more


def _drawn(random: Random, seed: int, how: How, late: int) -> tuple[Plan, Any]:
    workers = random.choice((2, 2, 3, 3, 4))
    number = random.choice((1, 2, 3, 4))
    reach = 130 * workers * number
    everyone = range(workers + late)
    scheduler = schedule_of(random, seed, reach, how)

    def events(counts: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
        return tuple((random.randrange(1, reach), random.randrange(workers)) for _ in range(random.choice(counts)))

    plan = Plan(
        operations=tuple(
            tuple(random.choice(OPERATIONS) for _ in range(number - (random.random() < 0.2))) for _ in everyone
        ),
        leaves_an_add=tuple(random.random() < 0.4 for _ in everyone),
        workers=workers,
        needed=random.randrange(1, workers + 1),
        grace=random.choice((0, 20, 100, 1000, 20_000, _FOREVER)),
        unexpected=random.choice(((), (), (0,), (0, 1))),
        length=16,
        continues=random.random() < 0.85,
        deaths=events((0, 0, 1, 2)),
        signals=events((0, 0, 2)),
        stops=tuple((step, worker, random.choice((0, 0, 50, 500, 20_000))) for step, worker in events((0, 1, 2, 3))),
        latecomers=tuple(
            (random.randrange(1, reach), random.choice((workers + i, random.randrange(workers)))) for i in range(late)
        ),
        keeps_state=random.random() < 0.3,
        bystander=random.choice(("", "", "", "looks", "dies")),
    )
    if random.random() < 0.3:
        half = replace(plan, needed=1, of=2, stops=(), deaths=(), bystander="")
        plan = replace(plan, of=workers) if number == 1 else half
    if how.script is not None:
        plan = replace(plan, deaths=(), signals=(), stops=())
    return plan, scheduler


def _run(source: Source, plan: Plan, scheduler: Any) -> tuple[int, list[Life]]:
    """Runs one schedule of a plan and judges what came of it; returns its steps, and the workers' lives."""
    elements = plan.length
    world = World(source, scheduler, len(plan.operations) + 1, plan.continues)
    source.memory.torn = True
    for worker in range(plan.workers):
        world.begin(worker)
    at = world.at
    shard = world.table(elements, at.QUORUM, states=int(plan.keeps_state))
    update = int(plan.keeps_state)
    for array in (shard.values(), *shard.states()):
        array[:] = _FIRST
    for worker in range(plan.workers):
        shard.enrol(worker)
    # later, or earlier; not two earlier, as one that is late itself expects the others to be
    window = (1, 500_000_000) if len(plan.unexpected) == 1 else (1 << 60, 1 << 61)
    for worker in plan.unexpected:
        source.memory.array(shard.line(worker) + at.EXPECTED, 2, np.int64)[:] = window
    for worker in range(len(plan.unexpected), plan.workers, 2):
        if worker not in plan.unexpected:
            source.memory.array(shard.line(worker) + at.EXPECTED, 2, np.int64)[:] = 1, 1 << 61
    kernels, rounds, control, base = (source["quorum"], source["rounds.calls"], world.control.address, shard.base)
    lives: list[Life] = []

    def lost_here() -> bool:
        """As in ``rounds``."""
        return bool(world.replaced) or any(
            world.control.liveness(worker) == at.LOST and shard.enrolled(worker)
            for worker in range(len(plan.operations))
        )

    def needed(there: int) -> int:
        return -(-plan.needed * there // plan.of) if plan.of else min(plan.needed, there)

    def too_few() -> None:
        """Nobody goes on without those that are stopped: they have to be needed for the quorum."""

        def look() -> tuple[int, int, bool]:
            live = {life.worker for life in lives if world.control.is_live(life.worker)}
            stopped = {worker for worker in live if world.actors[worker].frozen}
            members = shard.progress().members  # (without those stopped before they joined)
            came = {worker for worker in stopped & members.keys() if members[worker].staged > shard.committed}
            # (until it has woken the others they know of it after half a second only)
            came = {worker for worker in came if world.control.worker(worker).wait is not None}
            awaited = plan.grace >= _FOREVER and not stopped - came <= {*plan.unexpected}
            return len(live), len(live) - len(stopped) + len(came), awaited

        there, moving, awaited = world.quietly(look)
        assert moving < needed(there) or awaited or plan.rounds is not None, (
            f"{moving} of {there} go on, enough for a round of {needed(there)}, and all wait for one that is stopped"
        )

    scheduler.all_wait_for_frozen = too_few

    def live(life: Life) -> None:
        me, one = life.worker, 1 << (8 * life.number)
        progress = np.zeros(at.QUORUM_WORDS, np.int64)
        progress[[kernels.NEEDED, kernels.OF, kernels.GRACE]] = plan.needed, plan.of, 1000 * plan.grace
        kernels.keep(control, base, me, progress, np.zeros(elements, np.int64))
        life.opened = int(progress[kernels.READ])
        turns = iter(plan.turns[life.number] if plan.rounds is not None else ())
        local, last = np.zeros(elements, np.int64), np.zeros(elements, np.int64)
        kept = np.zeros(elements, np.int64)
        kernels.again(base, progress, kept)
        delta, call = np.full(elements, one, np.int64), world.call()
        life.begun = scheduler.clock

        def take_turn() -> None:
            """As ``QuorumRounds._may_come``, and waits."""
            joins, gets = next(turns, (0, 0))
            if not joins:
                return
            members, readers = map(int, plan.rounds[[joins, joins - 1], [0, 1]])
            progress[[kernels.NEEDED, kernels.OF, kernels.GRACE, kernels.GETS]] = members.bit_count(), 0, 0, gets
            while shard.committed != joins - 1 or any(
                readers >> worker & 1 and shard.progress().members[worker].folded < joins - 1
                for worker in range(plan.workers)
            ):
                scheduler.give_way()

        def leave() -> None:
            take_turn()
            began = scheduler.clock
            left = int(kernels.leave(control, base, me, progress))
            if left:
                life.reads.append(Read(left, 0, life.asked, None, began))
            assert not progress[kernels.STAGED]

        for operation in plan.operations[me]:
            take_turn()
            copy = np.zeros(elements, np.int64)
            kernels.again(base, progress, copy)
            assert np.array_equal(copy, kept), f"worker {me} has other values now than it has read"
            known = not plan.continues and not world.replaced and world.quietly(lost_here)
            if operation in ("add", "two", "joined"):
                for _ in range(2 if operation == "two" else 1):
                    life.asked += 1
                    rounds.stage(base, me, progress, delta, 0, call)
            if operation in ("exchange", "joined"):
                life.asked += 1
                local += one
            began = scheduler.clock
            if operation in ("exchange", "joined"):
                code = world.until_done(kernels.exchange, control, base, update, me, progress, local, last, call)
            else:
                code = world.until_done(kernels.read, control, base, update, me, progress, local, call)
                last[:] = local
            assert code or not known or world.replaced, (
                f"worker {me} finished a round that began after another was lost"
            )
            if code:
                assert code == LOST, f"worker {me}: code {code}"
                assert world.quietly(lost_here), f"worker {me} was told of a loss, and all of the table are there"
                life.end = "lost"
                leave()
                world.leave(me)
                return
            kept = local.copy()
            own = [kernels.own_buffer(base, me, which) for which in (0, 1)]
            assert progress[kernels.VALUES] in own, f"worker {me} keeps what it has read where another one writes"
            life.reads.append(
                Read(
                    int(progress[kernels.ROUND]), int(progress[kernels.READ]), life.asked, kept, began, scheduler.clock
                )
            )
        if plan.leaves_an_add[me]:
            life.asked += 1
            rounds.stage(base, me, progress, delta, 0, call)
        leave()
        life.end = "left"
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

    seen: list[tuple[int, Any]] = []

    def look() -> None:
        """What ``table.snapshot`` does."""
        for _ in range(4):
            out, number = np.zeros(elements, np.int64), shard.committed
            if kernels.committed_copy(base, out) and shard.committed == number:
                seen.append((number, out))

    for worker in range(plan.workers):
        begin(worker)
    bystander = len(plan.operations)
    if plan.bystander:
        world.begin(bystander)
    if plan.bystander == "looks":
        world.run(bystander, lambda _: look())
    elif plan.bystander == "dies":
        scheduler.at(40, lambda: world.tell_node(lambda: world.control.settle(bystander, at.LOST)))
    world.happen(plan.deaths, plan.signals)
    for step, worker, steps in plan.stops:
        scheduler.at(step, lambda w=worker, n=steps: scheduler.freeze(world.actors[w], n))
    for step, number in plan.latecomers:
        world.join_at(step, number, join)
    scheduler.run()
    _judge(world, plan, shard, lives, seen, needed)
    return scheduler.steps, lives


def _judge(world: World, plan: Plan, shard: Any, lives: list[Life], seen: list[tuple[int, Any]], needed: Any) -> None:
    values: dict[int, Any] = {0: np.full(plan.length, _FIRST)}
    for life in lives:
        for read in life.reads:
            if read.values is not None:
                known = values.setdefault(read.got, read.values)
                assert np.array_equal(known, read.values), f"round {read.got}: {life.worker} read other bits"
    committed, final = world.quietly(lambda: (shard.committed, shard.values().copy()))
    assert committed >= max(values), f"round {max(values)} was read, and {committed} is the last"
    assert np.array_equal(values.setdefault(committed, final), final), "the last round's values have changed"
    if plan.keeps_state:
        assert np.array_equal(world.quietly(lambda: shard.states()[0]), final), (
            "the updater's state is of another round"
        )
    for number, copy in seen:
        if number in values:
            assert np.array_equal(copy, values[number]), f"a snapshot of round {number} is not its values"
    for life in lives:
        ended = life.end or world.actors[life.worker].dead or life.worker in world.dead
        assert ended, f"worker {life.worker} neither finished nor died"
        assert life.end != "lost" or (world.dead and not plan.continues), f"worker {life.worker} lost nobody"
        _judge_life(world, life, values)
    quiet = not (world.dead or plan.latecomers or world.scheduler.frozen or plan.bystander or plan.rounds is not None)
    if quiet:
        slept = committed * plan.grace if plan.grace < _FOREVER else 0
        assert world.scheduler.skipped <= slept, "all slept longer than the grace, and nobody was stopped"
        _judge_grace(plan, lives, needed)


def _judge_life(world: World, life: Life, values: dict[int, Any]) -> None:
    before, late = life.opened, 0
    for read in life.reads:
        assert read.joined > before, f"{life.worker}: round {read.joined} after {before}"
        assert read.values is None or read.got >= read.joined, f"{life.worker} read {read.got}, and is in {read.joined}"
        late += read.values is not None and read.joined > before + 1
        before = read.got
    if life.end == "left" and life.worker not in world.replaced:
        said = world.quietly(lambda: world.shards[0].statistics(life.worker)["late"])
        assert said == late, f"{life.worker} was late {late} times, and {said} are counted"
    in_one, was = False, 0
    for number in sorted(values):
        found = (values[number] >> (8 * life.number)) & 0xFF
        given = max((read.given for read in life.reads if read.joined <= number), default=0)
        assert (found == found[0]).all(), f"round {number}: a part of an add of {life.worker}: {found}"
        if life.end or any(read.joined > number for read in life.reads) or given == life.asked:
            assert found[0] == given, f"round {number}: {life.worker} gave {given}, and {found[0]} is in it"
        else:  # killed in a round: what it gave there is in from some round on, or never
            possible = {life.asked} if in_one else {given, life.asked} | set(range(given, life.asked))
            assert found[0] in possible, f"round {number}: {life.worker} gave {given}, and {found[0]} is in it"
            in_one = found[0] == life.asked
        assert found[0] >= was, f"round {number}: less of {life.worker} than before"
        was = found[0]


def _judge_grace(plan: Plan, lives: list[Life], needed: Any) -> None:
    """A round that is closed without a worker is not closed before the grace is over that began with the quorum."""
    everyone = [(life, read) for life in lives for read in life.reads]
    for number in {read.joined for _, read in everyone}:
        members = [read for _, read in everyone if read.joined == number]
        finished = min((read.ended for _, read in everyone if read.got >= number), default=0)
        absent = [life for life in lives if all(read.joined != number for read in life.reads)]
        # those that are there and come later; who has ended by then, or has not begun, is not waited for
        missed = [life for life in absent if life.begun < finished and any(r.joined > number for r in life.reads)]
        if missed:
            came = sorted(read.began for read in members)
            least = (
                came[needed(len(members) + len(missed)) - 1]
                if len(came) >= needed(len(members) + len(missed))
                else None
            )
            assert least is not None, f"round {number} was closed with {len(members)}, and {len(missed)} were there"
            grace = 0 if {life.worker for life in missed} <= {*plan.unexpected} else plan.grace
            assert finished >= least + grace, f"round {number} was closed {finished - least} after the quorum"
