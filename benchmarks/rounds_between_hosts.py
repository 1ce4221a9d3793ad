"""A synchronous round between two hosts beside gloo's all_reduce over the same link, in turns: JSON.

python benchmarks/rounds_between_hosts.py [--floats 1000000 10000000] [--times 10] [--output FILE]

Two hosts of one worker each, rehearsed on this machine: node, worker and gloo's threads of both share its cores, and
nothing is encrypted. The phases follow each other; the figures are medians of the slower worker.
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

_PORT = "MULTIVERSO_BENCHMARK_PORT"


def measure(floats: int, times: int) -> dict[str, list[float]]:
    """Returns the seconds of each exchange, each add with its get, and each all_reduce of this worker."""
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
        dist.all_reduce(tensor)

    phases: dict[str, Callable[[], Any]] = {
        "exchange": exchange,
        "add and get": add_and_get,
        "gloo all_reduce": all_reduce,
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
    table.close()
    return found


def work(sizes: list[int], times: int) -> None:
    """What each worker does; the first one prints."""
    import torch.distributed as dist

    import multiverso as mv

    mv.init(sync=True)
    me, workers = mv.worker_id(), mv.workers_num()
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{os.environ[_PORT]}", rank=me, world_size=workers)
    result = {}
    for floats in sizes:
        mine = measure(floats, times)
        everyone: list[Any] = [None] * workers
        dist.all_gather_object(everyone, mine)
        medians = {
            name: statistics.median(max(each[name][i] for each in everyone) for i in range(times)) * 1e3
            for name in mine
        }
        quicker = medians["gloo all_reduce"] / medians["exchange"]
        result[str(floats)] = {"ms": medians, "gloo / exchange": round(quicker, 2)}
    dist.destroy_process_group()
    mv.shutdown()
    if me == 0:
        print(json.dumps(result), flush=True)


def main() -> None:
    """Starts the job, or is one of its workers."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--floats", type=int, nargs="+", default=[1000, 1_000_000, 10_000_000])
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if _PORT in os.environ:
        work(options.floats, options.times)
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command = [sys.executable, "-m", "multiverso", "run", "--hosts", "2", "-n", "2", *sys.argv[:1]]
    command += ["--floats", *map(str, options.floats), "--times", str(options.times)]
    done = subprocess.run(
        command, env={**os.environ, _PORT: port}, stdout=subprocess.PIPE, check=True, text=True
    )
    report = {
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "floats": json.loads(done.stdout[done.stdout.index("{") :]),
    }
    text = json.dumps(report, indent=2)
    print(text)
    if options.output:
        options.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
