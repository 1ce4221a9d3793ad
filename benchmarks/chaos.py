"""Thousands of kills from a seed: how long do the survivors wait, is an add lost, is anything left behind?

    python benchmarks/chaos.py --seed 1 --kills 2000

Each episode is a job with real processes: a node and workers that add, read, exchange, meet in barriers and make
tables, in one of the three consistencies. Alarms interrupt calls by an exception, and these are called again. At
random moments workers are killed (SIGKILL), or the node is, or, now
and then, a launcher; in an elastic job others come in their places. Then it is checked, exactly:

- every add that returned in any worker is in the table, element by element (an add in which a worker died may be
  there in part). In synchronous mode: every add whose round a read has ended;
- survivors go on (on_lost="continue"), with the same bits after each synchronous round, or all raise the right
  error (on_lost="stop", a killed node);
- no process, socket, shared memory or file is left.

A wait is the longest single call of a survivor from a kill until all survivors have passed two more barriers, or
until the error was raised. ``control`` is the same without a kill: what this machine's own load does.
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
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import numpy as np

import multiverso as mv
from multiverso.errors import NodeLostError, WorkerLostError
from multiverso.kernels import dense, rows
from multiverso.kernels.rounds import calls as rounds
from multiverso.runtime import Node, Session
from reporting import give_report

WORKERS = 4
SIZE, ROWS, COLUMNS = 40_000, 200, 30
BITS = 15  # of a worker's own count of adds, in each element
DEADLINE = 60.0
LAUNCHER_EVERY = 200
MODES: dict[str, dict[str, Any]] = {"async": {}, "sync": {"sync": True}, "bounded": {"staleness": 1}}
INTERRUPTIONS = 0.1  # of the calls, if they take as long as the alarm
PACKAGE = str(Path(mv.__file__).parent)
ROUNDS = 4096  # sums of the last rounds that are compared

# what each worker tells, in memory that it shares with this process (int64 words)
BEGUN, RETURNED, SEEN, ROW_BEGUN, ROW_RETURNED, ROW_SEEN, LONGEST, LAPS, STATE, RAISED_AT, WRONG = range(11)
INTERRUPTED = 11
WORDS = 16 + ROUNDS
STOP, STOP_AT = 0, 1  # words of the job
RUNNING, DONE, TOLD, FAILED = 1, 2, 3, 4


class Interruption(BaseException):
    """What an alarm's handler raises in the middle of a call, as Ctrl-C does."""


class Alarms:
    """Interrupts some calls at random moments, and makes them again until they return.

    Args:
        words: this worker's, in which it counts.
        seed: of the moments.
    """

    def __init__(self, words: Any, seed: int) -> None:
        self._words, self._chance = words, random.Random(seed)
        signal.signal(signal.SIGALRM, self._handle)

    def __call__(self, call: Callable[[], Any]) -> None:
        while True:
            seconds = self._chance.choice((1e-5, 1e-4, 1e-3)) * self._chance.random()
            try:
                if self._chance.random() < INTERRUPTIONS:
                    signal.setitimer(signal.ITIMER_REAL, seconds + 1e-6)
                call()
                return
            except Interruption:
                self._words[INTERRUPTED] += 1
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)

    @staticmethod
    def _handle(number: int, frame: FrameType | None) -> None:
        while frame is not None:
            if frame.f_code.co_filename.startswith(PACKAGE):
                raise Interruption
            frame = frame.f_back


class Shared:
    """Memory of an episode that outlives its workers."""

    def __init__(self) -> None:
        self._map = mmap.mmap(-1, 8 * (16 + WORKERS * WORDS))
        words = np.frombuffer(self._map, np.int64)
        self.job, self.worker = words[:16], words[16:].reshape(WORKERS, WORDS)


