"""Hundreds of kills among hosts from a seed: do the others go on, how long do they wait, what is lost, what is left?

    python benchmarks/chaos_between_hosts.py --seed 1 --kills 300

Each episode is a job on two or three hosts that are all this machine, with a node and workers of their own that were
forked from this process: no launcher, and no interpreter that starts. They add to tables of all kinds and to a
counter, read, make tables and meet in barriers, in one of the three consistencies. In a phase that the seed chooses
(starting, making tables, training, leaving) one thing is killed (SIGKILL):

- ``worker``: one worker;
- ``node``: the node of a host but the first, whose workers live on without it;
- ``host``: all processes of such a host;
- ``coordinator``: the first host's node, or all of its processes;
- ``stall``: no kill, the node of a host but the first stands still (SIGSTOP), for half the grace or for twice as long.

Where the job goes on without the lost (``on_lost="continue"``), half of the killed workers, nodes and hosts are started
again in their places (`replace`), and of half of these hosts the node is killed once more while it comes: after a
while, or by itself once a part of the values has reached it. A worker that comes again does its laps again; in a
synchronous job that cannot be where laps end in barriers, so that the fourth kind of job, ``rounds``, is one of rounds
alone, which end by a value. Then it is checked:

- nobody hangs: everyone has ended in time, those who go on with all their work done, the others with the right error;
- all who are left read the same in the end, and, unless a host was lost, each add that returned is in it, once;
- of rows by key on two hosts each, the adds of all who were never lost are there, once;
- no process, socket, shared memory or file is left.

What a lost host's loss cost is counted: adds of the lost one's workers and of the others, missing or there twice (the
most in any one element). A wait is a survivor's longest call from the kill on. Beside it: what the first silence costs,
``grace`` seconds at most.

`chaos_hosts.py` does the same with launchers and checkpoints, for jobs that begin again.
"""

from __future__ import annotations

import argparse
import contextlib
import mmap
import os
import platform
import random
import select
import signal
import socket
import sys
import tempfile
import time
import traceback
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

import multiverso as mv
from chaos import Trouble, fork, left_behind, percentiles, reap, started, until
from multiverso.compiling.on_demand import Group, ensure_all
from multiverso.errors import NodeLostError, StartupError, WorkerLostError
from multiverso.hosts.roster import Roster
from multiverso.hosts.transport.credentials import new_credentials
from multiverso.runtime import Node, Session
from multiverso.runtime.several_hosts.other_hosts import other_hosts_of
from reporting import give_report

KINDS = ("worker", "node", "host", "coordinator", "stall")
MODES: dict[str, dict[str, Any]] = {
    "async": {},
    "sync": {"sync": True},
    "bounded": {"staleness": 1},
    "rounds": {"sync": True},
}
WORKERS = 6
KEYS = np.arange(200) * 7919 - 12345  # of a table whose rows live on one host each, or on two
SIZE, ROWS, COLUMNS = 140_000, 50, 8  # two chunks: homes on different hosts
BALLAST = 1_000_000  # int64: what a host that comes again gets, where it is killed while it does
BITS = 10  # of a worker's own count of adds, in each element
GRACE = 3.0
DEADLINE = 50.0  # of any one wait; less than what an episode may take, so that it says who waits for whom
END_SECONDS = 15.0

# what each worker tells, in memory that it shares with this process (int64 words)
PHASE, STATE, BEGUN, RETURNED, SEEN, ROW_BEGUN, ROW_RETURNED, ROW_SEEN, LAPS, LONGEST, SINCE, SUM, LIFE = range(13)
KEY_BEGUN, KEY_RETURNED, KEY_SEEN = range(13, 16)
WORDS = 16
# words of the job
STOP, STOP_AT, MISSING, TWICE, KEY_MISSING, KEY_TWICE = range(6)
STARTING, MAKING, TRAINING, LEAVING = range(4)
PHASES = ("starting", "making tables", "training", "leaving")
NOTHING, DONE, TOLD, FAILED = range(4)
STATES = ("nothing", "done", "told", "failed")


