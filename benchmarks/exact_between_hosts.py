"""Sums and bits between hosts through cut connections by the thousand, silent links, and hosts that stand still.

    python benchmarks/exact_between_hosts.py --seed 1 --cuts 3000 --silences 0.5 5 70

Each episode is a job on two or three hosts that are all this machine, with a node and workers of their own that were
forked from this process, asynchronous, with a bound, or synchronous, plain or encrypted. All connections between the
hosts (for values, for messages, to the coordinator) go through relays that the seed drives: a connection ends after a
random number of bytes, in the handshake, between frames or in the middle of one; pieces are held up for random times;
and now and then a node stands still (SIGSTOP). The workers of a job that is not synchronous add whole numbers, and
after each barrier they compare every number of every table with what was added, also of one by key, whose rows are
removed now and then. Those of a synchronous job add random numbers, and keep a checksum of every round's bits: it has
to be the same in all workers, and in a second run with other faults.

With ``--silences``, a job of each kind also meets a network that carries nothing for so many seconds: three network
namespaces on a bridge, whose cables are pulled. That needs root.

What is counted: connections cut, bytes carried, stops, rounds, and how long the longest barrier took.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import mmap
import os
import platform
import random
import select
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
import traceback
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

import multiverso as mv
from chaos import Trouble, fork, left_behind, reap, started
from chaos_between_hosts import compile_kernels, logs_to
from multiverso.compiling.on_demand import ensure_all
from multiverso.hosts.control.connections import credentials_of
from multiverso.hosts.fabric import Fabric
from multiverso.hosts.roster import Roster
from multiverso.hosts.transport.credentials import new_credentials
from multiverso.hosts.transport.listener import open_port
from multiverso.runtime import Node, Session
from multiverso.runtime.several_hosts.other_hosts import OtherHosts
from namespaces import enter, ip
from reporting import give_report

MODES: dict[str, dict[str, Any]] = {"async": {}, "bounded": {"staleness": 2}, "sync": {"sync": True}}
MOST_HOSTS, MOST_WORKERS = 3, 6
SIZE, ROWS, COLUMNS = 30_000, 64, 16
KEYS = np.arange(600) * 7919 - 12345  # of a table whose rows live on one host each
STEPS = 12  # from one look to the next
DEADLINE = 100.0
END_SECONDS = 20.0

# words of the job, in memory that all of its processes share (int64)
SILENT, ENDING, CUTS, BYTES, STOPS, PORTS = range(6)
WORDS = 64
# of each worker
LOOKS, STATE, BITS, LONGEST = range(4)
NOTHING, DONE, FAILED = range(3)


class Shared:
    """Memory of an episode that outlives its processes."""

    def __init__(self) -> None:
        words = np.frombuffer(mmap.mmap(-1, 8 * (WORDS + 8 * MOST_WORKERS)), np.int64)
        self.job, self.worker = words[:WORDS], words[WORDS:].reshape(MOST_WORKERS, 8)


@dataclass(frozen=True)
class Plan:
    """What an episode is.

    Attributes:
        seed: of its faults.
        mode: one of MODES.
        workers: of each host.
        encrypted: whether the connections are.
        looks: how often all workers compare what they read.
        cuts: whether connections are cut, and nodes stopped.
        silence: seconds for which the network carries nothing, once in the middle.
    """

    seed: int
    mode: str
    workers: tuple[int, ...]
    encrypted: bool
    looks: int
    cuts: bool = True
    silence: float = 0.0

    def __str__(self) -> str:
        how = f"{self.mode}, {self.workers}, {'encrypted' if self.encrypted else 'plain'}"
        return f"seed {self.seed}: {how}{f', silent for {self.silence:g} s' if self.silence else ''}"


_bridges = itertools.count()

# -- the network ---------------------------------------------------------------------------------------------------


def relay(shared: Shared, listeners: list[socket.socket], seed: int) -> None:
    """A process that passes connections on to the hosts' ports, and ends them after random numbers of bytes."""
    for number, listener in enumerate(listeners):
        threading.Thread(target=_accept, args=(shared, listener, number, seed), daemon=True).start()
    while not shared.job[ENDING]:
        time.sleep(0.02)


def _accept(shared: Shared, listener: socket.socket, number: int, seed: int) -> None:
    source = random.Random(seed * 100 + number)
    count = 0
    while True:
        here = listener.accept()[0]
        try:
            there = socket.create_connection(("127.0.0.1", int(shared.job[PORTS + number])), 5)
        except OSError:
            here.close()
            continue
        count += 1
        # one in eight ends early, as a rule in its handshake; the others anywhere in the next megabytes
        most = 400 if source.random() < 0.125 else 2 ** source.uniform(13, 23)
        budget = [source.uniform(0, most)]
        threads = [
            threading.Thread(target=_carry, args=(shared, *pair, budget, source.random()), daemon=True)
            for pair in ((here, there), (there, here))
        ]
        for thread in threads:
            thread.start()