def fork(function: Callable[[], None]) -> int:
    """Runs a function in a forked process; nothing of this one goes on in it."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        function()
        code = 0
    except BaseException as error:
        if os.environ.get("CHAOS_VERBOSE"):
            print(f"pid {os.getpid()}: {error!r}", file=sys.stderr, flush=True)
    finally:
        os._exit(code)


def reap(pids: Iterable[int], seconds: float) -> int:
    """Waits for children to end, for so long in all; kills those that have not, and returns how many they were."""
    left, deadline = 0, time.monotonic() + seconds
    for pid in pids:
        while os.waitpid(pid, os.WNOHANG)[0] == 0:
            if time.monotonic() > deadline:
                left += 1
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                break
            time.sleep(0.001)
    return left


def serve(workers: int | None, on_lost: str, say: int, stop: int) -> None:
    with Node(workers, on_lost=on_lost) as node:
        os.write(say, node.address.encode())
        os.read(stop, 1)


def work(shared: Shared, address: str, me: int, mode: str, seed: int) -> None:
    """A worker's life: laps of the same operations in all workers, with a barrier at the end of each."""
    words = shared.worker[me]
    unit = np.full(SIZE, 1 << (BITS * me), np.int64)
    row_unit = np.full((ROWS, COLUMNS), 1 << (BITS * me), np.int64)
    sums: dict[int, int] = {}
    surely = Alarms(words, seed * WORKERS + me)
    with Session(address, me, timeout_seconds=DEADLINE, start_timeout_seconds=DEADLINE, **MODES[mode]) as s:
        table = mv.ArrayTableHandler(SIZE, dtype="int64", session=s)
        matrix = mv.MatrixTableHandler(ROWS, COLUMNS, dtype="int64", session=s)
        local, last, out = np.zeros(SIZE, np.int64), np.zeros(SIZE, np.int64), np.zeros(SIZE, np.int64)

        def seen(values: Any) -> None:
            words[SEEN] = words[RETURNED]
            if mode == "sync":
                words[16 + table.version % ROUNDS] = table.version << 32 | zlib.crc32(values)

        def add() -> None:
            words[BEGUN] += 1
            surely(lambda: table.add(unit))
            words[RETURNED] += 1

        def get() -> None:
            surely(lambda: table.get(out=out))
            seen(out)

        def exchange() -> None:
            last[:] = local
            local.__iadd__(unit)
            words[BEGUN] += 1
            surely(lambda: table.exchange(local, last))
            words[RETURNED] += 1
            seen(local)

        def add_rows() -> None:
            words[ROW_BEGUN] += 1
            surely(lambda: matrix.add(row_unit, row_ids=range(ROWS)))
            words[ROW_RETURNED] += 1

        def get_rows() -> None:
            surely(lambda: matrix.get([0, ROWS - 1, 7]))
            words[ROW_SEEN] = words[ROW_RETURNED]

        def create() -> None:
            mv.ArrayTableHandler(10, me, initial="sum", dtype="int64", session=s)

        def timed(call: Callable[[], None]) -> None:
            began = time.monotonic_ns()
            try:
                call()
            finally:
                words[LONGEST] = max(words[LONGEST], time.monotonic_ns() - began)

        words[STATE] = RUNNING
        laps = random.Random(seed)
        try:
            while True:
                for _ in range(laps.randrange(1, 8)):
                    timed(laps.choice([add, add, get, exchange, add_rows, get_rows]))
                if laps.random() < 0.05:
                    timed(create)
                lap = int(words[LAPS]) + 1
                if shared.job[STOP]:
                    shared.job[STOP_AT] = lap  # before the barrier, so that all see it behind
                timed(lambda: surely(s.barrier))
                words[LAPS] = lap
                if shared.job[STOP_AT] == lap:
                    break
            if mode == "sync":
                get()
                get_rows()
            s.barrier()
            if me == min(s.live_workers()):
                count(shared, table.snapshot(), BEGUN, RETURNED, SEEN, mode, s.live_workers(), me)
                count(shared, matrix.snapshot(), ROW_BEGUN, ROW_RETURNED, ROW_SEEN, mode, s.live_workers(), me)
            s.barrier()
            words[STATE] = DONE
        except (WorkerLostError, NodeLostError):
            words[RAISED_AT] = time.monotonic_ns()
            words[STATE] = TOLD
        except BaseException:
            words[STATE] = FAILED
            raise
    del sums


