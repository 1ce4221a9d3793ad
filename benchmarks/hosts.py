"""Two hosts on this machine: frames beside one plain TCP stream, TLS beside plain, workers beside frames: JSON.

python benchmarks/hosts.py [--quick] [--output FILE]

Each host is a process; the same phases follow each other several times, so that a disturbance hits all of them, and
the figures are medians.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from multiverso import layout as at
from multiverso.consistency.port import Call
from multiverso.deadline import Deadline
from multiverso.hosts.credentials import Credentials, new_credentials
from multiverso.hosts.fabric import Fabric
from multiverso.kernels import dense
from multiverso.memory import heap, words
from multiverso.memory.segment import Segment
from multiverso.shards.shard import Shard, initialise
from multiverso.spec import Places, TableSpec

_PIECE = 4 << 20
_CHUNK = 1 << 18  # floats of a chunk
_DEADLINE_SECONDS = 60.0


def table(elements: int) -> Shard:
    """A table as a node makes it."""
    spec = TableSpec("array", 1, elements)
    descriptor = heap.create("benchmark", Places.of(spec, 2, False).size)
    try:
        memory = Segment(descriptor)
    finally:
        os.close(descriptor)
    initialise(memory.address, spec, 1, 2, at.ASYNCHRONOUS)
    return Shard(memory, spec, 2, at.ASYNCHRONOUS)


class Host:
    """One of two hosts, in a process of its own: does what it is told over a pipe."""

    def __init__(self, number: int, pipe: Connection) -> None:
        self.number, self.pipe = number, pipe

    def swap(self, mine: Any) -> Any:
        """Gives the other host something and returns what that gives: both wait for each other."""
        self.pipe.send(mine)
        return self.pipe.recv()

    def stream(self, seconds: float) -> float:
        """Bytes a second of one TCP stream from host 1 to host 0."""
        if self.number == 0:
            with socket.create_server(("127.0.0.1", 0)) as server:
                self.swap(server.getsockname())
                connection, _ = server.accept()
                view = memoryview(bytearray(_PIECE))
                got, began = 0, time.perf_counter()
                with connection:
                    while count := connection.recv_into(view):
                        got += count
                return got / (time.perf_counter() - began)
        with socket.create_connection(self.swap(None)) as connection:
            data, end = bytes(_PIECE), time.perf_counter() + seconds
            while time.perf_counter() < end:
                connection.sendall(data)
        return 0.0

    def fabric(self, job: Credentials, shard: Shard, share: float) -> Fabric:
        """Both hosts, connected, with one table."""
        made = Fabric(self.number, 2, job, share=share)
        address = self.swap(made.listen())
        if self.number == 1:
            made.connect(0, address)
        made.attach(1, shard)
        made.settle(Deadline.after(_DEADLINE_SECONDS))
        return made

    def frames(self, job: Credentials, elements: int, seconds: float) -> float:
        """Bytes a second that this host sends, without a pace, when every chunk always has something new."""
        shard = table(elements)
        with self.fabric(job, shard, 0.0) as made:
            values, end = shard.values(), time.perf_counter() + seconds
            self.swap(None)
            before, began = self._sent(made), time.perf_counter()
            while time.perf_counter() < end:
                values[:: _CHUNK // 4] += 1
                words.store64(shard.base + at.WRITTEN, words.load64(shard.base + at.WRITTEN) + 1)
                time.sleep(0.002)
            rate = (self._sent(made) - before) / (time.perf_counter() - began)
            self.swap(None)
        return rate

    def _sent(self, made: Fabric) -> int:
        return int(made.statistics()["peers"][1 - self.number]["bytes_sent"])

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

    def exchange(
        self, job: Credentials | None, elements: int, share: float, seconds: float
    ) -> dict[str, float]:
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


def serve(number: int, pipe: Connection) -> None:
    """What a host's process does."""
    host = Host(number, pipe)
    while True:
        what = pipe.recv()
        if what is None:
            return
        name, *arguments = what
        pipe.send(("done", getattr(host, name)(*arguments)))


class Both:
    """Both processes, and who carries what they swap."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipes, self.processes = [], []
        for number in range(2):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(number, theirs), daemon=True)
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
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    rounds, seconds = (1, 0.5) if options.quick else (3, 2.0)
    plain, tls = new_credentials(encrypted=False), new_credentials()
    both = Both()
    elements = 10 * _CHUNK
    rates = medians(
        rounds,
        {
            "stream": lambda: both.do("stream", seconds)[0],
            "plain": lambda: sum(both.do("frames", plain, elements, seconds)),
            "tls": lambda: sum(both.do("frames", tls, elements, seconds)),
        },
    )
    stream, frames, encrypted = (statistics.median(rates[name]) for name in ("stream", "plain", "tls"))
    back = medians(
        rounds,
        {
            "plain": lambda: both.do("home_and_back", plain, 300)[0],
            "tls": lambda: both.do("home_and_back", tls, 300)[0],
        },
    )
    sizes = [1_000, 1_000_000] if options.quick else [1_000, 1_000_000, 10_000_000]
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
            name: statistics.median(one["seconds"] for pair in kept for one in pair)
            for name, kept in runs.items()
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
    result = {
        "machine": {"cores": len(os.sched_getaffinity(0)), "load": os.getloadavg()[0]},
        "stream_megabytes_a_second": stream / 1e6,
        "frames_megabytes_a_second": frames / 1e6,
        "frames_of_stream": frames / stream,
        "tls_of_stream": encrypted / stream,
        "tls_of_plain": encrypted / frames,
        "home_and_back_microseconds": {name: 1e6 * statistics.median(kept) for name, kept in back.items()},
        "exchange": workers,
    }
    text = json.dumps(result, indent=1)
    if options.output:
        options.output.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    sys.exit(main())
