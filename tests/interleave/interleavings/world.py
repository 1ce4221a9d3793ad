"""What a law begins with: a control segment, tables, and a node that notices deaths and admits latecomers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace
from typing import Any

from interleavings.memory import Memory
from interleavings.scheduler import Actor, Scheduler, Script
from interleavings.source import Source

MEMORY = Memory()
RETRY = (4, 110)  # a signal came, or a slice of waiting is over: the call is taken up again
LOST = 1
_MAILBOX = 7  # no address: what the node sleeps on


@dataclass(frozen=True)
class How:
    """How a schedule is run, where not as its seed says.

    Attributes:
        script: instead of a drawn way to decide, and without drawn deaths and signals.
        trace: called before each step.
    """

    script: Script | None = None
    trace: Callable[..., None] | None = None


DRAWN = How()


def schedule_of(random: Random, seed: int, reach: int, how: How, workers: int = 0) -> Scheduler:
    """Returns a scheduler whose way to decide is drawn; with ``workers``, sometimes stops and deaths of these."""
    way = random.choice(("walk", "walk", "bounded", "priorities", "priorities"))
    gap, changes = random.choice((1.0, 2.0, 5.0, 15.0)), random.randint(0, 5)
    if how.script is not None:
        return Scheduler(seed, "script", script=how.script, trace=how.trace)
    if workers and random.random() < 0.25:
        script: list[tuple[str, int | str]] = []
        for name in (f"worker {random.randrange(workers)}" for _ in range(random.choice((2, 3, 4)))):
            script.append((name, random.choice((random.randrange(1, 60), "on"))))
            if random.random() < 0.3:
                script.append((name, "kill"))
        return Scheduler(seed, "script", script=script, trace=how.trace)
    return Scheduler(seed, way, gap=gap, changes=changes, reach=reach, trace=how.trace)


@dataclass
class World:
    """One schedule's world. ``actors``: the workers' by number; ``dead``: who was killed, in order; ``replaced``:
    whose number was given to a latecomer."""

    source: Source
    scheduler: Scheduler
    capacity: int
    continues: bool
    control: Any = None
    at: Any = None
    dead: list[int] = field(default_factory=list)
    actors: dict[int, Actor] = field(default_factory=dict)
    replaced: list[int] = field(default_factory=list)
    shards: list[Any] = field(default_factory=list)
    _tasks: list[Callable[[], None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        memory = self.source.memory
        memory.reset(self.scheduler)
        self.at = self.source["layout.words"]
        size = self.at.control_bytes(self.capacity)
        address = memory.take(size)
        segment = SimpleNamespace(
            address=address, array=lambda offset, count, dtype: memory.array(address + offset, count, dtype)
        )
        self.control = self.source["runtime.job.control"].Control(segment)
        self.control.initialise(self.capacity)
        self.control.continue_without_lost(self.continues)
        memory.be_quiet(segment.address + self.at.CAPACITY, 8)
        memory.be_quiet(segment.address + self.at.NODE_BLOCK, 4)
        self.scheduler.scripted_kill = lambda name: self.kill(int(name.split()[1]))
        self.node = self.scheduler.add("node", self._node, daemon=True)

    # -- the node --------------------------------------------------------------------------------------------------

    def _node(self) -> None:
        while True:
            while self._tasks:
                self._tasks.pop(0)()
            self.scheduler.sleep(_MAILBOX)

    def tell_node(self, task: Callable[[], None]) -> None:
        """Lets the node do something, after what it has been told before."""
        self._tasks.append(task)
        self.scheduler.wake(_MAILBOX)

    def ask_node(self, task: Callable[[], Any]) -> Any:
        """Lets the node do something and waits for the answer."""
        answers: list[Any] = []
        mailbox = -1 - len(self.scheduler.actors) - self.scheduler.steps  # no address, its own

        def answer() -> None:
            answers.append(task())
            self.scheduler.wake(mailbox)

        self.tell_node(answer)
        while not answers:
            self.scheduler.sleep(mailbox)  # a signal is handled, and it waits on
        return answers[0]

    def kill(self, worker: int) -> None:
        """SIGKILL: no further step; some time later the node knows."""
        actor = self.actors.get(worker)
        if actor is None or actor.ended or actor.dead:
            return
        self.scheduler.kill(actor)
        self.dead.append(worker)
        self.tell_node(lambda: self.control.settle(worker, self.at.LOST))

    def leave(self, worker: int) -> None:
        """The end of a worker that leaves in order; some time later the node knows."""
        self.control.leave(worker)
        self.tell_node(lambda: self.control.settle(worker, self.at.GONE))

    # -- workers ---------------------------------------------------------------------------------------------------

    def begin(self, worker: int) -> None:
        """Before the schedule: a worker is there from the start."""
        self.control.admit(worker, 1000 + worker)
        self.control.activate(worker, joins_late=False)

    def run(self, worker: int, body: Callable[[int], None]) -> None:
        """Adds a worker's actor, which does ``body(worker)``."""
        self.actors[worker] = self.scheduler.add(f"worker {worker}", lambda: body(worker))

    def join_at(self, step: int, worker: int, body: Callable[[int], None]) -> None:
        """Lets a latecomer do ``body(worker)`` from a step on; its number may be that of one who is gone by then."""

        def come() -> None:
            before = self.actors.get(worker)
            name = f"worker {worker} again" if before is not None else f"worker {worker}"
            actor = self.scheduler.add(name, lambda: body(worker))
            if before is None or before.ended or before.dead:
                self.actors[worker] = actor

        self.scheduler.at(step, come)

    def quietly(self, look: Callable[[], Any]) -> Any:
        """Returns what a look at shared words says, without a step."""
        current, self.scheduler.current = self.scheduler.current, None
        try:
            return look()
        finally:
            self.scheduler.current = current

    def disturb(self, random: Random, reach: int, how: How, deaths: int, signals: int) -> None:
        """Draws who dies and who gets a signal when, unless a script says it."""
        deaths_at, signals_at = (
            [(random.randrange(1, reach), random.choice(sorted(self.actors))) for _ in range(number)]
            for number in (deaths, signals)
        )
        if how.script is None:
            self.happen(deaths_at, signals_at)

    def happen(self, deaths: Iterable[tuple[int, int]], signals: Iterable[tuple[int, int]]) -> None:
        """Lets workers be killed or get a signal: (step, worker)."""
        for what, events in ((self.kill, deaths), (self._signal, signals)):
            for step, worker in events:
                self.scheduler.at(step, lambda do=what, w=worker: do(w))  # type: ignore[misc]

    def _signal(self, worker: int) -> None:
        self.scheduler.interrupt(self.actors[worker])

    def admit(self, worker: int) -> bool:
        """A latecomer asks for a number: a free one, or one whose owner is gone. False: not yet to be had."""

        def admit() -> bool:
            liveness = self.control.liveness(worker)
            if liveness == self.at.ALIVE:
                return False
            if liveness != self.at.FREE and any(shard.needs(worker) for shard in self.shards):
                return False
            for shard in self.shards:
                shard.withdraw(worker)
            if liveness != self.at.FREE:
                self.replaced.append(worker)
            self.control.admit(worker, 2000 + worker)
            return True

        return bool(self.ask_node(admit))

    def table(self, elements: int, mode: int, columns: int = 0, **spec: Any) -> Any:
        """Makes a table of int64 that the workers that are there take part in; returns its shard.

        Args:
            elements: of an array, or with ``columns`` of a matrix.
        """
        specs, shards, memory = (self.source["spec.table"], self.source["shards.shard"], self.source.memory)
        shape = ("matrix", elements // columns, columns) if columns else ("array", 1, elements)
        spec = specs.TableSpec(*shape, dtype="int64", **spec)
        quorum = mode == self.at.QUORUM
        index = self.control.index
        size = specs.Places.of(spec, index, quorum or mode == self.at.SYNCHRONOUS, quorum).size
        address = memory.take(size)
        shards.initialise(address, spec, len(self.shards) + 1, index, mode)
        segment = SimpleNamespace(
            address=address, array=lambda offset, count, dtype: memory.array(address + offset, count, dtype)
        )
        shard = shards.Shard(segment, spec, index, mode)
        changing = (self.at.COMMITTED, self.at.DECISIONS, self.at.DECISIONS + 8)
        for word in range(0, self.at.TABLE_HEADER, 8):
            if word not in changing:
                memory.be_quiet(address + word, 8)
        self.shards.append(shard)
        return shard

    def call(self) -> int:
        """Returns the address of a call's record, which nobody but its worker looks at."""
        address = int(self.source.memory.take(16))
        self.source.memory.be_quiet(address, 16)
        return address

    def until_done(self, call: Callable[..., int], *arguments: Any) -> int:
        """Takes a call up again until it is done or has failed; returns its code."""
        me = self.scheduler.current
        assert me is not None
        while True:
            signals = me.signals
            code = int(call(*arguments))
            assert (code in RETRY) == (me.signals > signals), (
                f"{me} went on waiting after a signal, or stopped without one: code {code}"
            )
            if code not in RETRY:
                return code