def come_and_go(shared: Shared, address: str, place: int, seed: int) -> None:
    """A worker of a job whose workers come and go: synchronous rounds of a table that it finds by its name."""
    words, chance = shared.worker[place], random.Random(seed)
    unit, out = np.full(SIZE, 1 << (BITS * place), np.int64), np.zeros(SIZE, np.int64)
    with Session(address, sync=True, timeout_seconds=DEADLINE) as s:
        table = mv.ArrayTableHandler(SIZE, dtype="int64", name="t", session=s)
        local, last = table.snapshot(), np.zeros(SIZE, np.int64)
        words[STATE] = RUNNING
        while not shared.job[STOP]:
            mine = chance.randrange(3)
            began = time.monotonic_ns()
            words[BEGUN] += mine
            if chance.random() < 0.5:
                for _ in range(mine):
                    table.add(unit)
                table.get(out=out)
            else:
                last[:] = local
                local += mine * unit
                table.exchange(local, last)
                out[:] = local
            words[SEEN] += mine
            words[LONGEST] = max(words[LONGEST], time.monotonic_ns() - began)
            words[16 + table.version % ROUNDS] = table.version << 32 | zlib.crc32(out.data)
            words[WRONG] += int((out != out[0]).sum())
            words[LAPS] += 1
    words[STATE] = DONE


def count_all(shared: Shared, address: str) -> None:
    """Reads what the workers that came and went have left."""
    with Session(address, sync=True, timeout_seconds=DEADLINE) as s:
        table = mv.ArrayTableHandler(SIZE, dtype="int64", name="t", session=s)
        count(shared, table.get(), BEGUN, SEEN, SEEN, "sync", [], 0)
    shared.job[STOP_AT] = 1


def count(
    shared: Shared, values: Any, begun: int, returned: int, seen: int, mode: str, live: list[int], me: int
) -> None:
    """Notes by how many adds an element is short of what returned, or beyond what was begun."""
    for worker in range(WORKERS):
        words = shared.worker[worker]
        counts = values >> (BITS * worker) & ((1 << BITS) - 1)
        least = words[seen] if mode == "sync" and worker not in live else words[returned]
        short, beyond = int(least - counts.min()), int(counts.max() - words[begun])
        shared.worker[me][WRONG] += max(0, short) + max(0, beyond)


class Trouble(Exception):
    """Something that must not happen."""


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE
    while not condition():
        if time.monotonic() > deadline:
            raise Trouble(f"not within {DEADLINE} s: {what}")
        time.sleep(0.0005)