class Shared:
    """Memory of an episode that outlives its processes."""

    def __init__(self) -> None:
        self._map = mmap.mmap(-1, 8 * WORDS * (1 + WORKERS))
        words = np.frombuffer(self._map, np.int64).reshape(1 + WORKERS, WORDS)
        self.job, self.worker = words[0], words[1:]


def serve(
    roster: Roster, listener: socket.socket | None, on_lost: str, replaces: bool, most: int, say: int, orders: int
) -> None:
    """A host's node. It reads one byte for each order: a worker's number whose process is dead, or 255 for the end.

    Where ``most`` is above 0 it is killed once so many bytes of tables have come.
    """
    other_hosts = other_hosts_of(roster, None if listener is None else listener.detach())
    with Node(roster.workers_num, on_lost=on_lost, other_hosts=other_hosts, replaces=replaces) as node:
        os.write(say, node.address.encode())
        while most:
            if sum(link["bytes_received"] for link in node.status()["links"]) >= most:
                os.kill(os.getpid(), signal.SIGKILL)
            if select.select([orders], [], [], 0.0002)[0]:
                break
        while (order := os.read(orders, 1)) and order[0] != 255:
            node.absent(order[0])


def work(
    shared: Shared, address: str, me: int, mode: str, on_lost: str, ballast: int, keyed: int, seed: int, notes: str
) -> None:
    """A worker's life: laps of the same operations in all workers, with a barrier at the end of each."""
    words = shared.worker[me]
    try:
        options: dict[str, Any] = {"timeout_seconds": DEADLINE, "start_timeout_seconds": DEADLINE, "on_lost": on_lost}
        with Session(address, me, **options, **MODES[mode]) as session:
            words[PHASE] = MAKING
            words[LIFE] = session.incarnation
            if ballast:
                mv.ArrayTableHandler(ballast, dtype="int64", session=session)
            if mode == "rounds":
                go_through_rounds(shared, session)
            else:
                train(shared, session, mode, keyed, random.Random(seed))
        words[STATE] = DONE
    except (WorkerLostError, NodeLostError):
        words[STATE] = TOLD
    except BaseException as error:
        told = isinstance(error, StartupError) and words[PHASE] == STARTING
        words[STATE] = TOLD if told else FAILED
        with open(notes, "a") as file:
            file.write(f"worker {me} of {PHASES[int(words[PHASE])]}:\n{traceback.format_exc()}\n")


