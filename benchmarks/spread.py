"""Rows by key on two hosts beside one: how many rows a second workers read and add to, and what a miss costs: JSON.

[sudo] python benchmarks/spread.py [--quick] [--rate 1gbit] [--output FILE]

Each worker reads and adds to 1,000 rows at a time of a table of 10 million, whose keys follow Zipf's law with exponent
1.05; each host keeps copies of 1 % of them. ``alone`` does nothing else, ``steps of 5 ms`` sleeps so long in between,
as a step on an accelerator takes. One host has one worker, two hosts have one each: a rehearsal, so all share this
machine's cores, the nodes too. With ``--rate`` all that passes between the hosts goes through one token bucket, both
directions together, in a network of this process's own (root). ``miss`` asks for rows that have no copy.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import multiverso as mv

BATCH, DIM, EXPONENT = 1000, 64, 1.05


def zipf(rows: int, batches: int, seed: int) -> Any:
    """Returns batches of different keys, (batches, at most BATCH) each."""
    random = np.random.default_rng(seed)
    ends = np.cumsum(np.arange(1, rows + 1, dtype=np.float64) ** -EXPONENT)
    drawn = np.searchsorted(ends, random.random((batches, BATCH)) * ends[-1])
    return [np.unique(keys) * 2654435761 for keys in drawn]


def train(rows: int, seconds: float, prefetches: bool, step_seconds: float) -> tuple[int, float]:
    """In a worker: reads and adds to batches for so long; returns how many rows, and in what time."""
    mv.init()
    table = mv.KeyedTable(DIM, updater="sgd", cache_rows=rows // 100)
    batches = zipf(rows, 5000, 1 + mv.worker_id())  # mostly more than are used
    deltas = np.full((BATCH, DIM), 1e-3, np.float32)
    done, step, began = 0, 0, 0.0
    mv.barrier()
    end = time.monotonic() + seconds / 2  # which is not counted: rows get their memory, copies come
    for counted in (False, True):
        done, began = 0, time.monotonic()
        end = began + (seconds if counted else seconds / 2)
        while time.monotonic() < end:
            keys = batches[step % len(batches)]
            if prefetches:
                table.prefetch(batches[(step + 1) % len(batches)])
            table.get(keys)
            if step_seconds:
                time.sleep(step_seconds)
            table.add(deltas[: keys.size], keys)
            done += keys.size
            step += 1
    taken = time.monotonic() - began
    mv.barrier()
    return done, taken


def rows_a_second(hosts: int, rows: int, seconds: float, prefetches: bool, step_seconds: float) -> float:
    """Starts a job of a worker on each host; returns how many rows they read and added to in a second."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = [str(rows), str(seconds), str(int(prefetches)), str(step_seconds)]
        where = ["--hosts", str(hosts)] if hosts > 1 else []
        command = [sys.executable, "-m", "multiverso", "run", *where, "-n", str(hosts), __file__, "--train", *arguments]
        subprocess.run(command, cwd=folder, check=True, timeout=120 + 10 * seconds, stdout=subprocess.DEVNULL)
        found = [json.loads(path.read_text()) for path in Path(folder).glob("worker-*.json")]
    return float(sum(done / taken for done, taken in found))


def timed(call: Callable[[int], Any], times: int) -> float:
    """Returns the median of seconds that a call takes."""
    taken = []
    for number in range(times):
        began = time.monotonic()
        call(number)
        taken.append(time.monotonic() - began)
    return statistics.median(taken)