class Episode:
    """A job, its kills, and what became of it. Owner: the main process."""

    def __init__(self, mode: str, kind: str, chance: random.Random) -> None:
        self.mode, self.kind, self.chance = mode, kind, chance
        self.shared = Shared()
        self.waits: list[float] = []
        self.control: list[float] = []
        self.kills = 0
        said, say = os.pipe()
        stop, self.stop = os.pipe()
        elastic = kind == "elastic"
        on_lost = "continue" if kind in ("continue", "elastic") else "stop"
        self.node = fork(lambda: serve(None if elastic else WORKERS, on_lost, say, stop))
        os.close(say)
        os.close(stop)
        if not select.select([said], [], [], DEADLINE)[0]:
            raise Trouble("the node does not start")
        self.address = os.read(said, 200).decode()
        os.close(said)
        seed = chance.randrange(2**32)
        self.pids = {
            i: self.comes(i) if elastic else fork(lambda i=i: work(self.shared, self.address, i, mode, seed))  # type: ignore[misc]
            for i in range(WORKERS)
        }

    def comes(self, place: int) -> int:
        seed = self.chance.randrange(2**32)
        return fork(lambda: come_and_go(self.shared, self.address, place, seed))

    def words(self, what: int, workers: Any = None) -> list[int]:
        return [int(self.shared.worker[i][what]) for i in (workers or self.pids)]

    def run(self) -> None:
        until(lambda: all(s == RUNNING for s in self.words(STATE)), "all workers have the tables")
        self.laps()
        self.control.append(max(self.words(LONGEST)) / 1e9)
        if self.kind == "continue":
            for _ in range(self.chance.randrange(1, WORKERS)):
                if len(self.pids) == 1:
                    break
                self.kill_workers(1 + (len(self.pids) > 2 and self.chance.random() < 0.2))
                self.laps()
                self.waits.append(max(self.words(LONGEST)) / 1e9)
            self.shared.job[STOP] = 1
            until(lambda: all(s != RUNNING for s in self.words(STATE)), "the survivors end")
            expected = DONE
        elif self.kind == "elastic":
            for _ in range(12):
                places = sorted(self.pids)
                self.kill_workers(1 + (self.chance.random() < 0.3))
                self.pids |= {i: self.comes(i) for i in places if i not in self.pids}
                self.laps()
                self.waits.append(max(self.words(LONGEST)) / 1e9)
            self.shared.job[STOP] = 1
            until(lambda: all(s != RUNNING for s in self.words(STATE)), "all leave")
            checker = fork(lambda: count_all(self.shared, self.address))
            until(lambda: os.waitpid(checker, os.WNOHANG)[0] != 0, "the tables are read")
            if not self.shared.job[STOP_AT]:
                raise Trouble("the tables cannot be read after the workers have left")
            expected = DONE
        else:
            at = time.monotonic_ns()
            if self.kind == "node":
                time.sleep(self.chance.random() * 0.01)
                at = time.monotonic_ns()
                os.kill(self.node, signal.SIGKILL)
                self.kills += 1
            else:
                at = self.kill_workers(1)
            until(lambda: all(s != RUNNING for s in self.words(STATE)), "the survivors are told")
            self.waits.append(max((self.words(RAISED_AT)[i] - at) / 1e9 for i in range(len(self.pids))))
            expected = TOLD
        if set(self.words(STATE)) != {expected}:
            raise Trouble(f"{self.kind}, {self.mode}: workers ended as {self.words(STATE)}, not {expected}")
        self.same_rounds()

    def laps(self) -> None:
        """Waits until every worker has passed two more barriers, and notes the longest call meanwhile."""
        for i in self.pids:
            self.shared.worker[i][LONGEST] = 0
        before = dict(zip(self.pids, self.words(LAPS), strict=True))
        until(
            lambda: all(self.shared.worker[i][LAPS] >= before[i] + 2 for i in self.pids),
            f"two more barriers; {self.mode}, laps {self.words(LAPS)}",
        )

    def kill_workers(self, number: int) -> int:
        time.sleep(self.chance.random() * 0.01)
        at = time.monotonic_ns()
        for worker in self.chance.sample(sorted(self.pids), number):
            pid = self.pids.pop(worker)
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            self.kills += 1
        return at

    def same_rounds(self) -> None:
        if self.mode == "sync":
            seen = self.shared.worker[:, 16:]
            for number in range(ROUNDS):
                values = {int(v) for v in seen[:, number] if v}
                latest = max((v >> 32 for v in values), default=0)
                if len({v for v in values if v >> 32 == latest}) > 1:
                    raise Trouble(f"round {latest} is not the same in all workers")

    @property
    def wrong(self) -> int:
        return int(self.shared.worker[:, WRONG].sum())

    def end(self) -> int:
        """Ends what should have ended by itself; returns how many processes had not."""
        with contextlib.suppress(OSError):
            os.write(self.stop, b"x")
        os.close(self.stop)
        return reap((*self.pids.values(), self.node), 20)


SCRIPT = """
import os, time
import multiverso as mv
mv.init()
t = mv.ArrayTableHandler(1000)
print("pid", os.getpid(), flush=True)
while True:
    t.add([1.0] * 1000)
    mv.barrier()
"""


