"""What a job of many hosts costs each of them, with a table whose rows are spread over all: JSON.

    python -m simulated.scale [HOSTS...]

Real are the homes of keys, `SpreadTable`, `Home`, their frames and memory, and `Coordinator`; time passes as the
program says. A few hosts read and add to 1,000 draws of ten million rows by Zipf's law ten times a second, with copies
of 1 %; the other hosts only serve them, as they would each other: what is counted of one that asks holds for all.
Processor time is this machine's, for Python and compiled loops without sockets.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from collections import Counter, deque
from typing import Any

import numpy as np

from multiverso.compiling.on_demand import compile_update
from multiverso.hosts.control import messages
from multiverso.hosts.control.coordinator import Coordinator
from multiverso.hosts.peer.frames import HEADER_BYTES
from multiverso.hosts.roster import Roster
from multiverso.hosts.spread.copies import Copies
from multiverso.hosts.spread.frames import Frame
from multiverso.hosts.spread.home import Home
from multiverso.hosts.spread.placement import groups_of
from multiverso.hosts.spread.table import SpreadTable
from multiverso.layout import desk
from multiverso.layout import words as at
from multiverso.spec.states import State
from multiverso.updaters.cached import copy_loops
from simulated.spread import ADD, NODE, SPEC, TABLE, WORKER, table_memory

ROWS, COLUMNS, BATCH, EXPONENT, DTYPE = 10_000_000, 64, 1000, 1.05, "float32"
ASKING, WARM_STEPS, STEPS, STEP_SECONDS, LOOK_SECONDS = 4, 15, 10, 0.1, 0.01
LINK_BYTES, LATENCY = 125e6, 1e-4  # a second; one way


class Rows:
    """The homes of a table, and the hosts that ask them."""

    def __init__(self, hosts: int) -> None:
        self.hosts, self.now = hosts, 1.0
        self.counts: Counter[str] = Counter()
        self.asked: Counter[int] = Counter()  # questions, by home
        self.spent = {"asking": 0.0, "serving": 0.0}
        self._under_way: deque[tuple[int, int, bytes]] = deque()
        make = functools.partial(table_memory, columns=COLUMNS, dtype=DTYPE)
        loops = copy_loops("add")
        take, land = (compile_update(loop, DTYPE) for loop in (loops.take, loops.land))
        update, self._add = compile_update(ADD.apply, DTYPE), compile_update(loops.add, DTYPE)
        each = 4096 + 200_000 // hosts
        homes = [make(rows=each) for _ in range(hosts)]
        self._homes = [Home(TABLE, SPEC, NODE.rows(memory), update, 1, None) for memory in homes]
        self._tables, self._copies = [], []
        for host in range(ASKING):
            copied = make(State("unsent"), rows=150_000)
            copies = Copies(NODE.rows(copied), take, land, ROWS // 100, 1.0, lambda: self.now)
            send = functools.partial(self._send, host)
            home = self._homes[host]
            table = SpreadTable(
                TABLE, SPEC, host, hosts, home.own, copies, update, 1, send, lambda homes: None, now=lambda: self.now
            )
            self._tables.append(table)
            self._copies.append(WORKER.rows(copied))
        random = np.random.default_rng(7)
        ends = np.cumsum(np.arange(1, ROWS + 1, dtype=np.float64) ** -EXPONENT)
        drawn = np.searchsorted(ends, random.random((ASKING, WARM_STEPS + STEPS, BATCH)) * ends[-1])
        self._batches = [[np.unique(keys) * 2654435761 for keys in batches] for batches in drawn]

    def _send(self, host: int, home: int, *parts: Any) -> None:
        message = b"".join(parts)
        self._under_way.append((host, home, message))
        self.asked[home] += 1
        self.counts["questions"] += 1
        self.counts["bytes out"] += len(message) + HEADER_BYTES

    def _deliver(self) -> None:
        """Everything arrives and is answered."""
        while self._under_way:
            host, home, message = self._under_way.popleft()
            began = time.thread_time()
            answer = self._homes[home].serve(host, Frame.of(memoryview(bytearray(message)), self._homes[home].own.size))
            assert answer is not None
            reply = b"".join(answer.parts())
            served = time.thread_time()
            table = self._tables[host]
            table.answered(home, Frame.of(memoryview(bytearray(reply)), table.own.size))
            self.spent["serving"] += served - began
            self.spent["asking"] += time.thread_time() - served
            self.counts["bytes in"] += len(reply) + HEADER_BYTES

    def _timed(self, action: Any, *arguments: Any, **options: Any) -> None:
        began = time.thread_time()
        action(*arguments, **options)
        self.spent["asking"] += time.thread_time() - began
        self._deliver()

    def touch(self, number: int) -> None:
        """Each host that asks reads a batch and adds to it."""
        for host, table in enumerate(self._tables):
            keys = self._batches[host][number]
            keys = keys[table.places.homes[groups_of(keys)] != host]
            places = self._copies[host].find(keys)
            missing = keys[places < 0]
            self._copies[host].release()
            self.counts["rows"] += keys.size
            self.counts["misses"] += missing.size
            if missing.size:
                self._timed(table.ask, desk.FETCH, missing, lambda code, result, answer: None)
            delta = np.full((keys.size, COLUMNS), 1e-3, np.float32)
            self._copies[host].apply(self._add, self._copies[host].find(keys), delta)

    def step(self, number: int) -> None:
        """The same, and then the nodes look a hundred times a second."""
        self.touch(number)
        for _ in range(round(STEP_SECONDS / LOOK_SECONDS)):
            self.now += LOOK_SECONDS
            for table in self._tables:
                self._timed(table.look, False)

    def settle(self) -> None:
        """A barrier's part: all that was added goes home, and all copies go."""
        for table in self._tables:
            while table.look(True, True) or not table.leave_all():
                self._timed(table.look, True, True)

    def begin(self) -> None:
        """Counts from here on."""
        self.counts.clear()
        self.asked.clear()
        self.spent = dict.fromkeys(self.spent, 0.0)