def train(shared: Shared, session: Session, mode: str, keyed: int, laps: random.Random) -> None:
    me = session.worker_id
    words = shared.worker[me]
    table = mv.ArrayTableHandler(SIZE, dtype="int64", session=session)
    matrix = mv.MatrixTableHandler(ROWS, COLUMNS, dtype="int64", session=session)
    counter = mv.Counter("calls", session=session)
    spread = mv.KeyedTable(1, dtype="int64", cache_rows=60, copies=keyed, session=session) if keyed else None
    unit = np.full(SIZE, 1 << (BITS * me), np.int64)
    row_unit = np.full((ROWS, COLUMNS), 1 << (BITS * me), np.int64)
    out = np.zeros(SIZE, np.int64)

    def add() -> None:
        words[BEGUN] += 1
        table.add(unit)
        words[RETURNED] += 1

    def get() -> None:
        table.get(out=out)
        words[SEEN] = words[RETURNED]

    def add_rows() -> None:
        words[ROW_BEGUN] += 1
        matrix.add(row_unit, row_ids=range(ROWS))
        words[ROW_RETURNED] += 1

    def get_rows() -> None:
        matrix.get([0, ROWS - 1, 7])
        words[ROW_SEEN] = words[ROW_RETURNED]

    # (raised where all workers of a host were killed before any had made the table there)
    def add_keys() -> None:
        if spread is not None:
            words[KEY_BEGUN] += 1
            with contextlib.suppress(WorkerLostError):
                for keys in np.split(KEYS, 4):
                    spread.add(np.full((keys.size, 1), 1 << (BITS * me)), keys)
                words[KEY_RETURNED] += 1

    def get_keys() -> None:
        if spread is not None:
            with contextlib.suppress(WorkerLostError):
                spread.get(KEYS[:50])

    def count() -> None:
        counter.fetch_add()

    def create() -> None:
        try:
            mv.ArrayTableHandler(10, me, initial="sum", dtype="int64", session=session)
        except WorkerLostError:  # one that had begun to write its value: those who go on are told to call again
            mv.ArrayTableHandler(10, me, initial="sum", dtype="int64", session=session)

    def timed(call: Callable[[], None]) -> None:
        words[SINCE] = time.monotonic_ns()
        try:
            call()
        finally:
            words[LONGEST] = max(words[LONGEST], time.monotonic_ns() - words[SINCE])
            words[SINCE] = 0

    lap = 0
    while True:
        for _ in range(laps.randrange(1, 4)):
            timed(laps.choice([add, add, get, add_rows, get_rows, count, add_keys, get_keys]))
        if laps.random() < 0.2:
            timed(create)
        lap += 1
        if shared.job[STOP] and not shared.job[STOP_AT]:
            shared.job[STOP_AT] = lap + 1  # seen by all behind the next barrier
        timed(session.barrier)
        words[LAPS] = lap
        words[PHASE] = max(words[PHASE], TRAINING)
        if 0 < shared.job[STOP_AT] <= lap:
            break
        time.sleep(0.002)
    words[PHASE] = LEAVING
    if mode == "sync":
        timed(get)
        timed(get_rows)
    timed(session.barrier)
    values, rows = table.snapshot(), matrix.snapshot()
    words[SUM] = zlib.crc32(values.data) << 31 ^ zlib.crc32(rows.data)
    live = session.live_workers()
    if me == min(live):
        check(shared, values, (BEGUN, RETURNED, SEEN), mode, live)
        check(shared, rows, (ROW_BEGUN, ROW_RETURNED, ROW_SEEN), mode, live)
        if spread is not None:
            with contextlib.suppress(WorkerLostError):
                found = spread.get(KEYS)
                if keyed == 1:
                    check(shared, found, (KEY_BEGUN, KEY_RETURNED, KEY_SEEN), mode, live)
                else:
                    check_keys(shared, found, live)
    timed(session.barrier)


def go_through_rounds(shared: Shared, session: Session) -> None:
    """A worker's life in rounds alone: who comes again is in the next one, and all end after the same."""
    me = session.worker_id
    words = shared.worker[me]
    table = mv.ArrayTableHandler(SIZE, dtype="int64", session=session)
    ends = mv.ArrayTableHandler(1, updater="momentum", session=session)  # state, which comes from another host
    unit = np.full(SIZE, 1 << (BITS * me), np.int64)
    out = np.zeros(SIZE, np.int64)
    words[RETURNED] = words[SEEN]  # what one that died had added and not read is in no round
    while True:
        words[SINCE] = time.monotonic_ns()
        words[BEGUN] += 1
        table.add(unit)
        words[RETURNED] += 1
        table.get(out=out)
        words[SEEN] = words[RETURNED]
        ends.add([float(shared.job[STOP])])
        ended = ends.get()[0] != 0
        words[LONGEST] = max(words[LONGEST], time.monotonic_ns() - words[SINCE])
        words[SINCE] = 0
        words[LAPS] = table.version
        words[PHASE] = max(words[PHASE], TRAINING)
        if ended:
            break
        time.sleep(0.002)
    words[PHASE] = LEAVING
    session.barrier()
    values = table.snapshot()
    words[SUM] = zlib.crc32(values.tobytes()) << 31 ^ zlib.crc32(ends.snapshot().tobytes())
    live = session.live_workers()
    if me == min(live):
        check(shared, values, (BEGUN, RETURNED, SEEN), "sync", live)
    session.barrier()