def kill_a_launcher(chance: random.Random, folder: str) -> float:
    """Kills `multiverso run`; returns how long its workers lived on."""
    path = Path(folder, "job.py")
    path.write_text(SCRIPT)
    job = subprocess.Popen(
        [sys.executable, "-m", "multiverso.cli", "run", "-n", "2", str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert job.stdout is not None
    ends: list[int] = []
    while len(ends) < 2:
        line = job.stdout.readline()
        if not line:
            raise Trouble(f"the launcher ended with {job.wait()}")
        if "pid" in line:
            ends.append(os.pidfd_open(int(line.split()[-1])))
    time.sleep(chance.random() * 0.02)
    at = time.monotonic()
    job.kill()
    job.wait()
    for end in ends:
        if not select.select([end], [], [], DEADLINE)[0]:
            raise Trouble("a worker outlives its launcher")
        os.close(end)
    job.stdout.close()
    return time.monotonic() - at


def left_behind() -> dict[str, int]:
    """What of ours is still there, with no job running."""
    sockets = [row.split()[-1] for row in Path("/proc/net/unix").read_text().splitlines()]
    mine = [f"@multiverso-{pid}-" for pid in started]
    maps = Path("/proc/self/maps").read_text()
    in_memory = [name for name in os.listdir("/dev/shm") if "multiverso" in name]
    return {
        "sockets": sum(name.startswith(tuple(mine)) for name in sockets) if mine else 0,
        "memory": maps.count("memfd:multiverso"),
        "files": len([*in_memory, *os.listdir(tempfile.gettempdir())]),
    }


started: list[int] = []


def percentiles(seconds: list[float]) -> dict[str, float]:
    if not seconds:
        return {}
    p50, p99, most = np.percentile(seconds, [50, 99, 100])
    return {"p50_ms": 1e3 * p50, "p99_ms": 1e3 * p99, "max_ms": 1e3 * most, "number": len(seconds)}


def main() -> NoReturn:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kills", type=int, default=2000)
    parser.add_argument("--only", help="one kind of episodes: continue, stop, node, elastic")
    parser.add_argument("--minutes", type=float, default=60, help="stop after so long, with fewer kills")
    parser.add_argument("--json", type=Path, help="where to write the result")
    parser.add_argument("--launchers", type=int, help="how many of the kills are of launchers (1 in 200)")
    options = parser.parse_args()
    for kernel in (dense.add, rows.add_rows, rounds.read):
        kernel.compiled("int64")
    chance = random.Random(options.seed)
    waits: dict[str, list[float]] = {"continue": [], "stop": [], "node": [], "elastic": [], "launcher": []}
    control: list[float] = []
    kills = wrong = processes = interruptions = 0
    trouble: list[str] = []
    began = time.monotonic()
    launchers = options.kills // LAUNCHER_EVERY if options.launchers is None else options.launchers
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder, tempfile.TemporaryDirectory() as temporary:
        os.environ["TMPDIR"] = tempfile.tempdir = temporary  # not for other jobs of this machine
        end = began + 60 * options.minutes
        while kills < options.kills and len(trouble) < 5 and time.monotonic() < end:
            if len(waits["launcher"]) < launchers and kills >= len(waits["launcher"]) * LAUNCHER_EVERY:
                waits["launcher"].append(kill_a_launcher(chance, folder))
                kills += 1
                continue
            kind = options.only or chance.choices(["continue", "stop", "node", "elastic"], [12, 4, 2, 1])[0]
            episode = Episode("sync" if kind == "elastic" else chance.choice(sorted(MODES)), kind, chance)
            started.append(episode.node)
            try:
                episode.run()
            except Trouble as error:
                trouble.append(str(error))
            processes += episode.end()
            waits[kind] += episode.waits
            control += episode.control
            wrong += episode.wrong
            kills += episode.kills
            interruptions += sum(episode.words(INTERRUPTED))
            if sys.stderr.isatty():
                print(f"\r{kills} of {options.kills} kills", end="", file=sys.stderr)
        left = left_behind()
    everything = [wait for some in waits.values() for wait in some]
    result = {
        "seed": options.seed,
        "kills": kills,
        "interruptions": interruptions,
        "seconds": time.monotonic() - began,
        "waits": {**{kind: percentiles(some) for kind, some in waits.items()}, "all": percentiles(everything)},
        "control": percentiles(control),
        "waits_over_a_second": sum(wait > 1 for wait in everything),
        "adds_lost": wrong,
        "left_behind": {"processes": processes, **left},
        "trouble": trouble,
        "machine": {"cores": os.cpu_count(), "platform": platform.platform(), "load": os.getloadavg()},
    }
    give_report(result, options.json)
    clean = not (trouble or wrong or any(result["left_behind"].values()))
    raise SystemExit(0 if clean else 1)


if __name__ == "__main__":
    main()
