"""Who goes on at each step: the scheduler of one schedule, told by its seed alone.

An actor is a greenlet: a worker, a latecomer or the node. It gives control back only at a step, so nothing happens
that the scheduler has not decided. Four ways to decide:

- ``walk``: at each step, or every few steps, any actor that can go on;
- ``bounded``: an actor goes on until it sleeps or ends, except for a few preemptions at random steps (Musuvathi and
  Qadeer, "Iterative context bounding for systematic testing of multithreaded programs", PLDI 2007);
- ``priorities``: the actor of the highest priority that can go on, with a few random steps at which its priority
  falls below all others' (Burckhardt et al., "A randomized scheduler with probabilistic guarantees of finding bugs",
  ASPLOS 2010);
- ``script``: given actors for given numbers of their steps, or until they sleep or end, or killed, or stopped; then
  as ``bounded`` without a preemption.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from random import Random
from typing import Any

import greenlet

MOST_STEPS = 30_000
EINTR, TIMED_OUT = 4, 110
_NEVER = 1 << 60


Script = Sequence[tuple[str, int | str]]


class Stuck(AssertionError):
    """Nobody can go on, or nobody gets anywhere."""


class Actor:
    """Something that takes steps. ``daemon``: the schedule ends without it."""

    __slots__ = (
        "asleep",
        "daemon",
        "dead",
        "ended",
        "frozen",
        "greenlet",
        "interrupted",
        "late",
        "name",
        "naps",
        "pending",
        "priority",
        "signals",
        "steps",
    )

    def __init__(self, name: str, body: Callable[[], None], daemon: bool) -> None:
        self.name = name
        self.greenlet = greenlet.greenlet(body)
        self.asleep: int | None = None
        self.daemon = daemon
        self.dead = False
        self.ended = False
        self.frozen = False  # SIGSTOP: it takes no step until it is continued
        self.interrupted = False
        self.late = False  # its sleep was over before anybody woke it
        self.naps = 0
        self.pending = False
        self.signals = 0
        self.priority = 0.0
        self.steps = 0

    def __repr__(self) -> str:
        return self.name


class Scheduler:
    """Runs actors until all have ended.

    Args:
        seed: of every decision.
        way: one of the above.
        gap: of ``walk``: the mean number of steps between two decisions.
        changes: of ``bounded`` and ``priorities``: how many steps are chosen.
        reach: the steps are chosen among the first ``reach``.
        script: of ``script``: (actor's name, number of steps or "on", "kill" or "stop"); what cannot be done is left
            out.
        trace: called before each step with the scheduler, what it is, the address and the value.
    """

    def __init__(
        self,
        seed: int,
        way: str = "walk",
        gap: float = 1.0,
        changes: int = 0,
        reach: int = 1000,
        script: Script = (),
        trace: Callable[[Scheduler, str, int, Any], None] | None = None,
    ) -> None:
        self._random = Random(seed)
        self._way = way
        self._gap = gap
        self._changes = sorted(self._random.randrange(1, reach) for _ in range(changes))
        self._script = list(script)
        self._events: list[tuple[int, Callable[[], None]]] = []
        self._lowest = 0.0
        self._trace = trace
        self._main = greenlet.getcurrent()
        self._look_at = _NEVER
        self.actors: list[Actor] = []
        self.current: Actor | None = None
        self.steps = 0
        self.frozen = 0  # how often something was
        self.skipped = 0  # steps' time that passed while all slept
        self._alarms: list[tuple[int, int, Actor]] = []
        # called when nobody can go on while some are frozen: raises, or continues one
        self.all_wait_for_frozen: Callable[[], None] = lambda: None
        self.scripted_kill: Callable[[str], None] = lambda name: None

    @property
    def clock(self) -> int:
        """The time, in steps."""
        return self.steps + self.skipped

    # -- before and between steps --------------------------------------------------------------------------------

    def add(self, name: str, body: Callable[[], None], daemon: bool = False) -> Actor:
        """Adds an actor; it can go on at once."""
        actor = Actor(name, body, daemon)
        actor.priority = self._random.random()
        actor.greenlet.parent = self._main  # where it ends, whoever added it
        self.actors.append(actor)
        self._look_at = self.steps + 1
        return actor

    def at(self, step: int, event: Callable[[], None]) -> None:
        """Lets something happen when ``step`` steps have been taken, or when nobody can go on before that."""
        self._events.append((step, event))
        self._events.sort(key=lambda e: e[0])

    def kill(self, actor: Actor) -> None:
        """The actor takes no further step."""
        if not actor.ended and not actor.dead:
            actor.dead, actor.asleep = True, None

    def interrupt(self, actor: Actor) -> None:
        """A signal: an actor that sleeps is woken with EINTR, or its next sleep ends so."""
        if actor.dead or actor.daemon:
            return
        actor.pending = actor.asleep is None
        if not actor.pending:
            actor.asleep, actor.interrupted = None, True
            actor.signals += 1
            self._look_at = self.steps + 1

    def freeze(self, actor: Actor, steps: int = 0) -> None:
        """The actor takes no step for so many; 0: until all others have ended, or need it."""
        if not actor.ended and not actor.dead:
            actor.frozen = True
            self.frozen += 1
            self._look_at = self.steps + 1
            if steps:
                self._set_alarm(self.clock + steps, 0, actor)

    def _set_alarm(self, due: int, nap: int, actor: Actor) -> None:
        self._alarms.append((due, nap, actor))
        self._alarms.sort(key=lambda alarm: alarm[0])

    # -- what actors call ------------------------------------------------------------------------------------------

    def step(self, what: str, address: int, value: Any = None) -> None:
        """Comes before each operation on a shared word: others may go on first."""
        if self.current is None:  # a world is being set up or looked at
            return
        self.steps += 1
        self.current.steps += 1
        if self._trace is not None:
            self._trace(self, what, address, value)
        if self.steps >= self._look_at:
            self._switch()

    def give_way(self) -> None:
        """``sched_yield``: the others first."""
        if self.current is None:
            return
        self.steps += 1
        if self._way in ("priorities", "bounded", "script"):
            self._lowest -= 1.0
            self.current.priority = self._lowest
        self._switch(willing=True)

    def sleep(self, address: int, most: int | None = None) -> int:
        """Sleeps until woken: 0, or EINTR; or TIMED_OUT, when it may sleep for so many steps at most."""
        me = self.current
        assert me is not None, "nobody sleeps while a world is being set up"
        if me.pending:
            me.pending = False
            me.signals += 1
            return EINTR
        me.asleep = address
        me.naps += 1
        if most is not None:
            self._set_alarm(self.clock + most, me.naps, me)
        self._switch()
        if me.interrupted:
            me.interrupted = False
            return EINTR
        if me.late:
            me.late = False
            return TIMED_OUT
        return 0

    def wake(self, address: int) -> None:
        """Wakes all who sleep on a word."""
        for actor in self.actors:
            if actor.asleep == address:
                actor.asleep = None
                if self._way == "priorities":
                    self._look_at = self.steps + 1

    # -- deciding --------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Runs until all actors but daemons have ended.

        Raises:
            Stuck: nobody can go on, or 30,000 steps were taken.
        """
        try:
            while (actor := self._choose(willing=True)) is not None:
                self.current = actor
                actor.greenlet.switch()
                # only here does an actor end: its body has returned
                self.current = None
                for ended in self.actors:
                    ended.ended = ended.ended or ended.greenlet.dead
        finally:
            self.current = None

    def close(self) -> None:
        """Ends all actors: what the frames of a suspended greenlet refer to is never collected."""
        self.current = None
        for actor in self.actors:
            with suppress(AssertionError):  # of what it does on its way out
                actor.greenlet.throw()

    def _switch(self, willing: bool = False) -> None:
        me = self.current
        chosen = self._choose(willing)
        if chosen is None:
            self._main.switch()  # all others have ended, and this one is a daemon or was killed
        elif chosen is not me:
            self.current = chosen
            chosen.greenlet.switch()

    def _choose(self, willing: bool = False) -> Actor | None:
        while self._events and self._events[0][0] <= self.steps:
            self._events.pop(0)[1]()
        while self._alarms and self._alarms[0][0] <= self.clock:
            self._ring()
        if self.steps >= MOST_STEPS:
            raise Stuck(f"{MOST_STEPS} steps, and no end: " + self._who_waits())
        while not (ready := self._ready()):
            frozen = [a for a in self.actors if a.frozen and not a.dead]
            if all(a.dead or a.ended or a.daemon or a.frozen for a in self.actors):
                if not frozen:
                    return None
                frozen[0].frozen = False
            elif self._alarms and not (
                self._events and self._events[0][0] - self.steps < self._alarms[0][0] - self.clock
            ):
                self._ring()
            elif self._events:
                self._events.pop(0)[1]()
            elif frozen:
                self.all_wait_for_frozen()
                frozen[0].frozen = False
            else:
                raise Stuck("all sleep: " + self._who_waits())
        chosen = self._of(ready, willing)
        self._plan_next_look()
        return chosen

    def _ready(self) -> list[Actor]:
        return [a for a in self.actors if a.asleep is None and not (a.dead or a.ended or a.frozen)]

    def _ring(self) -> None:
        """The first of the alarms: time passes until then, and who still sleeps wakes, or goes on again."""
        due, nap, actor = self._alarms.pop(0)
        if actor.dead or not (actor.frozen if nap == 0 else actor.asleep is not None and actor.naps == nap):
            return
        self.skipped += max(0, due - self.clock)
        if nap == 0:
            actor.frozen = False
        else:
            actor.asleep, actor.late = None, True

    def _of(self, ready: list[Actor], willing: bool) -> Actor | None:
        me = self.current
        while self._script and ready:
            name, number = self._script[0]
            node = next((a for a in ready if a.daemon), None)
            if node is not None:  # at once: a latecomer's turn does not pass while it waits to be let in
                return node
            actor = next((a for a in ready if a.name == name), None)
            if number == "kill":
                self._script.pop(0)
                self.scripted_kill(name)
                ready[:] = self._ready()
                continue
            if number == "stop":
                self._script.pop(0)
                for each in self.actors:
                    if each.name == name:
                        self.freeze(each)
                ready[:] = self._ready()
                continue
            if actor is None or number == 0:
                self._script.pop(0)
                continue
            if isinstance(number, int):
                self._script[0] = (name, number - 1)
            return actor
        if not ready:  # the script has killed or stopped the last
            return self._choose(willing)
        changed = False
        while self._changes and self._changes[0] <= self.steps:
            self._changes.pop(0)
            changed = True
        if self._way == "walk":
            return self._random.choice(ready)
        if self._way == "priorities":
            if changed and me in ready:
                self._lowest -= 1.0
                me.priority = self._lowest
            return max(ready, key=lambda a: a.priority)
        if me in ready and not willing and not changed:
            return me
        others = [a for a in ready if a is not me]
        return self._random.choice(others or ready)

    def _plan_next_look(self) -> None:
        after = _NEVER
        if self._script:
            after = self.steps + 1
        elif self._way == "walk":
            after = self.steps + 1
            if self._gap > 1.0:
                after += int(self._random.expovariate(1.0 / (self._gap - 1.0)))
        elif self._changes:
            after = self._changes[0]
        if self._events:
            after = min(after, self._events[0][0])
        if self._alarms:
            after = min(after, self._alarms[0][0] - self.skipped)
        self._look_at = min(max(after, self.steps + 1), max(MOST_STEPS, self.steps + 1))

    def _who_waits(self) -> str:
        return ", ".join(
            f"{a.name} {'asleep' if a.asleep is not None else 'running'} after {a.steps} steps"
            for a in self.actors
            if not (a.dead or a.ended or a.daemon)
        )


def print_step(scheduler: Scheduler, what: str, address: int, value: Any) -> None:
    """A trace: prints who does what where."""
    frame: Any = sys._getframe(2)
    while frame is not None and "interleavings" in frame.f_code.co_filename:
        frame = frame.f_back
    where = f"{frame.f_code.co_name}:{frame.f_lineno}" if frame is not None else "?"
    said = "" if value is None else f" {value}"
    print(f"{scheduler.steps:6}  {scheduler.current!s:12} {where:34} {what} {address & 0xFFFFF:#x}{said}")