def _carry(shared: Shared, one: socket.socket, other: socket.socket, budget: list[float], seed: float) -> None:
    source = random.Random(seed)
    with contextlib.suppress(OSError):
        while data := one.recv(source.choice((100, 4096, 65536, 1 << 20))):
            if source.random() < 0.02:
                time.sleep(source.random() * 0.03)
            room = int(budget[0])
            budget[0] -= len(data)
            other.sendall(data[:room] if budget[0] < 0 else data)
            shared.job[BYTES] += len(data)
            if budget[0] < 0:
                shared.job[CUTS] += 1
                if source.random() < 0.5:  # what is under way is lost, too
                    one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                break
    for each in (one, other):
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
    one.close()


class Relayed(Fabric):
    """A host's connections, where the others are told the relay's port in place of its own."""

    def __init__(self, roster: Roster, shared: Shared, port: int) -> None:
        super().__init__(roster.host, roster.hosts, credentials_of(roster))
        self._job, self._port = shared.job, port

    def listen(self) -> tuple[str, int]:
        self._job[PORTS + self.host] = super().listen()[1]
        return "127.0.0.1", self._port


@contextlib.contextmanager
def bridge(hosts: int) -> Iterator[tuple[list[str], list[str]]]:
    """Gives the names of namespaces that a bridge joins, and of the cables' ends at the bridge; they go in the end."""
    number = next(_bridges)  # the system takes devices away some time after their namespace
    names = [f"mvexact{os.getpid()}-{number}-{host}" for host in range(hosts)]
    cables = [f"mx{os.getpid()}x{number}{host}" for host in range(hosts)]
    switch = f"mx{os.getpid()}s{number}"
    try:
        ip("link", "add", switch, "type", "bridge")
        ip("link", "set", switch, "up")
        for host, (name, cable) in enumerate(zip(names, cables, strict=True)):
            ip("netns", "add", name)
            ip("link", "add", "v0", "netns", name, "type", "veth", "peer", "name", cable)
            ip("link", "set", cable, "master", switch, "up")
            ip("-n", name, "addr", "add", f"10.79.0.{host + 1}/24", "dev", "v0")
            for device in ("v0", "lo"):
                ip("-n", name, "link", "set", device, "up")
        yield names, cables
    finally:
        for command in (*(("netns", "del", name) for name in names), ("link", "del", switch)):
            with contextlib.suppress(Exception):
                ip(*command)


# -- the hosts -----------------------------------------------------------------------------------------------------


def work(plan: Plan, shared: Shared, address: str, me: int, notes: str) -> None:
    """A worker's life: steps, and looks at what all have made together."""
    words = shared.worker[me]
    try:
        options: dict[str, Any] = {"timeout_seconds": DEADLINE + plan.silence, "start_timeout_seconds": DEADLINE}
        with Session(address, me, **options, **MODES[plan.mode]) as session:
            (rounds if plan.mode == "sync" else sums)(plan, shared, session)
        words[STATE] = DONE
    except BaseException:
        with open(notes, "a") as file:
            file.write(f"worker {me}, look {words[LOOKS]}:\n{traceback.format_exc()}\n")
        words[STATE] = FAILED


