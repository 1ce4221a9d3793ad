"""A synchronous round between two hosts beside gloo's all_reduce over the same link, in turns: JSON.

python benchmarks/rounds_between_hosts.py [--floats 1000000 10000000] [--times 10] [--workers N] [--link RATE]

Two hosts of ``--workers`` workers each, rehearsed on this machine: nodes, workers and gloo's threads of both share its
cores, and nothing is encrypted. gloo reduces among all workers of both hosts, as a user's program would. In each phase
all workers end with the sum over all of them, which is looked at first. The phases follow each other; the figures are
medians of the slowest worker. Each phase is then repeated by itself, for the processor's time of the whole job.

The *floor* of an exchange is measured beside it: the passes over memory that its workers and nodes make, all at once
and with nothing else, and as many bytes both ways through one TCP connection between the hosts.

With ``--link`` (as root), such as ``1gbit``, each host is in a network namespace of its own, and the link between them
carries so much in each direction. ``--control`` is how TCP decides how much it sends there.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from namespaces import ADDRESSES, congestion_control, two_hosts
from processes import processor_seconds
from reporting import give_report

_MEETING, _ROOT = "MULTIVERSO_BENCHMARK_MEETING", "MULTIVERSO_BENCHMARK_ROOT"
_CHUNK = 1 << 17  # floats of a chunk


class Floor:
    """What an exchange has to do at least: each worker's passes, and for the first one of a host also its node's."""

    def __init__(self, workers: int, address: str) -> None:
        import torch.distributed as dist

        self.workers, here = workers // 2, dist.get_rank()
        self.node = here % self.workers == 0
        listener = socket.create_server((address, 0)) if here == 0 else None
        found = [listener.getsockname() if listener else None]
        dist.broadcast_object_list(found)
        if listener is not None:
            self.other, _ = listener.accept()
            listener.close()
        elif self.node:
            self.other = socket.create_connection(found[0])  # type: ignore[arg-type]
        self.sending = ThreadPoolExecutor(1)
        self.sums, self.received = np.zeros(_CHUNK, np.float32), np.zeros(_CHUNK, np.float32)

    def passes(self, local: Any, last: Any, slot: Any, values: Any) -> None:
        """The difference into the slot; by the node all slots into a sum, and the total to the workers; both arrays."""
        np.subtract(local, last, out=slot)
        for low in range(0, local.size, self.sums.size):
            part = slice(low, min(low + self.sums.size, local.size))
            total = self.sums[: part.stop - low]
            if self.node:
                for _ in range(self.workers):
                    np.add(total, slot[part], out=total)
                np.copyto(values[part], total)
            np.copyto(local[part], values[part])
            np.copyto(last[part], values[part])

    def stream(self, floats: int) -> None:
        """As many bytes to the other host as come from there, in memory that is in the cache."""
        if self.node:
            pieces = [min(self.sums.size, floats - low) for low in range(0, floats, self.sums.size)]

            def send() -> None:
                for size in pieces:
                    self.other.sendall(self.sums[:size].data.cast("B"))

            sending = self.sending.submit(send)
            for size in pieces:
                self.other.recv_into(self.received[:size].data.cast("B"), 0, socket.MSG_WAITALL)
            sending.result()

    def close(self) -> None:
        """Ends the connection and the thread."""
        self.sending.shutdown()
        if self.node:
            self.other.close()


def measure(reducer: Any, floor: Floor, floats: int, times: int) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Returns the seconds of each exchange, each add with its get, and each all_reduce of this worker.

    And the processor's seconds of one of each, of all processes together.
    """
    import torch
    import torch.distributed as dist

    import multiverso as mv

    table = mv.ArrayTableHandler(floats)
    local, last = np.zeros(floats, np.float32), np.zeros(floats, np.float32)
    delta, out = np.ones(floats, np.float32), np.empty(floats, np.float32)
    tensor = torch.ones(floats)

    def add_and_get() -> None:
        table.add(delta)
        table.get(out)

    def exchange() -> None:
        table.exchange(local, last)

    def all_reduce() -> None:
        reducer.all_reduce(delta, "sum", out)

    def gloo() -> None:
        dist.all_reduce(tensor)

    mine = [np.ones(floats, np.float32) for _ in range(4)]

    def passes() -> None:
        floor.passes(*mine)

    def stream() -> None:
        floor.stream(floats)

    phases: dict[str, Callable[[], Any]] = {
        "exchange": exchange,
        "add and get": add_and_get,
        "all_reduce": all_reduce,
        "gloo all_reduce": gloo,
    }
    look_at_sums(phases, {"exchange": local, "add and get": out, "all_reduce": out, "gloo all_reduce": tensor.numpy()})
    phases |= {"passes": passes, "stream": stream}
    found: dict[str, list[float]] = {name: [] for name in phases}
    for turn in range(times + 1):
        for name, phase in phases.items():
            dist.barrier()
            local += 1
            began = time.perf_counter()
            phase()
            if turn:
                found[name].append(time.perf_counter() - began)
    used: dict[str, float] = {}
    repeats = times * max(1, min(50, 1_000_000 // floats))
    root = int(os.environ[_ROOT])
    for name, phase in phases.items():
        before = processor_seconds(root) if dist.get_rank() == 0 else 0.0
        dist.barrier()
        for _ in range(repeats):
            phase()
        dist.barrier()
        used[name] = (processor_seconds(root) - before) / repeats if dist.get_rank() == 0 else 0.0
    table.close()
    return found, used


def look_at_sums(phases: dict[str, Callable[[], Any]], results: dict[str, Any]) -> None:
    """Goes through each phase once: raises unless this worker then has the sum of what all have given."""
    import torch.distributed as dist

    results["exchange"] += 1
    workers = dist.get_world_size()
    for name, phase in phases.items():
        phase()
        before = workers if name == "add and get" else 0.0  # the exchange has been in the table
        if not (results[name] == workers + before).all():
            raise SystemExit(f"{name}: {results[name]} is not the sum over {workers} workers")
    results["gloo all_reduce"][:] = 0  # it is reduced in place, and would grow


def work(sizes: list[int], times: int) -> None:
    """What each worker does; the first one prints."""
    import torch.distributed as dist

    import multiverso as mv
    from multiverso.runtime.collective.reducer import Reducer
    from multiverso.runtime.session.current import current

    mv.init(sync=True)
    me, workers = mv.worker_id(), mv.workers_num()
    reducer = Reducer(current(), workers)
    dist.init_process_group("gloo", f"tcp://{os.environ[_MEETING]}", rank=me, world_size=workers)
    floor = Floor(workers, os.environ[_MEETING].rpartition(":")[0])
    result = {}
    for floats in sizes:
        mine, used = measure(reducer, floor, floats, times)
        everyone: list[Any] = [None] * workers
        dist.all_gather_object(everyone, mine)
        medians = {
            name: statistics.median(max(each[name][i] for each in everyone) for i in range(times)) * 1e3
            for name in mine
        }
        medians["floor"] = medians["passes"] + medians["stream"]
        quicker = {
            f"gloo / {name}": round(medians["gloo all_reduce"] / medians[name], 2)
            for name in ("exchange", "all_reduce", "floor")
        }
        processor = {name: seconds * 1e3 for name, seconds in used.items()}
        result[str(floats)] = {"ms": medians, "processor ms": processor, **quicker}
    floor.close()
    dist.destroy_process_group()
    mv.shutdown()
    if me == 0:
        print(json.dumps(result), flush=True)


@contextlib.contextmanager
def hosts_of(rate: str | None, control: str) -> Iterator[tuple[list[str], str, str]]:
    """Gives the launcher's options for two hosts, where they meet for gloo, and the link in words.

    Args:
        rate: of the link between them in each direction; None: they are a rehearsal's, over the loopback device.
        control: how TCP decides how much it sends over the link.
    """
    if rate is None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            meeting = f"127.0.0.1:{probe.getsockname()[1]}"
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        yield ["--hosts", "2"], meeting, "loopback"
        return
    with two_hosts(rate, control) as names, tempfile.TemporaryDirectory() as folder:
        enter = Path(folder) / "enter"  # in ssh's place
        entering = f'exec ip netns exec {names[0][:-1]}$host env GLOO_SOCKET_IFNAME=v$host sh -c "$2"'
        enter.write_text(f"#!/bin/sh\nhost=$((${{1##*.}} - 1))\n{entering}\n")
        enter.chmod(0o755)
        options = ["--hosts", ",".join(ADDRESSES), "--ssh", str(enter), "--port", "29400"]
        yield options, f"{ADDRESSES[0]}:29401", f"{rate} each way"


def main() -> None:
    """Starts the job, or is one of its workers."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--floats", type=int, nargs="+", default=[1000, 1_000_000, 10_000_000])
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--workers", type=int, default=1, help="of each host")
    parser.add_argument("--link", help="limit of each direction of the link between the hosts; needs root")
    parser.add_argument("--control", default=congestion_control(), help="TCP's congestion control on that link")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if _MEETING in os.environ:
        work(options.floats, options.times)
        return
    with hosts_of(options.link, options.control) as (on, meeting, link):
        command = [sys.executable, "-m", "multiverso", "run", *on, "-n", str(2 * options.workers)]
        command += ["--insecure-fabric", sys.argv[0]]
        command += ["--floats", *map(str, options.floats), "--times", str(options.times)]
        environment = {**os.environ, _MEETING: meeting, _ROOT: str(os.getpid()), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True)
    report = {
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "workers of each host": options.workers,
        "link": link,
        "floats": json.loads(done.stdout[done.stdout.index("{") : done.stdout.rindex("}") + 1]),
    }
    give_report(report, options.output, indent=2)


if __name__ == "__main__":
    main()