def calls(times: int) -> dict[str, float]:
    """In a worker: seconds of single calls on rows that live here, have a copy here, or have none."""
    mv.init()
    table = mv.KeyedTable(DIM, updater="sgd", cache_rows=1 << 20)
    mv.barrier()
    found: dict[str, float] = {}
    if mv.worker_id() == 0:
        every = np.arange(1 << 19) * 2654435761
        far = every[~table.contains(every) & ~_is_here(table, every)] if mv.workers_num() > 1 else every
        near = every[_is_here(table, every)][:BATCH]
        ones = np.ones((BATCH, DIM), np.float32)
        table.add(ones, near)
        for name, keys in (("here", near), ("copy", far[-BATCH:])):
            table.add(ones, keys)
            found[f"get 1000 {name}"] = timed(partial(_get, table, keys), times)
            found[f"add 1000 {name}"] = timed(partial(_add, table, keys, ones), times)
        if mv.workers_num() > 1:
            found["miss 1"] = timed(lambda n: table.get(far[n : n + 1]), times)
            found["miss 1000"] = timed(lambda n: table.get(far[BATCH * (n + 1) :][:BATCH]), min(times, 200))
    mv.barrier()
    return found


def _get(table: mv.KeyedTable, keys: Any, _: int) -> None:
    table.get(keys)


def _add(table: mv.KeyedTable, keys: Any, delta: Any, _: int) -> None:
    table.add(delta, keys)


def _is_here(table: mv.KeyedTable, keys: Any) -> Any:
    """Returns whether keys live on this host."""
    desk = getattr(table._calls, "desk", None)
    if desk is None:
        return np.ones(keys.size, np.bool_)
    from multiverso.hosts.spread.placement import groups_of

    return desk.here[groups_of(keys)] != 0


def limit(rate: str) -> None:
    """What passes between the hosts has a network of its own from here on."""
    from namespaces import own_loopback

    own_loopback()
    command = ["tc", "qdisc", "add", "dev", "lo", "root", "tbf", "rate", rate, "burst", "512k", "latency", "50ms"]
    subprocess.run(command, check=True)


def main() -> None:
    """Prints JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--seconds", type=float, default=10.0, help="each variant")
    parser.add_argument("--repeats", type=int, default=3, help="of each variant, in turns")
    parser.add_argument("--rate", help="of what connects the hosts, as tc names it; needs root")
    parser.add_argument("--quick", action="store_true", help="small and short: whether it runs, not figures")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--train", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        rows, seconds, prefetches, step = options.train
        result = train(int(rows), float(seconds), bool(int(prefetches)), float(step))
        Path(f"worker-{mv.worker_id()}.json").write_text(json.dumps(result))
        return
    if options.quick:
        options.rows, options.seconds, options.repeats = 100_000, 0.5, 1
    if options.rate:
        limit(options.rate)
    steps = 0.005
    variants = {
        "alone, one host": (1, False, 0.0),
        "alone, two hosts": (2, False, 0.0),
        "steps of 5 ms, one host": (1, False, steps),
        "steps of 5 ms, two hosts": (2, False, steps),
        "steps of 5 ms, two hosts, prefetched": (2, True, steps),
    }
    runs: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(options.repeats):
        for name, (hosts, prefetches, seconds) in variants.items():
            runs[name].append(rows_a_second(hosts, options.rows, options.seconds, prefetches, seconds))
    rates = {name: statistics.median(found) for name, found in runs.items()}
    alone, two = (mv.run(calls, hosts, args=(20 if options.quick else 1000,), hosts=hosts)[0] for hosts in (1, 2))
    text = json.dumps(
        {
            "processors": os.cpu_count(),
            "load": os.getloadavg()[0],
            "rate": options.rate,
            "rows": options.rows,
            "dim": DIM,
            "rows_per_second": {name: round(rate) for name, rate in rates.items()},
            "beside_one_host": {
                name: round(rate / rates[f"{name.split(', ')[0]}, one host"], 2) for name, rate in rates.items()
            },
            "microseconds": {name: round(1e6 * seconds, 1) for name, seconds in two.items()},
            "microseconds_on_one_host": {name: round(1e6 * seconds, 1) for name, seconds in alone.items()},
        },
        indent=2,
    )
    sys.stdout.write(text + "\n")
    if options.output:
        options.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
