"""One of four workers is four times as slow: how long until the shared model is good, in each consistency?

    python benchmarks/straggler.py                 # about a minute; prints JSON
    python benchmarks/straggler.py --out results.json

Softmax regression on scikit-learn's digits. A minibatch takes as long as it is told to, by sleeping: 10 ms, and
40 ms in the slowed worker, so that neither the number of cores nor other work on the machine decides. Measured is
the time from the first minibatch until the shared parameters reach a fixed validation accuracy.
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

WORKERS = 4
SLOW = 3  # the slowed worker; the master is a quick one
MODES: dict[str, dict[str, Any]] = {
    "asynchronous": {},
    "staleness 16": {"staleness": 16},
    "staleness 4": {"staleness": 4},
    "synchronous": {"sync": True},
    "quorum 3": {"sync": True, "quorum": 3},
}


Data = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def load(seed: int = 0) -> Data:
    """Images with a 1 at their end and labels, to train on and to validate; ``seed`` chooses which."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = np.hstack([digits.data / 16, np.ones((len(digits.data), 1))]).astype(np.float32)
    order = np.random.default_rng(seed).permutation(len(images))
    train, validation = order[:1437], order[1437:]
    return images[train], digits.target[train], images[validation], digits.target[validation]


def gradient(weights: np.ndarray, images: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Of the mean cross-entropy of softmax(images @ weights)."""
    scores = images @ weights
    scores = np.exp(scores - scores.max(axis=1, keepdims=True))
    scores /= scores.sum(axis=1, keepdims=True)
    scores[np.arange(len(labels)), labels] -= 1
    slopes: np.ndarray = images.T @ scores / np.float32(len(labels))
    return slopes


def train(mode: str, slowed: float, seed: int, options: argparse.Namespace, data: Data) -> tuple[float, int]:
    """One worker, once; returns its seconds (the master's count) and minibatches."""
    images, labels, validation, validation_labels = data
    weights = np.zeros((images.shape[1], 10), np.float32)
    flat = weights.reshape(-1)
    mv.init(**MODES[mode], timeout_seconds=options.most)
    me = mv.worker_id()
    shared = mv.rules.share(flat)
    random = np.random.default_rng([seed, me])
    rows = mv.shard(len(labels), seed=seed)
    pause = options.seconds * (slowed if me == SLOW else 1)
    done = 0
    mv.barrier()
    began = time.perf_counter()
    while len(mv.live_workers()) == WORKERS:  # the master leaves when the model is good
        batch = random.choice(rows, 16)
        until = time.perf_counter() + pause
        weights -= np.float32(options.rate) * gradient(weights, images[batch], labels[batch])
        time.sleep(max(0.0, until - time.perf_counter()))
        shared.exchange(flat)
        done += 1
        if me == 0:
            centre = shared.table.snapshot().reshape(weights.shape)
            if ((validation @ centre).argmax(axis=1) == validation_labels).mean() >= options.target:
                break
            if time.perf_counter() - began > options.most:
                raise TimeoutError(
                    f"{mode}: no accuracy of {options.target} within {options.most} s; take a lower --target"
                )
    took = time.perf_counter() - began
    mv.shutdown()
    return took, done


def train_all(options: argparse.Namespace, data: Data) -> dict[tuple[str, float], list[tuple[float, int]]]:
    """One worker, every run of the report: a session of its own for each, in the same processes."""
    for mode in MODES:  # what is paid once is paid here
        train(mode, 1.0, 0, options, data)
    return {
        (mode, slowed): [train(mode, slowed, seed, options, data) for seed in range(options.repeat)]
        for slowed in (options.slowed, 1.0)
        for mode in MODES
    }


def medians(runs: list[dict[tuple[str, float], list[tuple[float, int]]]], slowed: float) -> dict[str, Any]:
    """Returns the median over the repetitions, for each consistency."""
    results = {}
    for mode in MODES:
        times = [seconds for seconds, _ in runs[0][mode, slowed]]
        results[mode] = {
            "seconds": round(statistics.median(times), 3),
            "fastest": round(min(times), 3),
            "slowest": round(max(times), 3),
            "minibatches_of_a_quick_worker": statistics.median(n for _, n in runs[0][mode, slowed]),
            "minibatches_of_the_slowed": statistics.median(n for _, n in runs[SLOW][mode, slowed]),
        }
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=float, default=0.94, help="validation accuracy to reach")
    parser.add_argument("--slowed", type=float, default=4, help="how many times as long the slowed worker takes")
    parser.add_argument("--seconds", type=float, default=0.01, help="of a minibatch")
    parser.add_argument("--rate", type=float, default=0.05, help="learning rate")
    parser.add_argument("--repeat", type=int, default=5, help="runs of each, whose median counts")
    parser.add_argument("--most", type=float, default=120, help="seconds after which a run is given up")
    parser.add_argument("--out", type=Path, help="file for the JSON, too")
    options = parser.parse_args()
    limit = options.most * options.repeat * 2 * len(MODES) + 300
    runs = mv.run(train_all, WORKERS, (options, load()), timeout_seconds=limit)
    with_straggler = medians(runs, options.slowed)
    alike = medians(runs, 1.0)
    report = {
        "what": f"seconds to {options.target:.0%} validation accuracy, worker {SLOW} of {WORKERS} "
        f"{options.slowed:g}x as slow",
        "machine": {"python": platform.python_version(), "processor": platform.machine()},
        "settings": {"minibatch_seconds": options.seconds, "rate": options.rate, "repeat": options.repeat},
        "one_slowed": with_straggler,
        "all_alike": alike,
        "times_faster_than_synchronous": {
            mode: round(with_straggler["synchronous"]["seconds"] / result["seconds"], 2)
            for mode, result in with_straggler.items()
        },
        "slowdown_by_the_straggler": {
            mode: round(result["seconds"] / alike[mode]["seconds"], 2) for mode, result in with_straggler.items()
        },
    }
    give_report(report, options.out)


if __name__ == "__main__":
    main()