def sums(plan: Plan, shared: Shared, session: Session) -> None:
    """Whole numbers in float32, and what every one of them has to be after each barrier."""
    me, number, words = session.worker_id, sum(plan.workers), shared.worker[session.worker_id]
    table = mv.ArrayTableHandler(SIZE, session=session)
    matrix = mv.MatrixTableHandler(ROWS, COLUMNS, dtype="int64", session=session)
    wide = mv.ArrayTableHandler(1000, dtype="float64", session=session)
    part = slice(me * SIZE // number, (me + 1) * SIZE // number)
    spread = mv.KeyedTable(3, dtype="int64", cache_rows=200, session=session) if plan.mode == "async" else None
    keyed = np.zeros(KEYS.size, np.int64)
    wanted, own = 0, np.zeros(SIZE, np.float32)
    seen = np.zeros(SIZE, np.float32)
    for look in range(plan.looks):
        for step in range(STEPS):
            own[:] = 1 + step % 3
            own[part] += 1  # a worker's part has one more, of its own
            table.add(own)
            matrix.add(np.ones((2, COLUMNS), np.int64), row_ids=[me, ROWS - 1])
            wide.add(np.full(1000, me + 1.0))
            if plan.mode == "bounded":
                table.get(out=seen)  # waits for who is too far behind
            if spread is not None:
                some = np.random.default_rng((look, step)).integers(0, KEYS.size, 60)  # the same in all workers
                spread.add(np.full((some.size, 3), me + 1), KEYS[some])
                np.add.at(keyed, some, number * (number + 1) // 2)
            wanted += number * (1 + step % 3) + 1
            time.sleep(0.002)
        began = time.monotonic_ns()
        session.barrier()
        words[LONGEST] = max(words[LONGEST], time.monotonic_ns() - began)
        values, rows = table.snapshot(), matrix.snapshot()
        done = (look + 1) * STEPS
        assert (values == wanted).all(), f"{np.unique(values)} where {wanted} was to be"
        assert (rows[:number] == done).all(), rows
        assert (rows[-1] == number * done).all(), rows
        assert (wide.snapshot() == done * number * (number + 1) // 2).all()
        if spread is not None:
            found = spread.get(KEYS)
            assert (found == keyed[:, None]).all(), f"{found[(found != keyed[:, None]).any(axis=1)]} by key"
            assert len(spread) == np.count_nonzero(keyed)
            session.barrier()
            some = np.random.default_rng(look).integers(0, KEYS.size, 100)
            if me == look % number:
                removed = spread.remove(KEYS[some])
                assert removed[np.unique(some, return_index=True)[1]].sum() == np.count_nonzero(keyed[np.unique(some)])
            keyed[some] = 0
        words[BITS] = zlib.crc32(values.tobytes())
        words[LOOKS] = look + 1
        session.barrier()


def rounds(plan: Plan, shared: Shared, session: Session) -> None:
    """Random numbers in rounds, with and without an updater's state, and a checksum of all bits of all rounds."""
    me, words = session.worker_id, shared.worker[session.worker_id]
    table = mv.ArrayTableHandler(SIZE, session=session)
    small = mv.ArrayTableHandler(1000, updater="momentum", session=session)
    bits = 0
    for look in range(plan.looks):
        for step in range(STEPS):
            chance = np.random.default_rng((me, look, step))
            table.add(chance.standard_normal(SIZE, np.float32))
            small.add(chance.standard_normal(1000, np.float32))
            bits = zlib.crc32(table.get().tobytes(), zlib.crc32(small.get().tobytes(), bits))
        began = time.monotonic_ns()
        session.barrier()
        words[LONGEST] = max(words[LONGEST], time.monotonic_ns() - began)
        words[BITS], words[LOOKS] = bits, look + 1


class Episode:
    """A job, its network, and what came of it. Owner: the main process.

    Args:
        plan: what it is.
        notes: a file for what its workers raise.
        names: the hosts' network namespaces; without them, relays on this machine's loopback.
        cables: the bridge's ends of what these are joined by.
    """

    def __init__(self, plan: Plan, notes: str, names: list[str] | None = None, cables: tuple[str, ...] = ()) -> None:
        self.plan, self._notes, self._names, self._cables = plan, notes, names, cables
        self._shared = Shared()
        self._nodes: list[tuple[int, int]] = []  # processes, and what ends them
        self._workers: list[int] = []
        self._network: list[int] = []
        hosts = tuple(f"host-{host}" for host in range(len(plan.workers)))
        credentials = new_credentials(plan.encrypted).to_text()
        grace = max(30.0, 2 * plan.silence)
        self._roster = Roster(0, hosts, plan.workers, ("", 0), credentials, rehearsal=not names, grace=grace)

    def run(self) -> dict[str, Any]:
        """Runs it.

        Raises:
            Trouble: something that must not happen.
        """
        began = time.monotonic()
        self._begin()
        plan, chance = self.plan, random.Random(self.plan.seed)
        words = self._shared.worker[: sum(plan.workers)]
        until, stop = began + DEADLINE + 5 * plan.looks + 2 * plan.silence, time.monotonic() + chance.random()
        silent_at = plan.looks // 2 if plan.silence else plan.looks + 1
        while not (words[:, STATE] != NOTHING).all():
            if (words[:, STATE] == FAILED).any() or time.monotonic() > until:
                raise Trouble(f"{words[:, STATE].tolist()} at {words[:, LOOKS].tolist()} of {plan.looks} looks")
            if plan.cuts and time.monotonic() > stop:
                self._stand_still(chance.randrange(len(self._nodes)), chance.random() * 0.6)
                stop = time.monotonic() + 0.3 + 3 * chance.random()
            if words[:, LOOKS].min() >= silent_at:
                self._be_silent(plan.silence)
                silent_at = plan.looks + 1
            time.sleep(0.005)
        if len(set(words[:, BITS].tolist())) > 1:
            raise Trouble(f"not all have the same bits: {words[:, BITS].tolist()}")
        job = self._shared.job
        return {
            "what": str(plan),
            "mode": plan.mode,
            "hosts": len(plan.workers),
            "seconds": time.monotonic() - began,
            "silence": plan.silence,
            "cuts": int(job[CUTS]),
            "megabytes": int(job[BYTES]) / 1e6,
            "stops": int(job[STOPS]),
            "looks": int(words[:, LOOKS].sum()),
            "longest_barrier_seconds": int(words[:, LONGEST].max()) / 1e9,
            "bits": int(words[0, BITS]),
        }

    def _begin(self) -> None:
        hosts = self._roster.hosts
        with contextlib.ExitStack() as stack:
            ports = [0] * (hosts + 1)
            if self._names is None:
                listeners = [socket.create_server(("127.0.0.1", 0)) for _ in ports]  # the last is the coordinator's
                for listener in listeners:
                    stack.enter_context(listener)
                ports = [listener.getsockname()[1] for listener in listeners]
                self._network.append(fork(lambda: relay(self._shared, listeners, self.plan.seed)))
            addresses = [self._node(host, ports) for host in range(hosts)]
        for worker in range(self._roster.workers_num):
            host = self._roster.host_of(worker)
            self._workers.append(fork(lambda w=worker, h=host: self._work(w, h, addresses[h])))  # type: ignore[misc]

    def _work(self, worker: int, host: int, address: str) -> None:
        if self._names is not None:
            enter(self._names[host])
        work(self.plan, self._shared, address, worker, self._notes)

    def _node(self, host: int, ports: list[int]) -> str:
        said, say = os.pipe()
        read, orders = os.pipe()
        pid = fork(lambda: self._serve(host, ports, say, read))
        started.append(pid)
        os.close(say)
        os.close(read)
        self._nodes.append((pid, orders))
        address = os.read(said, 200).decode() if select.select([said], [], [], DEADLINE)[0] else ""
        os.close(said)
        if not address:
            raise Trouble(f"the node of host {host} does not start")
        return address

    def _serve(self, host: int, ports: list[int], say: int, orders: int) -> None:
        job, listener = self._shared.job, None
        fabric: Fabric
        if self._names is not None:
            enter(self._names[host])
            own = replace(self._roster.on(host), coordinator=("10.79.0.1", 29600))
            listener = open_port(own.coordinator) if host == 0 else None
            fabric = Fabric(host, own.hosts, credentials_of(own), bind=(f"10.79.0.{host + 1}", 0))
        else:
            own = replace(self._roster.on(host), coordinator=("127.0.0.1", ports[-1]))
            if host == 0:
                listener = open_port(("127.0.0.1", 0))
                job[PORTS + own.hosts] = listener.getsockname()[1]
            fabric = Relayed(own, self._shared, ports[host])
        with Node(own.workers_num, on_lost="stop", other_hosts=OtherHosts(own, fabric, listener)) as node:
            os.write(say, node.address.encode())
            os.read(orders, 1)

    def _stand_still(self, host: int, seconds: float) -> None:
        os.kill(self._nodes[host][0], signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(self._nodes[host][0], signal.SIGCONT)
        self._shared.job[STOPS] += 1

    def _be_silent(self, seconds: float) -> None:
        for cable in self._cables:
            ip("link", "set", cable, "down")
        time.sleep(seconds)
        for cable in self._cables:
            ip("link", "set", cable, "up")

    def end(self) -> int:
        """Ends what should have ended by itself; returns how many processes had not."""
        self._shared.job[ENDING] = 1
        for _, orders in self._nodes:
            with contextlib.suppress(OSError):
                os.write(orders, b"\xff")
            os.close(orders)
        return reap([*self._workers, *(pid for pid, _ in self._nodes), *self._network], END_SECONDS)


# -- all of it -----------------------------------------------------------------------------------------------------


class Runs:
    """Episodes one after another, and what they came to."""

    def __init__(self, folder: str, say: Any) -> None:
        self.found: list[dict[str, Any]] = []
        self.trouble: list[str] = []
        self.processes = 0
        self._notes, self._logs, self._say = Path(folder, "notes"), Path(folder, "logs"), say

    @property
    def cuts(self) -> int:
        return sum(each["cuts"] for each in self.found)

    def go(self, plan: Plan, *network: Any) -> int | None:
        """Runs an episode; returns the bits of what its workers read."""
        self._notes.write_text("")
        os.truncate(self._logs, 0)
        episode = Episode(plan, str(self._notes), *network)
        try:
            found = episode.run()
        except Trouble as error:
            found = None
            said = f"{self._notes.read_text()}\n{self._logs.read_text()}"
            self.trouble.append(f"{plan}: {error}\n{said}")
            self._say(f"TROUBLE {self.trouble[-1]}\n")
        left = episode.end()
        self.processes += left
        if found is None:
            return None
        self.found.append(found)
        end = f", {left} processes were left" if left else ""
        self._say(f"{plan}: {found['seconds']:.1f} s, {found['cuts']} cuts, {found['stops']} stops{end}\n")
        return int(found["bits"])

    def twice(self, plan: Plan) -> None:
        """Runs a synchronous episode, and another one with other faults."""
        bits = [self.go(plan), self.go(replace(plan, seed=plan.seed + 1_000_000))]
        if None not in bits and bits[0] != bits[1]:
            self.trouble.append(f"{plan}: other bits in the second run: {bits}")

    def silent(self, seconds: float, seed: int) -> None:
        """A network that carries nothing for so long, on two and on three hosts, in each mode."""
        for mode in MODES:
            for workers in ((1, 1), (1, 1, 1)):
                plan = Plan(seed, mode, workers, encrypted=True, looks=4, cuts=False, silence=seconds)
                with bridge(len(workers)) as (names, cables):
                    self.go(plan, names, tuple(cables[1:]))


def plan_of(seed: int, looks: int) -> Plan:
    """What the seed makes of an episode."""
    choose = random.Random(seed)
    workers = choose.choice(((1, 1), (2, 1), (2, 2), (1, 1, 1), (2, 1, 2)))
    return Plan(seed, sorted(MODES)[seed % 3], workers, choose.random() < 0.5, looks)


def main() -> NoReturn:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1, help="of the first episode; the next one has the next")
    parser.add_argument("--cuts", type=int, default=3000, help="go on until so many connections were cut")
    parser.add_argument("--looks", type=int, default=15, help="how often the workers of an episode compare")
    parser.add_argument("--silences", type=float, nargs="*", default=[], help="seconds without a network")
    parser.add_argument("--minutes", type=float, default=60, help="stop after so long, with fewer cuts")
    parser.add_argument("--json", type=Path, help="where to write the result")
    options = parser.parse_args()
    compile_kernels()
    groups = [("between_hosts.agreeing", "float32"), ("dense", "float32"), ("dense", "float64")]
    ensure_all([(f"multiverso.kernels.{module}", dtype) for module, dtype in groups])
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="exact-") as folder, tempfile.TemporaryDirectory() as temporary:
        os.environ["TMPDIR"] = tempfile.tempdir = temporary  # not for other jobs of this machine
        with logs_to(Path(folder, "logs")) as say:
            runs, seed = Runs(folder, say), options.seed
            for seconds in options.silences:
                runs.silent(seconds, options.seed)
            while runs.cuts < options.cuts and len(runs.trouble) < 5:
                if time.monotonic() > began + 60 * options.minutes:
                    break
                plan = plan_of(seed, options.looks)
                (runs.twice if plan.mode == "sync" else runs.go)(plan)
                seed += 1
        left_over = left_behind()
    result = {
        "seed": options.seed,
        "episodes": len(runs.found) + len(runs.trouble),
        "seconds": time.monotonic() - began,
        "cuts": runs.cuts,
        "stops": sum(each["stops"] for each in runs.found),
        "gigabytes": sum(each["megabytes"] for each in runs.found) / 1e3,
        "looks": sum(each["looks"] for each in runs.found),
        "longest_barrier_seconds": max(
            (e["longest_barrier_seconds"] for e in runs.found if not e["silence"]), default=0
        ),
        "silences": [each for each in runs.found if each["silence"]],
        "by_mode": {
            mode: {
                hosts: sum(each["cuts"] for each in runs.found if (each["mode"], each["hosts"]) == (mode, hosts))
                for hosts in (2, 3)
            }
            for mode in MODES
        },
        "left_behind": {"processes": runs.processes, **left_over},
        "trouble": runs.trouble,
        "machine": {"cores": os.cpu_count(), "platform": platform.platform(), "load": os.getloadavg()},
    }
    give_report(result, options.json)
    sys.exit(bool(runs.trouble or any(result["left_behind"].values())))


if __name__ == "__main__":
    main()
