"""Two hosts on this machine: frames beside one plain TCP stream, TLS beside plain, workers beside frames: JSON.

python benchmarks/hosts.py [--quick] [--link RATE] [--control NAME] [--output FILE]

Each host is a process; the same phases follow each other several times, so that a disturbance hits all of them, and
the figures are medians. With ``--link 10gbit`` (and as root) each is in a network namespace of its own, and the link
between them is limited.

There are four floors: a plain stream, whose receiver does nothing with what comes; *adding*, where both hosts send
and add what they receive to as much memory as the table has; *passes*, what is computed for frames without any
network; and *cipher*, encrypting and decrypting as many bytes. Stream and passes together, on all cores, are the most
that frames can reach on this machine (``limit``), with the cipher the most that encrypted ones can.
Seconds of the processor for a gigabyte say what the rates on a machine with other work do not.

What two hosts would do whose processors are their own is shown one way: host 1 pushes what it changes, host 0 serves
it and has nothing to answer, each on a core that the other host does not use, beside a stream between the same two
cores (``own_cores``, with the seconds that each host's core takes for a gigabyte).

A stream goes one way. Frames go both ways at once, as does *adding*: their rates are both ways together, and each way
is told beside it. Where the processor is the limit, as over loopback, bytes either way cost the same, and the sum is
what to compare; where the link is, which carries as much each way, compare each way.

BBR, which some machines have, paces by time what goes over a loopback device, and its rates differ by a factor of four
from one second to the next. ``--control reno`` (as root) measures without it.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import socket
import statistics
import threading
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from multiverso.consistency.protocol import Call
from multiverso.deadline import Deadline
from multiverso.hosts.fabric import Fabric
from multiverso.hosts.options import Every
from multiverso.hosts.peer.resources import SHARE
from multiverso.hosts.transport.credentials import Credentials, new_credentials
from multiverso.hosts.values.copies import Copy
from multiverso.kernels import dense
from multiverso.kernels.between_hosts import agreeing
from multiverso.layout import words as at
from multiverso.layout.worker_index import WorkerIndex
from multiverso.memory import heap, words
from multiverso.memory.segment import Segment
from multiverso.shards.shard import Shard, initialise
from multiverso.spec.table import Places, TableSpec
from namespaces import ADDRESSES, congestion_control, enter, own_loopback, two_hosts
from reporting import give_report

WORKERS = WorkerIndex(2)
_PIECE = 4 << 20
_CHUNK = 1 << 18  # floats of a chunk
_RECORD = 1 << 14  # bytes, the longest of TLS
_DEADLINE_SECONDS = 60.0
_DAY_SECONDS = 86_400.0
_REST_SECONDS, _LOOK_SECONDS = 0.1, 2e-5


def table(elements: int) -> Shard:
    """A table as a node makes it."""
    spec = TableSpec("array", 1, elements)
    descriptor = heap.create("benchmark", Places.of(spec, WORKERS, False).size)
    try:
        memory = Segment(descriptor)
    finally:
        os.close(descriptor)
    initialise(memory.address, spec, 1, WORKERS, at.ASYNCHRONOUS)
    return Shard(memory, spec, WORKERS, at.ASYNCHRONOUS)


class Host:
    """One of two hosts, in a process of its own: does what it is told over a pipe."""

    def __init__(self, number: int, pipe: Connection, address: str) -> None:
        self.number, self.pipe, self.address = number, pipe, address
        self.taken: float | None = None  # seconds of the processor, where a phase does not count all of its own

    def swap(self, mine: Any) -> Any:
        """Gives the other host something and returns what that gives: both wait for each other."""
        self.pipe.send(mine)
        return self.pipe.recv()

    def connection(self) -> socket.socket:
        """A TCP connection between both hosts."""
        if self.number == 0:
            with socket.create_server((self.address, 0)) as server:
                self.swap(server.getsockname())
                connection, _ = server.accept()
        else:
            connection = socket.create_connection(self.swap(None))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    def on_own_core(self, name: str, *arguments: Any) -> float:
        """Does something on one core, and the other host on another, where there are two."""
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[self.number % len(cores)]})  # threads that it starts stay there
        try:
            rate: float = getattr(self, name)(*arguments)
        finally:
            os.sched_setaffinity(0, cores)
        return rate

    def stream(self, seconds: float) -> float:
        """Bytes a second of one TCP stream from host 1 to host 0."""
        with self.connection() as connection:
            if self.number == 0:
                view = memoryview(bytearray(_PIECE))
                got, began = 0, time.perf_counter()
                while count := connection.recv_into(view):
                    got += count
                return got / (time.perf_counter() - began)
            data, end = bytes(_PIECE), time.perf_counter() + seconds
            while time.perf_counter() < end:
                connection.sendall(data)
        return 0.0

    def adding(self, elements: int, seconds: float) -> float:
        """Bytes a second that come here while both hosts send, and add what they receive."""
        with self.connection() as connection:
            values, got = np.zeros(elements, np.float32), [0]

            def receive() -> None:
                piece, low = np.zeros(_CHUNK, np.float32), 0
                view = piece.data.cast("B")
                while connection.recv_into(view, 0, socket.MSG_WAITALL) == len(view):
                    part = values[low : low + _CHUNK]
                    np.add(part, piece, out=part)
                    low = (low + _CHUNK) % elements
                    got[0] += len(view)

            receiver = threading.Thread(target=receive)
            data, began = np.ones(_CHUNK, np.float32).data.cast("B"), time.perf_counter()
            receiver.start()
            while time.perf_counter() < began + seconds:
                connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            receiver.join()
            return got[0] / (time.perf_counter() - began)

    def passes(self, elements: int, seconds: float) -> float:
        """Bytes of frames a second whose values are read, served and taken here, without any network."""
        mine, home = Copy(table(elements)), Copy(table(elements))
        agreed = [np.zeros(chunk.size, np.float32) for chunk in (*mine.chunks, *home.chunks)]
        frame, done, began = np.zeros(_CHUNK, np.float32), 0, time.perf_counter()
        while time.perf_counter() < began + seconds:
            for chunk in mine.chunks:
                part, theirs = frame[: chunk.size], agreed[len(mine.chunks) + chunk.number]
                mine.run(agreeing.push, chunk, agreed[chunk.number], part)
                home.run(agreeing.serve, chunk, theirs, part)
                mine.run(agreeing.land, chunk, agreed[chunk.number], part)
                done += 2 * part.nbytes
        return done / (time.perf_counter() - began)

    def cipher(self, seconds: float) -> float:
        """Bytes a second that are encrypted and decrypted here, in records as TLS has them, without anything else."""
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        key, nonce, plain = AESGCM(bytes(32)), bytes(12), bytes(_RECORD)
        done, began = 0, time.perf_counter()
        while time.perf_counter() < began + seconds:
            for _ in range(64):
                key.decrypt(nonce, key.encrypt(nonce, plain, None), None)
            done += 64 * _RECORD
        return done / (time.perf_counter() - began)

    def there_and_back(self, times: int) -> float:
        """Seconds of 1,000 floats to host 1, which adds them, and as many back, by plain sockets: the median."""
        taken = []
        with self.connection() as connection:
            values, piece = np.zeros(1000, np.float32), np.ones(1000, np.float32)
            view = piece.data.cast("B")
            for _ in range(times):
                began = time.perf_counter()
                if self.number == 0:
                    connection.sendall(view)
                connection.recv_into(view, 0, socket.MSG_WAITALL)
                values += piece
                if self.number == 1:
                    connection.sendall(view)
                taken.append(time.perf_counter() - began)
        return statistics.median(taken)

    def timed(self, name: str, *arguments: Any) -> tuple[float, float]:
        """Returns a rate, and the seconds of this process's processor time it took."""
        self.taken, before = None, time.process_time()
        rate = getattr(self, name)(*arguments)
        return rate, time.process_time() - before if self.taken is None else self.taken

    def fabric(
        self,
        job: Credentials,
        shard: Shard,
        share: float,
        every: Every | None = None,
        number: int = 1,
        control: int = 0,
    ) -> Fabric:
        """Both hosts, connected, with one table; odd ones' home is host 1."""
        made = Fabric(self.number, 2, job, bind=(self.address, 0), share=share)
        address = self.swap(made.listen())
        if self.number == 1:
            made.connect(0, address)
        made.attach(number, shard, every=every, control=control)
        made.settle(Deadline.after(_DEADLINE_SECONDS))
        return made

    def frames(self, job: Credentials, elements: int, seconds: float, one_way: bool = False) -> float:
        """Bytes a second that this host sends, without a pace, when every chunk always has something new.

        One way: only what lives at host 0 has, and only at host 1, and host 0 asks for nothing.
        """
        shard = table(elements)
        rests = Every(seconds=_DAY_SECONDS) if one_way and self.number == 0 else None
        with self.fabric(job, shard, 0.0, rests) as made:
            values = shard.values()
            if one_way:  # the first half lives at host 0
                values = values[: elements // 2 if self.number else 0]
            self.swap(None)
            before, began, used = self._sent(made), time.perf_counter(), time.process_time()
            while time.perf_counter() < began + seconds:
                if values.size:
                    values[:: _CHUNK // 4] += 1
                    words.store64(shard.base + at.WRITTEN, words.load64(shard.base + at.WRITTEN) + 1)
                time.sleep(0.002)
            rate = (self._sent(made) - before) / (time.perf_counter() - began)
            self.taken = time.process_time() - used  # but for connecting and the first values
            self.swap(None)
        return rate

    def _sent(self, made: Fabric) -> int:
        return int(made.statistics()[1 - self.number]["bytes_sent"])

    def home_and_back(self, job: Credentials, times: int) -> float:
        """Seconds of 1,000 floats to the home and back (host 0's), the median."""
        shard = table(1000)
        taken = []
        with self.fabric(job, shard, 0.0) as made:
            self.swap(None)
            for _ in range(times if self.number == 0 else 0):
                shard.values()[:] += 1
                began = time.perf_counter()
                made.settle(Deadline.after(_DEADLINE_SECONDS))
                taken.append(time.perf_counter() - began)
            self.swap(None)
        return statistics.median(taken) if taken else 0.0

    def seen(self, job: Credentials, number: int, times: int) -> list[float]:
        """When host 0's worker began to add 1,000 floats to a table at rest, and when host 1 read the last of them."""
        shard, control, call = table(1000), np.zeros(at.control_bytes(2) // 8, np.int64), Call()
        where, add, moments = int(control.ctypes.data), dense.add.compiled("float32"), []
        values, one = shard.values(), np.ones(1000, np.float32)
        with self.fabric(job, shard, SHARE, number=number, control=where):
            for turn in range(1, times + 1):
                self.swap(None)
                if self.number == 0:
                    time.sleep(_REST_SECONDS * (1 + turn / times))
                    call.done.value = 0
                    moments.append(time.perf_counter())
                    add(where, shard.base, 0, 0, one, call.address)
                else:
                    while values[-1] < turn:
                        time.sleep(_LOOK_SECONDS)
                    moments.append(time.perf_counter())
            self.swap(None)
        return moments

    def exchange(self, job: Credentials | None, elements: int, share: float, seconds: float) -> dict[str, float]:
        """Seconds of a worker's exchange, the median, while this host's frames go on; without a job, without any."""
        shard = table(elements)
        local, last = np.zeros(elements, np.float32), np.zeros(elements, np.float32)
        control = np.zeros(at.control_bytes(2) // 8, np.int64)
        call, kernel = Call(), dense.exchange.compiled("float32")
        made = self.fabric(job, shard, share) if job is not None else None
        self.swap(None)
        taken, end = [], time.perf_counter() + seconds
        before = self._sent(made) if made else 0
        began_all = time.perf_counter()
        while time.perf_counter() < end:
            local += 1
            call.done.value = 0
            began = time.perf_counter()
            kernel(int(control.ctypes.data), shard.base, 0, 0, local, last, 0, call.address)
            taken.append(time.perf_counter() - began)
        rate = (self._sent(made) - before) / (time.perf_counter() - began_all) if made else 0.0
        self.swap(None)
        if made is not None:
            made.close()
        return {"seconds": statistics.median(taken), "bytes_a_second": rate}


def serve(number: int, pipe: Connection, namespace: str) -> None:
    """What a host's process does."""
    if namespace:
        enter(namespace)
    host = Host(number, pipe, ADDRESSES[number] if namespace else "127.0.0.1")
    while True:
        what = pipe.recv()
        if what is None:
            return
        name, *arguments = what
        pipe.send(("done", getattr(host, name)(*arguments)))


class Both:
    """Both processes, and who carries what they swap."""

    def __init__(self, namespaces: list[str]) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipes, self.processes = [], []
        for number in range(2):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(number, theirs, namespaces[number]), daemon=True)
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)

    def do(self, name: str, *arguments: Any) -> list[Any]:
        """Both do the same; returns what each has measured."""
        for pipe in self.pipes:
            pipe.send((name, *arguments))
        results: list[Any] = [None, None]
        waiting = [True, True]
        while any(waiting):
            said = [self._hear(number, results, waiting) for number in range(2)]
            if any(waiting):
                for number in range(2):
                    self.pipes[number].send(said[1 - number])
        return results

    def _hear(self, number: int, results: list[Any], waiting: list[bool]) -> Any:
        said = self.pipes[number].recv()
        if isinstance(said, tuple) and said and said[0] == "done":
            results[number], waiting[number] = said[1], False
        return said

    def end(self) -> None:
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            pipe.send(None)
            process.join(10)


def medians(rounds: int, phases: dict[str, Callable[[], Any]]) -> dict[str, list[Any]]:
    """Runs the phases in turn, several times."""
    results: dict[str, list[Any]] = {name: [] for name in phases}
    for _ in range(rounds):
        for name, phase in phases.items():
            results[name].append(phase())
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--link", help="limit of the link between two namespaces, such as 10gbit; needs root")
    parser.add_argument("--control", help="how TCP decides how much it sends, such as reno; needs root")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if options.control:
        own_loopback(options.control)
    with two_hosts(options.link, options.control) if options.link else contextlib.nullcontext(["", ""]) as namespaces:
        result = measure(Both(namespaces), options.quick)
    found = {"link": options.link or "loopback", "congestion_control": congestion_control(), **result}
    give_report(found, options.output)


def own_rates(runs: dict[str, list[Any]], seconds: float) -> dict[str, Any]:
    """What goes one way between hosts that have a core each, and what each core takes for it."""
    rates = {name: statistics.median(sum(rate for rate, _ in pair) for pair in kept) for name, kept in runs.items()}

    def taken(name: str, host: int) -> float:
        kept: list[float] = [pair[host][1] / (sum(rate for rate, _ in pair) * seconds / 1e9) for pair in runs[name]]
        return statistics.median(kept)

    return {
        "megabytes_a_second": {name: rate / 1e6 for name, rate in rates.items()},
        "processor_seconds_a_gigabyte": {name: {"sends": taken(name, 1), "receives": taken(name, 0)} for name in runs},
        # what the busier of the two cores allows, whatever else the machine does
        "allowed_megabytes_a_second": {name: 1e3 / max(taken(name, host) for host in range(2)) for name in runs},
        "frames_of_stream": rates["frames"] / rates["stream"],
        "tls_of_plain": rates["frames_tls"] / rates["frames"],
    }


def measure(both: Both, quick: bool) -> dict[str, Any]:
    """Measures everything."""
    rounds, seconds = (1, 0.5) if quick else (3, 2.0)
    plain, tls = new_credentials(encrypted=False), new_credentials()
    elements = 10 * _CHUNK
    floors: dict[str, tuple[Any, ...]] = {
        "stream": ("stream", seconds),
        "adding": ("adding", elements, seconds),
        "passes": ("passes", elements, seconds),
        "cipher": ("cipher", seconds / 4),
        "frames": ("frames", plain, elements, seconds),
        "frames_tls": ("frames", tls, elements, seconds),
    }
    for job in (plain, tls):  # everything is compiled and loaded
        both.do("frames", job, elements, 0.1)
    own = {
        "stream": ("stream", seconds),
        "frames": ("frames", plain, 2 * elements, seconds, True),
        "frames_tls": ("frames", tls, 2 * elements, seconds, True),
    }
    phases: dict[str, Callable[[], Any]] = {name: partial(both.do, "timed", *what) for name, what in floors.items()}
    phases |= {f"own {name}": partial(both.do, "timed", "on_own_core", *what) for name, what in own.items()}
    runs = medians(2 * rounds, phases)
    own_cores = own_rates({name: runs.pop(f"own {name}") for name in own}, seconds)
    rates = {name: statistics.median(sum(rate for rate, _ in pair) for pair in kept) for name, kept in runs.items()}
    processor = {
        name: statistics.median(
            sum(cpu for _, cpu in pair) / (sum(rate for rate, _ in pair) * floors[name][-1] / 1e9) for pair in kept
        )
        for name, kept in runs.items()
    }
    back = medians(
        2 * rounds,
        {
            "sockets": lambda: both.do("there_and_back", 300)[0],
            "plain": lambda: both.do("home_and_back", plain, 300)[0],
            "tls": lambda: both.do("home_and_back", tls, 300)[0],
        },
    )
    turns = 20 if quick else 100
    waited = {
        where: np.subtract(*both.do("seen", plain, number, turns)[::-1])
        for where, number in (("home_reads", 1), ("home_adds", 2))
    }
    sizes = [1_000, 1_000_000] if quick else [1_000, 1_000_000, 10_000_000]
    workers = []
    for size in sizes:
        runs = medians(
            rounds,
            {
                "alone": lambda size=size: both.do("exchange", None, size, 0.0, seconds),  # type: ignore[misc]
                "paced": lambda size=size: both.do("exchange", plain, size, 0.2, seconds),  # type: ignore[misc]
                "unpaced": lambda size=size: both.do("exchange", plain, size, 0.0, seconds),  # type: ignore[misc]
            },
        )
        times = {
            name: statistics.median(one["seconds"] for pair in kept for one in pair) for name, kept in runs.items()
        }
        sent = {
            name: statistics.median(sum(one["bytes_a_second"] for one in pair) for pair in kept)
            for name, kept in runs.items()
        }
        workers.append(
            {
                "elements": size,
                "alone_microseconds": 1e6 * times["alone"],
                "paced_ratio": times["paced"] / times["alone"],
                "unpaced_ratio": times["unpaced"] / times["alone"],
                "paced_megabytes_a_second": sent["paced"] / 1e6,
                "unpaced_megabytes_a_second": sent["unpaced"] / 1e6,
            }
        )
    both.end()
    cores = len(os.sched_getaffinity(0))
    limit = 1e9 * cores / (processor["stream"] + processor["passes"])
    limit_tls = 1e9 * cores / (processor["stream"] + processor["passes"] + processor["cipher"])
    return {
        "machine": {"cores": cores, "load": os.getloadavg()[0]},
        "megabytes_a_second": {name: rate / 1e6 for name, rate in rates.items()},
        "megabytes_a_second_each_way": {name: rates[name] / 2e6 for name in ("adding", "frames", "frames_tls")},
        "processor_seconds_a_gigabyte": processor,
        "frames_of_stream": rates["frames"] / rates["stream"],
        "frames_each_way_of_stream": rates["frames"] / 2 / rates["stream"],
        "limit_of_stream": limit / rates["stream"],
        "frames_of_adding": rates["frames"] / rates["adding"],
        "frames_of_limit": rates["frames"] / limit,
        "tls_of_plain": rates["frames_tls"] / rates["frames"],
        "tls_limit_of_plain": limit_tls / limit,
        "tls_of_its_limit": rates["frames_tls"] / limit_tls,
        "own_cores": own_cores,
        "home_and_back_microseconds": {name: 1e6 * statistics.median(kept) for name, kept in back.items()},
        "seen_elsewhere_milliseconds": {
            where: {"median": 1e3 * float(np.median(taken)), "p99": 1e3 * float(np.percentile(taken, 99))}
            for where, taken in waited.items()
        },
        "exchange": workers,
    }


if __name__ == "__main__":
    main()
