"""A synchronous round between two hosts beside gloo's all_reduce over the same link, in turns: JSON.

python benchmarks/rounds_between_hosts.py [--floats 1000000 10000000] [--times 10] [--link RATE] [--output FILE]

Two hosts of one worker each, rehearsed on this machine: node, worker and gloo's threads of both share its cores, and
nothing is encrypted. The phases follow each other; the figures are medians of the slower worker. Each phase is then
repeated by itself, for the processor time of all processes of the job. ``--link`` (as root) limits what both
directions of the loopback device carry together, such as ``2gbit``.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from namespaces import congestion_control, limit_loopback, own_loopback
from processes import processor_seconds

_PORT, _ROOT = "MULTIVERSO_BENCHMARK_PORT", "MULTIVERSO_BENCHMARK_ROOT"


def measure(reducer: Any, floats: int, times: int) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Returns the seconds of each exchange, each add with its get, and each all_reduce of this worker.

    And the processor's seconds of one of each, of all processes together.
    """
    import torch
    import torch.distributed as dist

    import multiverso as mv

    table = mv.ArrayTableHandler(floats)
    local, last = np.zeros(floats, np.float32), np.zeros(floats, np.float32)
    delta, out = np.ones(floats, np.float32), np.empty(floats, np.float32)
    tensor = torch.zeros(floats)

    def add_and_get() -> None:
        table.add(delta)
        table.get(out)

    def exchange() -> None:
        table.exchange(local, last)

    def all_reduce() -> None:
        reducer.all_reduce(delta, "sum", out)

    def gloo() -> None:
        dist.all_reduce(tensor)

    phases: dict[str, Callable[[], Any]] = {
        "exchange": exchange,
        "add and get": add_and_get,
        "all_reduce": all_reduce,
        "gloo all_reduce": gloo,
    }
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


def work(sizes: list[int], times: int) -> None:
    """What each worker does; the first one prints."""
    import torch.distributed as dist

    import multiverso as mv
    from multiverso.runtime.collective.reducer import Reducer
    from multiverso.runtime.session.current import current

    mv.init(sync=True)
    me, workers = mv.worker_id(), mv.workers_num()
    reducer = Reducer(current(), workers)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{os.environ[_PORT]}", rank=me, world_size=workers)
    result = {}
    for floats in sizes:
        mine, used = measure(reducer, floats, times)
        everyone: list[Any] = [None] * workers
        dist.all_gather_object(everyone, mine)
        medians = {
            name: statistics.median(max(each[name][i] for each in everyone) for i in range(times)) * 1e3
            for name in mine
        }
        quicker = {
            f"gloo / {name}": round(medians["gloo all_reduce"] / medians[name], 2)
            for name in ("exchange", "all_reduce")
        }
        processor = {name: seconds * 1e3 for name, seconds in used.items()}
        result[str(floats)] = {"ms": medians, "processor ms": processor, **quicker}
    dist.destroy_process_group()
    mv.shutdown()
    if me == 0:
        print(json.dumps(result), flush=True)


def main() -> None:
    """Starts the job, or is one of its workers."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--floats", type=int, nargs="+", default=[1000, 1_000_000, 10_000_000])
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--link", help="limit of both directions of the loopback device together; needs root")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if _PORT in os.environ:
        work(options.floats, options.times)
        return
    if options.link:
        own_loopback(congestion_control())
        limit_loopback(options.link)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command = [sys.executable, "-m", "multiverso", "run", "--hosts", "2", "-n", "2"]
    command += ["--insecure-fabric", sys.argv[0]]
    command += ["--floats", *map(str, options.floats), "--times", str(options.times)]
    environment = {**os.environ, _PORT: port, _ROOT: str(os.getpid()), "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True)
    report = {
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "link": options.link or "loopback",
        "floats": json.loads(done.stdout[done.stdout.index("{") :]),
    }
    text = json.dumps(report, indent=2)
    print(text)
    if options.output:
        options.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