def rows(hosts: int) -> dict[str, float]:
    """What the rows cost a host: all that it asks, and as much that it serves."""
    job = Rows(hosts)
    for number in range(WARM_STEPS):
        job.step(number)
    job.begin()
    for number in range(WARM_STEPS, WARM_STEPS + STEPS):
        job.step(number)
    steps = ASKING * STEPS
    counts, asked = job.counts, list(job.asked.values())
    found = {
        "rows of a step": counts["rows"] / steps,
        "misses": counts["misses"] / counts["rows"],
        "messages a step": 2 * counts["questions"] / steps,
        "kB a step, each way": (counts["bytes out"] + counts["bytes in"]) / steps / 1e3,
        "processor ms a step": sum(job.spent.values()) / steps * 1e3,
        "busiest home, of the mean": max(asked) / (sum(asked) / min(hosts - 1, len(asked))),
    }
    job.touch(0)
    job.begin()
    job.settle()
    seconds = sum(job.spent.values()) / ASKING
    wire = (job.counts["bytes out"] + job.counts["bytes in"]) / ASKING / LINK_BYTES
    return found | {
        "messages to settle": 2 * job.counts["questions"] / ASKING,
        "ms to settle": (max(seconds, wire) + 4 * LATENCY) * 1e3,
    }


def control(hosts: int) -> dict[str, float]:
    """The coordinator's messages to begin a job, for a barrier, for news of all workers, and at the end."""
    coordinator = Coordinator(Roster(0, tuple(f"host-{i}" for i in range(hosts)), (1,) * hosts, ("10.0.0.1", 29600)))
    found: dict[str, float] = {}

    def count(what: str, *reports: Any) -> None:
        number = size = 0
        began = time.thread_time()
        for host in range(hosts):
            for report in reports:
                orders = coordinator.receive(host, report(host))
                number += len(orders) + 1
                size += len(messages.encoded(report(host))) + sum(len(messages.encoded(order)) for _, order in orders)
        orders = coordinator.tell_news()
        number += len(orders)
        size += sum(len(messages.encoded(order)) for _, order in orders)
        found[f"messages of a host, {what}"] = number / hosts
        found[f"kB of a host, {what}"] = size / hosts / 1e3
        found[f"coordinator's ms, {what}"] = (time.thread_time() - began) * 1e3

    def line(host: int, barrier: int = 0) -> messages.Workers:
        return messages.Workers([messages.Line(host, 1000 + host, at.ALIVE, at.ACTIVE, barrier)])

    options = {"consistency": {"mode": "async"}, "on_lost": "stop"}
    count(
        "to begin",
        lambda i: messages.Hello((f"10.0.{i // 256}.{i % 256}", 40000)),
        lambda _: messages.Options(options),
        line,
    )
    count("a barrier", lambda i: line(i, 1), lambda _: messages.Settled(1))
    count("at the end", lambda _: messages.Gone())
    assert coordinator.over
    return found


if __name__ == "__main__":
    for number in [int(word) for word in sys.argv[1:]] or [16, 64, 256, 1000]:
        print(json.dumps({"hosts": number, "connections": number - 1, **rows(number), **control(number)}), flush=True)