def check(shared: Shared, values: Any, of: tuple[int, int, int], mode: str, live: list[int]) -> None:
    """Notes by how many adds an element is short of what returned, or beyond what was begun."""
    begun, returned, seen = of
    for worker in range(WORKERS):
        words = shared.worker[worker]
        counts = values >> (BITS * worker) & ((1 << BITS) - 1)
        least = words[seen] if mode == "sync" and worker not in live else words[returned]
        shared.job[MISSING] += max(0, int(least - counts.min()))
        shared.job[TWICE] += max(0, int(counts.max() - words[begun]))


def check_keys(shared: Shared, values: Any, live: list[int]) -> None:
    """As `check`, of rows by key: with two copies nothing is missing of a worker that was never lost, or twice."""
    for worker in range(WORKERS):
        words = shared.worker[worker]
        counts = values >> (BITS * worker) & ((1 << BITS) - 1)
        if worker in live and not words[LIFE]:
            shared.job[KEY_MISSING] += max(0, int(words[KEY_RETURNED] - counts.min()))
        shared.job[KEY_TWICE] += max(0, int(counts.max() - words[KEY_BEGUN]))


class Episode:
    """A job, its kill, and what became of it. Owner: the main process.

    Args:
        seed: chooses everything.
        kind: what is killed, where that is asked for.
        notes: a file for what its workers raise.
    """

    def __init__(self, seed: int, kind: str | None, notes: str) -> None:
        choose = self.choose = random.Random(seed)
        self.kind = kind or choose.choice(KINDS)
        self.mode = choose.choice(sorted(MODES))
        self.on_lost = choose.choice(("continue", "continue", "stop"))
        self.phase = choose.choice((STARTING, MAKING, TRAINING, TRAINING, LEAVING))
        counts = choose.choice(((1, 1), (2, 1), (1, 2), (2, 2), (1, 1, 1), (2, 2, 2), (1, 2, 1)))
        self.again = self.on_lost == "continue" and self.kind != "coordinator" and choose.random() < 0.5
        self.again = self.again and self.kind != "stall" and self.mode != "sync"
        if self.mode == "rounds":  # after the last one nobody takes part in what another one begins
            self.again = self.again and self.phase != LEAVING
        self.long = self.kind == "stall" and choose.random() < 0.5
        self.twice = self.again and self.kind != "worker" and choose.random() < 0.5
        self.partly = choose.randrange(1, 8 * BALLAST) if self.twice and choose.random() < 0.5 else 0
        self.seed, self.notes = choose.randrange(2**32), notes
        self.shared = Shared()
        self.killed: set[int] = set()  # workers
        self.alone: set[int] = set()  # workers whose node was killed, and they were not
        self.pids: dict[int, int] = {}
        self.nodes: dict[int, tuple[int, int, str]] = {}  # by host: process, orders, address
        names = tuple(f"host-{host}" for host in range(len(counts)))
        credentials = new_credentials(encrypted=False).to_text()
        self.roster = Roster(0, names, counts, ("", 0), credentials, rehearsal=True, grace=GRACE)

    @property
    def what(self) -> str:
        again = ", and again" if self.again else ""
        again += (
            f", after {self.partly} bytes"
            if self.partly
            else ", twice"
            if self.twice
            else ", for long"
            if self.long
            else ""
        )
        return f"{self.kind} while {PHASES[self.phase]}, {self.mode}, {self.on_lost}, {self.roster.workers}{again}"

    def begin(self) -> None:
        """Starts the nodes and the workers."""
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.roster = replace(self.roster, coordinator=listener.getsockname())
            self.nodes[0] = self.node(0, listener)
        for host in range(1, self.roster.hosts):
            self.nodes[host] = self.node(host)
        for worker in range(self.roster.workers_num):
            self.worker(worker)

    def node(
        self, host: int, listener: socket.socket | None = None, times_replaced: int = 0, most: int = 0
    ) -> tuple[int, int, str]:
        said, say = os.pipe()
        read, orders = os.pipe()
        roster = replace(self.roster.on(host), times_replaced=times_replaced)
        replaces = self.on_lost == "continue"
        pid = fork(lambda: serve(roster, listener, self.on_lost, replaces, most, say, read))
        started.append(pid)
        os.close(say)
        os.close(read)
        address = os.read(said, 200).decode() if select.select([said], [], [], DEADLINE)[0] else ""
        os.close(said)
        if not address:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            os.close(orders)
            raise Trouble(f"the node of host {host} does not start")
        return pid, orders, address

    def worker(self, worker: int) -> None:
        self.shared.worker[worker][[PHASE, STATE, LAPS, LONGEST, SINCE]] = 0
        address = self.nodes[self.roster.host_of(worker)][2]
        keyed = (1 + (self.kind != "worker")) * (self.mode == "async")  # copies: a lost host takes rows with it
        job = (self.mode, self.on_lost, BALLAST if self.partly else 0, keyed, self.seed, self.notes)
        arguments = (self.shared, address, worker, *job)
        self.pids[worker] = fork(lambda: work(*arguments))

    def run(self) -> dict[str, Any]:
        """Kills, waits and checks; returns what came of it.

        Raises:
            Trouble: something that must not happen.
        """
        self.begin()
        host = 0 if self.kind == "coordinator" else self.choose.randrange(1, self.roster.hosts)
        victim = self.choose.choice(list(self.roster.workers_of(host)))
        if self.kind == "worker":
            victim = self.choose.randrange(self.roster.workers_num)
        if self.phase == LEAVING:
            until(lambda: self.all_are(TRAINING), "all train")
            self.shared.job[STOP] = 1
        until(lambda: self.shared.worker[victim][PHASE] >= self.phase, f"{victim} is {PHASES[self.phase]}")
        time.sleep(self.choose.random() * (0.2 if self.phase == TRAINING else 0.02))
        self.shared.worker[:, LONGEST] = 0
        killed_at = time.monotonic()
        if self.kind == "stall":
            self.stall(host)
        else:
            self.kill(host, victim)
        if self.again:
            self.start_again(host, victim, 1, self.partly)
        if self.partly:
            until(lambda: self.has_died(host) or self.has_come(host), "a part of the values has come")
        elif self.twice:
            time.sleep(self.choose.random() * 0.3)
        if self.twice:
            self.kill(host, victim)
            self.start_again(host, victim, 2)
        if self.goes_on:
            laps = self.shared.worker[:, LAPS].copy()
            until(
                lambda: all(self.shared.worker[i][LAPS] >= laps[i] + 2 or self.state(i) for i in self.survivors),
                "the survivors go on",
            )
            if self.again and self.phase < LEAVING:
                until(lambda: all(self.has_caught_up(i) for i in self.pids), "who came again catches up")
        self.shared.job[STOP] = 1
        until(lambda: all(self.state(worker) for worker in self.pids), "all end")
        seconds = time.monotonic() - killed_at
        self.judge()
        return {
            "kind": self.kind,
            "what": self.what,
            "seconds": seconds,
            "wait": max((int(self.shared.worker[i][LONGEST]) / 1e9 for i in self.survivors), default=0.0),
            "missing": int(self.shared.job[MISSING]),
            "twice": int(self.shared.job[TWICE]),
        }

    @property
    def goes_on(self) -> bool:
        if self.kind == "stall" and not self.long:
            return True
        return self.on_lost == "continue" and self.kind != "coordinator"

    @property
    def survivors(self) -> list[int]:
        return [worker for worker in self.pids if worker not in self.killed | self.alone]

    def all_are(self, phase: int) -> bool:
        return all(self.shared.worker[worker][PHASE] >= phase for worker in self.pids)

    def has_caught_up(self, worker: int) -> bool:
        laps = [int(self.shared.worker[i][LAPS]) for i in self.pids]
        return int(self.shared.worker[worker][LAPS]) >= max(laps) - 1 or bool(self.state(worker))

    def has_died(self, host: int) -> bool:
        return bool(os.waitid(os.P_PID, self.nodes[host][0], os.WEXITED | os.WNOHANG | os.WNOWAIT))

    def has_come(self, host: int) -> bool:
        """Whether its workers have all that they were to get, which may be less than was to kill it, or were told.

        A busy machine's host may hear nothing of the first one for the whole grace, and gives up.
        """
        there = self.roster.workers_of(host)
        return all(self.shared.worker[i][PHASE] >= TRAINING or self.state(i) for i in there)

    def state(self, worker: int) -> int:
        """How a worker has ended; 0 while it has not."""
        state = int(self.shared.worker[worker][STATE])
        if not state and os.waitid(os.P_PID, self.pids[worker], os.WEXITED | os.WNOHANG | os.WNOWAIT):
            return int(self.shared.worker[worker][STATE]) or FAILED
        return state

    def kill(self, host: int, victim: int) -> None:
        there = set(self.roster.workers_of(host))
        whole = self.kind == "host" or (self.kind == "coordinator" and self.choose.random() < 0.5)
        workers = {victim} if self.kind == "worker" else there if whole else set()
        if self.kind != "worker":
            pid, orders, _ = self.nodes.pop(host)
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            os.close(orders)
            self.alone = there - workers
        for worker in workers:
            pid = self.pids.pop(worker)
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        self.killed = workers
        if self.kind == "worker" and not self.again:
            with contextlib.suppress(OSError):
                os.write(self.nodes[self.roster.host_of(victim)][1], bytes([victim]))

    def stall(self, host: int) -> None:
        """A node stands still: for so long that its host is lost, or not."""
        pid = self.nodes[host][0]
        os.kill(pid, signal.SIGSTOP)
        time.sleep(GRACE * (2.0 if self.long else 0.5))
        os.kill(pid, signal.SIGCONT)
        if self.long:
            self.alone = set(self.roster.workers_of(host))

    def start_again(self, host: int, victim: int, times_replaced: int, most: int = 0) -> None:
        if self.kind == "worker":
            self.worker(victim)
            return
        until(lambda: all(self.state(worker) for worker in self.alone), "workers without a node end")
        for worker in self.alone:
            os.waitpid(self.pids.pop(worker), 0)
        self.nodes[host] = self.node(host, times_replaced=times_replaced, most=most)
        for worker in self.roster.workers_of(host):
            self.worker(worker)

    def judge(self) -> None:
        late = self.phase == LEAVING
        states = {worker: self.state(worker) for worker in self.pids}
        for worker, state in states.items():
            came_again = self.again and worker in self.killed | self.alone
            if came_again:
                allowed = {DONE, TOLD} if late else {DONE}
            elif worker in self.alone or not self.goes_on:
                allowed = {DONE, TOLD} if late else {TOLD}
            else:
                allowed = {DONE}
            if state not in allowed:
                raise Trouble(f"worker {worker} has {STATES[state]}; {states}")
        sums = {int(self.shared.worker[worker][SUM]) for worker in self.survivors if states[worker] == DONE}
        adds_late = self.again and late  # who comes again when the others have read adds after that
        if self.goes_on and len(sums) > 1 and not adds_late:
            raise Trouble("not all read the same in the end")
        if self.kind == "worker" and (self.shared.job[MISSING] or self.shared.job[TWICE]):
            raise Trouble(f"{self.shared.job[MISSING]} adds are missing, {self.shared.job[TWICE]} are there twice")
        if self.shared.job[KEY_MISSING] or self.shared.job[KEY_TWICE]:
            raise Trouble(f"of rows by key: {self.shared.job[KEY_MISSING]} missing, {self.shared.job[KEY_TWICE]} twice")

    def who_waits(self) -> str:
        """In words, how far each worker is."""
        lines = []
        for worker in self.pids:
            words = [int(word) for word in self.shared.worker[worker]]
            seconds = (time.monotonic_ns() - words[SINCE]) / 1e9 if words[SINCE] else 0.0
            line = f"worker {worker}: {PHASES[words[PHASE]]}, lap {words[LAPS]}, life {words[LIFE]}"
            lines.append(f"{line}, {STATES[words[STATE]]}, in a call for {seconds:.1f} s")
        return "; ".join(lines)

    def end(self) -> int:
        """Ends what should have ended by itself; returns how many processes had not."""
        for _, orders, _ in self.nodes.values():
            with contextlib.suppress(OSError):
                os.write(orders, b"\xff")
            os.close(orders)
        return reap([*self.pids.values(), *(pid for pid, _, _ in self.nodes.values())], END_SECONDS)


