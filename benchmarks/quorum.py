"""Eight workers, one always four times as slow, one ten times for one minibatch in ten: how many minibatches a second?

    python benchmarks/quorum.py                 # about a minute; prints JSON
    python benchmarks/quorum.py --out results.json
    python benchmarks/quorum.py --hosts 2       # a rehearsal of two hosts, four workers each

A minibatch takes as long as it is told to, by sleeping, so that neither the number of cores nor other work on the
machine decides. It counts once its exchange has returned: then its add is in the table. The modes take turns in the
same processes. How often each worker was late for a round is told, too.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

import multiverso as mv
from reporting import give_report

WORKERS = 8
SLOW, ERRATIC = 7, 6
SIZE = 10_000
MODES: dict[str, dict[str, Any]] = {
    "asynchronous": {},
    "staleness 4": {"staleness": 4},
    "synchronous": {"sync": True},
    "quorum 7": {"sync": True, "quorum": 7},
    "quorum 6": {"sync": True, "quorum": 6},
    "quorum 6, grace 5 ms": {"sync": True, "quorum": 6, "grace_seconds": 0.005},
    "quorum 6, grace auto": {"sync": True, "quorum": 6, "grace_seconds": "auto"},
}


def train(mode: str, seed: int, options: argparse.Namespace) -> tuple[float, int, int]:
    """One worker, once; returns its seconds (the master's count), its minibatches, and how often it was late."""
    mv.init(**MODES[mode], timeout_seconds=300)
    me = mv.worker_id()
    table = mv.ArrayTableHandler(SIZE)
    random = np.random.default_rng([seed, me])
    local = table.snapshot()
    last = local.copy()
    done = 0
    mv.barrier()
    began = time.perf_counter()
    # the master leaves when the time is over
    while len(mv.live_workers()) == WORKERS and not (me == 0 and time.perf_counter() - began > options.duration):
        factor = options.slowed if me == SLOW else 10 if me == ERRATIC and random.random() < 0.1 else 1
        time.sleep(options.seconds * factor)
        local += 1
        table.exchange(local, last)
        done += 1
    took = time.perf_counter() - began
    late = mv.stats()["tables"][1]["late"]
    mv.shutdown()
    return took, done, late


def train_all(options: argparse.Namespace) -> dict[str, list[tuple[float, int, int]]]:
    """One worker, every run, in turns: a session of its own for each, in the same processes."""
    results: dict[str, list[tuple[float, int, int]]] = {mode: [] for mode in MODES}
    for seed in range(options.repeat):
        for mode in MODES:
            results[mode].append(train(mode, seed, options))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0.02, help="of a minibatch")
    parser.add_argument("--slowed", type=float, default=4, help="how many times as long the slow worker takes")
    parser.add_argument("--duration", type=float, default=3, help="seconds of a run")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each, whose median counts")
    parser.add_argument("--hosts", type=int, default=1)
    parser.add_argument("--out", type=Path, help="file for the JSON, too")
    options = parser.parse_args()
    limit = (options.duration + 5) * options.repeat * len(MODES) + 300
    if options.hosts == 1:
        runs = mv.run(train_all, WORKERS, (options,), timeout_seconds=limit)
    else:  # a job on several hosts begins once
        runs = [{mode: [] for mode in MODES} for _ in range(WORKERS)]
        for seed in range(options.repeat):
            for mode in MODES:
                job = mv.run(train, WORKERS, (mode, seed, options), hosts=options.hosts, timeout_seconds=limit)
                for mine, found in zip(runs, job, strict=True):
                    mine[mode].append(found)
    slowed = 1 / options.seconds * (WORKERS - 2 + 1 / options.slowed + 1 / 1.9)
    report: dict[str, Any] = {
        "what": f"minibatches a second: {SLOW} of {WORKERS} is {options.slowed:g}x as slow, {ERRATIC} 10x in 1 of 10",
        "machine": {"python": platform.python_version(), "processor": platform.machine()},
        "settings": {
            "minibatch_seconds": options.seconds,
            "seconds": options.duration,
            "repeat": options.repeat,
            "hosts": options.hosts,
        },
        "if_nobody_waited": round(slowed, 1),
        "modes": {},
    }
    for mode in MODES:
        done = [sum(one[mode][turn][1] for one in runs) for turn in range(options.repeat)]
        rates = [each / took for each, (took, *_) in zip(done, runs[0][mode], strict=True)]
        report["modes"][mode] = {
            "minibatches_a_second": round(statistics.median(rates), 1),
            "of_what_is_possible": round(statistics.median(rates) / slowed, 3),
            "runs": [round(rate, 1) for rate in rates],
            "minibatches_of_each": [statistics.median(run[1] for run in one[mode]) for one in runs],
            "late_of_each": [statistics.median(run[2] for run in one[mode]) for one in runs],
        }
    give_report(report, options.out)


if __name__ == "__main__":
    main()
