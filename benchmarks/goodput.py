"""Eight workers, one slow, one at times, and one killed and replaced now and then: what is done a second, and how well?

    python benchmarks/goodput.py                        # some minutes; prints JSON
    python benchmarks/goodput.py --out results.json

Each mode trains for the same time. Worker 7 always takes four times as long for a minibatch, by sleeping, worker 6 ten
times as long for one in ten, and every 20 seconds one of the others, drawn from the seed, is killed; another process
takes its place. Loss and accuracy are those of the first read that has so many minibatches in it, in all modes alike.
Seeds differ in data, order and kills, and are the same for all modes. The tasks are those of ``tasks.py``.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import random
import signal
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

import multiverso as mv
from quorum import ERRATIC, SLOW, WORKERS
from reporting import give_report
from tasks import TASKS

MODES: dict[str, dict[str, Any]] = {
    "asynchronous": {},
    "staleness 4": {"staleness": 4},
    "synchronous": {"sync": True},
    "quorum 7": {"sync": True, "quorum": 7, "grace_seconds": "auto"},
    "quorum 6": {"sync": True, "quorum": 6, "grace_seconds": "auto"},
    "quorum 0.7": {"sync": True, "quorum": 0.7, "grace_seconds": "auto"},
}
# of Student's distribution, 97.5 %, by degrees of freedom
STUDENT = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26}


def train(mode: str, seed: int, options: argparse.Namespace, there: str) -> dict[str, Any]:
    """One worker; ``there``: a folder in which each says its process and when it began."""
    task = TASKS[options.task](seed)
    mv.init(**MODES[mode], timeout_seconds=60 + 2 * options.run_seconds, on_lost="continue")
    me, drawn = mv.worker_id(), np.random.default_rng([seed, mv.worker_id(), mv.incarnation()])
    # the weights, and how many minibatches are in them
    table = mv.ArrayTableHandler(task.weights.size + 1, np.append(task.weights, 0), dtype="float64")
    local = table.snapshot() if mv.incarnation() else table.get()
    last = local.copy()
    kept: np.ndarray | None = None
    if not mv.incarnation():
        mv.barrier()
    written = Path(there, f".{me}")
    written.write_text(f"{os.getpid()} {time.time()}")
    written.rename(Path(there, f"{me}-{mv.incarnation()}"))
    end = begun(there) + options.run_seconds
    while time.time() < end:
        until = time.perf_counter() + options.seconds * (
            options.slowed if me == SLOW else 10 if me == ERRATIC and drawn.random() < 0.1 else 1
        )
        local[:-1] -= task.rate * task.gradient(local[:-1], drawn)
        local[-1] += 1
        time.sleep(max(0.0, until - time.perf_counter()))
        table.exchange(local, last)
        if kept is None and local[-1] >= options.minibatches:
            kept = local.copy()
    ended, minibatches = time.time(), float(local[-1])
    mv.shutdown()
    loss, accuracy = task.score((local if kept is None else kept)[:-1])
    reached = None if kept is None else float(kept[-1])
    return {"ended": ended, "minibatches": minibatches, "reached": reached, "loss": loss, "accuracy": accuracy}


def begun(there: str) -> float:
    """When the first of the workers began."""
    return min(float(path.read_text().split()[1]) for path in Path(there).glob("?-*"))


def run(mode: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """One job, in which workers are killed; returns what it came to."""
    chance, killed, over = random.Random(seed), dict[Path, float](), threading.Event()
    with tempfile.TemporaryDirectory() as there:

        def kill_now_and_then() -> None:
            while not over.is_set() and len(list(Path(there).glob("?-*"))) < WORKERS:
                time.sleep(0.01)
            while not over.wait(options.every):
                worker = chance.randrange(1, ERRATIC)
                newest = max(Path(there).glob(f"{worker}-*"), key=lambda path: int(path.name.partition("-")[2]))
                if newest in killed:  # the next one has not come yet
                    continue
                with contextlib.suppress(ProcessLookupError):  # it has just ended
                    os.kill(int(newest.read_text().split()[0]), signal.SIGKILL)
                    killed[newest] = time.time()

        killer = threading.Thread(target=kill_now_and_then)
        killer.start()
        try:
            results = mv.run(
                train, WORKERS, (mode, seed, options, there), on_failure="continue", replace=100,
                timeout_seconds=options.run_seconds + 120,
            )  # fmt: skip
        finally:
            over.set()
            killer.join()
        told = {path.name: float(path.read_text().split()[1]) for path in Path(there).glob("?-*")}
    began = min(told.values())
    recovered = []
    for path, when in killed.items():
        worker, _, incarnation = path.name.partition("-")
        if (again := told.get(f"{worker}-{int(incarnation) + 1}")) is not None:
            recovered.append(again - when)
    ends = [found for found in results if isinstance(found, dict)]
    reached = [found for found in ends if found["reached"] is not None]
    if not reached:
        raise SystemExit(f"{mode} had {ends[0]['minibatches']:g} minibatches when it ended: give fewer --minibatches")
    last = max(ends, key=lambda found: found["ended"])
    first = min(reached, key=lambda found: found["reached"])
    return {
        "minibatches_a_second": last["minibatches"] / (last["ended"] - began),
        "kills": len(killed),
        "seconds_to_recover": recovered,
        "loss": first["loss"],
        "accuracy": 100 * first["accuracy"],
    }


def interval(values: list[float], digits: int) -> dict[str, float]:
    """The mean, and half of its 95 % interval."""
    mean = {"mean": round(statistics.fmean(values), digits)}
    if len(values) == 1:
        return mean
    half = STUDENT[len(values) - 1] * statistics.stdev(values) / len(values) ** 0.5
    return mean | {"plus_or_minus": round(half, digits)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", action="append", choices=MODES, help="only this one; may be given again")
    parser.add_argument("--task", default="softmax", choices=TASKS)
    parser.add_argument("--run-seconds", type=float, default=45, help="of each run")
    parser.add_argument("--minibatches", type=int, default=3000, help="with which loss and accuracy are compared")
    parser.add_argument("--seconds", type=float, default=0.02, help="of a minibatch")
    parser.add_argument("--slowed", type=float, default=4, help="how many times as long the slow worker takes")
    parser.add_argument("--every", type=float, default=20, help="seconds between two kills")
    parser.add_argument("--repeat", type=int, default=5, choices=range(1, 11), help="seeds")
    parser.add_argument("--out", type=Path, help="file for the JSON, too")
    options = parser.parse_args()
    runs = {mode: list[dict[str, Any]]() for mode in options.mode or MODES}
    for seed in range(options.repeat):
        for mode, found in runs.items():
            found.append(run(mode, seed, options))
    report: dict[str, Any] = {
        "what": f"worker {SLOW} of {WORKERS} is {options.slowed:g}x as slow, {ERRATIC} 10x in 1 of 10, one is killed "
        f"every {options.every:g} s and replaced",
        "machine": {"python": platform.python_version(), "processor": platform.machine()},
        "settings": {
            "task": options.task,
            "run_seconds": options.run_seconds,
            "minibatch_seconds": options.seconds,
            "loss_at_minibatches": options.minibatches,
            "seeds": options.repeat,
        },
        "modes": {},
    }
    for mode, found in runs.items():
        recovered = [seconds for one in found for seconds in one["seconds_to_recover"]]
        rate = interval([one["minibatches_a_second"] for one in found], 1)
        report["modes"][mode] = {
            "minibatches_a_second": rate,
            "kills": sum(one["kills"] for one in found),
            "seconds_to_recover": round(statistics.median(recovered), 2) if recovered else None,
            "validation_loss": interval([one["loss"] for one in found], 4),
            "validation_accuracy": interval([one["accuracy"] for one in found], 2),
        }
    first = next(iter(report["modes"].values()))["minibatches_a_second"]["mean"]
    for mode in report["modes"].values():
        mode["of_the_first_mode"] = round(mode["minibatches_a_second"]["mean"] / first, 3)
    give_report(report, options.out)


if __name__ == "__main__":
    main()