@contextlib.contextmanager
def logs_to(path: Path) -> Iterator[Callable[[str], Any]]:
    """What this process and its children write to standard error goes to a file; gives what still writes there."""
    with open(path, "ab") as file:
        stderr = os.dup(2)
        os.dup2(file.fileno(), 2)
    try:
        yield lambda text: os.write(stderr, text.encode())
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)


def summary(episodes: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns what episodes have in common, by kind."""
    found = {}
    for kind in KINDS:
        own = [each for each in episodes if each["kind"] == kind]
        if own:
            found[kind] = {
                "kills": len(own),
                "waits": percentiles([each["wait"] for each in own if each["wait"]]),
                "seconds": percentiles([each["seconds"] for each in own]),
                "adds_missing_most": max(each["missing"] for each in own),
                "adds_twice_most": max(each["twice"] for each in own),
                "episodes_with_other_sums": sum(each["missing"] + each["twice"] > 0 for each in own),
            }
    return found


def compile_kernels() -> None:
    """Compiles what the jobs need and is not on disk yet: their deadlines are for what they do."""
    between = ("between_hosts.agreeing", "between_hosts.rounds", "between_hosts.node")
    groups: list[Group] = [(module, None) for module in ("waits", "locking", "dense", *between)]
    groups += [(module, "int64") for module in ("dense", "rows", "rounds.calls", *between)]
    groups += [(module, "float32") for module in ("rounds.calls", *between[1:])]
    ensure_all([(f"multiverso.kernels.{module}", dtype) for module, dtype in groups])


def main() -> NoReturn:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1, help="of the first episode; the next one has the next")
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--only", choices=KINDS)
    parser.add_argument("--minutes", type=float, default=60, help="stop after so long, with fewer kills")
    parser.add_argument("--json", type=Path, help="where to write the result")
    options = parser.parse_args()
    compile_kernels()
    episodes: list[dict[str, Any]] = []
    trouble: list[str] = []
    processes = 0
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder, tempfile.TemporaryDirectory() as temporary:
        os.environ["TMPDIR"] = tempfile.tempdir = temporary  # not for other jobs of this machine
        notes, logs = Path(folder, "notes"), Path(folder, "logs")
        with logs_to(logs) as say:
            for seed in range(options.seed, options.seed + options.kills):
                if time.monotonic() > began + 60 * options.minutes or len(trouble) >= 20:
                    break
                notes.write_text("")
                os.truncate(logs, 0)
                episode = Episode(seed, options.only, str(notes))
                line = f"seed {seed}: {episode.what}"
                try:
                    episodes.append({"seed": seed, **episode.run()})
                    line += f": {episodes[-1]['seconds']:.2f} s"
                except Trouble as error:
                    said = f"{notes.read_text()}\n{logs.read_text()}"
                    trouble.append(f"{line}: {error}\n{episode.who_waits()}\n{said}")
                    line = f"TROUBLE {trouble[-1]}"
                left = episode.end()
                processes += left
                say(f"{line}{f', {left} processes were left' if left else ''}\n")
        left_over = left_behind()
    result = {
        "seed": options.seed,
        "kills": len(episodes) + len(trouble),
        "seconds": time.monotonic() - began,
        "grace_seconds": GRACE,
        "kinds": summary(episodes),
        "left_behind": {"processes": processes, **left_over},
        "trouble": trouble,
        "machine": {"cores": os.cpu_count(), "platform": platform.platform(), "load": os.getloadavg()},
    }
    give_report(result, options.json)
    sys.exit(bool(trouble or any(result["left_behind"].values())))


if __name__ == "__main__":
    main()
