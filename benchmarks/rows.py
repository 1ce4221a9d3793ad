"""Rows of a matrix against the machine's limits, in one run: prints JSON.

python benchmarks/rows.py [--quick] [--output FILE] [--old PYTHON]

`--old` is the interpreter of another version's environment, whose tables are measured in turns with these.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import multiverso as mv

ROWS, COLUMNS = 100_000, 64
BATCHES = (100, 1_000, 10_000)
KINDS = ("uniform", "zipf")


def ids_of(kind: str, batch: int, seed: int) -> Any:
    """Random row ids: uniform, or by Zipf's law with exponent 1 over shuffled rows."""
    random = np.random.default_rng(seed)
    if kind == "uniform":
        return random.integers(0, ROWS, batch)
    weights = np.cumsum(1.0 / np.arange(1, ROWS + 1))
    ranks = np.searchsorted(weights, random.random(batch) * weights[-1])
    return np.random.default_rng(0).permutation(ROWS)[ranks]


def turns(
    calls: dict[str, Callable[[Any], object]], lots: list[Any], seconds: float
) -> dict[str, list[float]]:
    """Times calls in turns over several lots of ids: nanoseconds a row, 10th percentile and median."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    end, turn = time.perf_counter() + seconds, 0
    for call in calls.values():
        call(lots[0])
    while time.perf_counter() < end or turn < 20:
        lot = lots[turn % len(lots)]
        turn += 1
        for name, call in calls.items():
            began = time.perf_counter_ns()
            call(lot)
            samples[name].append((time.perf_counter_ns() - began) / lot.size)
    return {
        name: [round(float(np.percentile(times, q)), 2) for q in (10, 50)] for name, times in samples.items()
    }


def one_worker(batch: int, kind: str, seconds: float, private: bool = True) -> dict[str, Any]:
    """A table beside private memory; without ``private``, the table and NumPy alone (any version)."""
    mv.init()
    table = mv.MatrixTableHandler(ROWS, COLUMNS)
    memory = np.random.default_rng(0).standard_normal((ROWS, COLUMNS), dtype="f4")
    table.add(memory)
    lots = [ids_of(kind, batch, seed) for seed in range(32)]
    delta, out, taken = (np.zeros((batch, COLUMNS), "f4") for _ in range(3))
    calls: dict[str, Callable[[Any], object]] = {
        "take": lambda ids: np.take(memory, ids, axis=0, out=taken, mode="clip"),
        "get": lambda ids: table.get(ids, out=out),
        "add": lambda ids: table.add(delta, ids),
    }
    if private:
        from multiverso.bench import limits

        ahead = limits.scatter_add_ahead.compiled("float32")
        plain = limits.scatter_add.compiled("float32")
        flat, flat_delta = memory.reshape(-1), delta.reshape(-1)
        calls["private add, ahead"] = lambda ids: ahead(flat, COLUMNS, ids, flat_delta)
        calls["private add, plain"] = lambda ids: plain(flat, COLUMNS, ids, flat_delta)
    found = turns(calls, lots, seconds)
    mv.shutdown()
    return found


def together(batch: int, kind: str, seconds: float) -> dict[str, float]:
    """One of several workers: rows a second that it reads, and that it adds to, while the others do."""
    mv.init()
    table = mv.MatrixTableHandler(ROWS, COLUMNS)
    lots = [ids_of(kind, batch, 100 * mv.worker_id() + seed) for seed in range(32)]
    delta, out = np.zeros((batch, COLUMNS), "f4"), np.zeros((batch, COLUMNS), "f4")
    rates = {}
    calls: dict[str, Callable[[Any], object]] = {
        "get": lambda ids: table.get(ids, out=out),
        "add": lambda ids: table.add(delta, ids),
    }
    for name, call in calls.items():
        for lot in lots:
            call(lot)
        mv.barrier()
        number, began = 0, time.perf_counter()
        while time.perf_counter() - began < seconds:
            call(lots[number % len(lots)])
            number += 1
        rates[name] = number * batch / (time.perf_counter() - began)
        mv.barrier()
    mv.shutdown()
    return rates


def of_another_version(python: str, batch: int, kind: str, seconds: float) -> dict[str, Any]:
    """The same table in another environment, by this file."""
    command = [python, __file__, "--one", str(batch), kind, str(seconds)]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return found


def speed_up(batch: int, kind: str, seconds: float, repeats: int) -> dict[str, Any]:
    """Rows a second of two workers against one, in turns."""
    rates: dict[int, dict[str, list[float]]] = {n: {"get": [], "add": []} for n in (1, 2)}
    for _ in range(repeats):
        for number in (1, 2):
            workers = mv.run(together, number, (batch, kind, seconds))
            for name in ("get", "add"):
                rates[number][name].append(sum(worker[name] for worker in workers))
    return {
        name: {
            "one_worker_rows_a_second": statistics.median(rates[1][name]),
            "two_workers_rows_a_second": statistics.median(rates[2][name]),
            "speed_up": statistics.median(rates[2][name]) / statistics.median(rates[1][name]),
        }
        for name in ("get", "add")
    }


def ratios(found: dict[str, Any]) -> dict[str, float]:
    """Of the medians, and where they are there of the 10th percentiles."""
    pairs = {"get / take": ("get", "take"), "add / private add, ahead": ("add", "private add, ahead")}
    pairs["add / private add, plain"] = ("add", "private add, plain")
    return {
        name: round(found[above][1] / found[below][1], 3)
        for name, (above, below) in pairs.items()
        if above in found and below in found
    }


def main() -> None:
    """Prints JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--output")
    parser.add_argument("--old", help="another version's interpreter")
    parser.add_argument("--one", nargs=3, metavar=("BATCH", "KIND", "SECONDS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        batch, kind, seconds = options.one
        print(json.dumps(one_worker(int(batch), kind, float(seconds), private=False)))
        return
    seconds = 0.3 if options.quick else 2.0
    cases = []
    for kind in KINDS:
        for batch in BATCHES:
            found = one_worker(batch, kind, seconds)
            case = {"ids": kind, "batch": batch, "nanoseconds_a_row": found, "ratios": ratios(found)}
            if options.old:
                old = of_another_version(options.old, batch, kind, seconds)
                case["old_nanoseconds_a_row"] = old
            cases.append(case)
            print(json.dumps(case), file=sys.stderr, flush=True)
    result = {
        "rows": ROWS,
        "columns": COLUMNS,
        "what": "nanoseconds a row: 10th percentile and median",
        "one_worker": cases,
        "two_workers": {
            kind: speed_up(1_000, kind, seconds / 2, 3 if options.quick else 5) for kind in KINDS
        },
    }
    text = json.dumps(result, indent=1)
    print(text)
    if options.output:
        with open(options.output, "w") as file:
            file.write(text + "\n")


if __name__ == "__main__":
    main()
