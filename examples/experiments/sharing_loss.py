"""What does sharing cost in accuracy? Paired runs: 4 workers against 1, for each rule and interval.

    python examples/experiments/sharing_loss.py --out docs/results        # all: some minutes on two cores

All 1,797 digits in 5 folds; for each seed and fold, one worker alone and four workers together train the same
network from the same initial values, and their final (not best) accuracies are compared. An epoch is all workers
going through the training images once. The unit is the seed: its folds are averaged, and the mean over seeds
has a 95 % interval of Student's t. Model and gradient are NumPy, so that the whole grid is a matter of minutes.

Written to --out: sharing_loss.json (settings and results), sharing_loss.csv (one line for each run) and
sharing_loss_epochs.csv (accuracy after each epoch, in the mean of all seeds and folds); --name calls them otherwise.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import platform
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
from plan import MODES, parse_rule

import multiverso as mv

WORKERS = 4
FOLDS = 5
EVERY = (1, 3, 10)
SIZES = (64, 64, 10)


@dataclass(frozen=True)
class Settings:
    """Fixed before the run; nothing was tuned."""

    batch: int = 16
    epochs: int = 30
    rate: float = 0.1
    drops: tuple[int, ...] = (15, 22)  # epochs from which the rate is a tenth: the originals' 41 and 61 of 82


@dataclass(frozen=True)
class Way:
    """A rule, a consistency, and what the workers' rate is multiplied by."""

    rule: str
    mode: str
    factor: float = 1.0

    def at(self, every: int) -> tuple[mv.rules.Rule, int]:
        """Returns the rule and how many minibatches lie between exchanges."""
        if self.rule == "downpour":  # pushes each minibatch, fetches at the interval
            return mv.rules.downpour(push=1, fetch=every), 1
        return parse_rule(self.rule), every

    @property
    def name(self) -> str:
        times = f", rate x{self.factor:g}" if self.factor != 1 else ""
        return f"{self.rule} ({self.mode}{times})"


WAYS = (
    Way("asgd", "async"),
    Way("asgd", "sync"),
    Way("easgd:0.225", "async"),
    Way("downpour", "async"),
    Way("averaging", "sync", factor=4),
    Way("local_sgd:0.7:0.9", "sync"),
    Way("easgd:0.225", "async", factor=4),  # added when the run of the others had shown what it lacked
)


@dataclass(frozen=True)
class Run:
    """One training of four workers."""

    way: Way
    every: int
    seed: int
    fold: int


Digits = tuple[np.ndarray, np.ndarray]


def digits() -> Digits:
    """All images, and their labels."""
    from sklearn.datasets import load_digits

    source = load_digits()
    return (source.data / 16).astype(np.float32), source.target


def divided(source: Digits, seed: int, fold: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Images and labels to train on, and those of the fold."""
    images, labels = source
    parts = np.array_split(np.random.default_rng([seed, 1]).permutation(len(labels)), FOLDS)
    train = np.concatenate([part for number, part in enumerate(parts) if number != fold])
    return images[train], labels[train], images[parts[fold]], labels[parts[fold]]


def initial(seed: int, fold: int) -> np.ndarray:
    """All weights and biases of the network, flat."""
    random = np.random.default_rng([seed, fold, 2])
    parts = []
    for before, after in pairwise(SIZES):
        parts += [random.normal(0, (2 / before) ** 0.5, before * after), np.zeros(after)]
    return np.concatenate(parts).astype(np.float32)


def layers(flat: np.ndarray) -> list[np.ndarray]:
    """Views of the weights and biases in a flat array."""
    views, start = [], 0
    for before, after in pairwise(SIZES):
        for shape in ((before, after), (after,)):
            size = int(np.prod(shape))
            views.append(flat[start : start + size].reshape(shape))
            start += size
    return views


def step(flat: np.ndarray, images: np.ndarray, labels: np.ndarray, rate: float) -> None:
    """One step of gradient descent on the mean cross-entropy of a minibatch, in place."""
    w1, b1, w2, b2 = layers(flat)
    hidden = np.maximum(images @ w1 + b1, 0)
    scores = hidden @ w2 + b2
    scores = np.exp(scores - scores.max(axis=1, keepdims=True))
    scores /= scores.sum(axis=1, keepdims=True)
    scores[np.arange(len(labels)), labels] -= 1
    scores *= np.float32(rate / len(labels))
    back = scores @ w2.T
    back *= hidden > 0
    w2 -= hidden.T @ scores
    b2 -= scores.sum(axis=0)
    w1 -= images.T @ back
    b1 -= back.sum(axis=0)


def accuracy(flat: np.ndarray, images: np.ndarray, labels: np.ndarray) -> float:
    w1, b1, w2, b2 = layers(flat)
    return float(((np.maximum(images @ w1 + b1, 0) @ w2 + b2).argmax(axis=1) == labels).mean())


def minibatches(
    number: int, settings: Settings, seed: int, worker: int, workers: int
) -> Iterator[tuple[float, np.ndarray]]:
    """A worker's minibatches of all epochs, with their rates: each epoch another shuffle, divided equally."""
    for epoch in range(settings.epochs):
        rate = settings.rate * 0.1 ** sum(epoch >= drop for drop in settings.drops)
        order = np.random.default_rng([seed, epoch, 3]).permutation(number)
        mine = order[: number - number % workers][worker::workers]
        for start in range(0, len(mine) - settings.batch + 1, settings.batch):
            yield rate, mine[start : start + settings.batch]


def alone(settings: Settings, source: Digits, seed: int, fold: int) -> list[float]:
    """Accuracy of one worker after each epoch."""
    images, labels, test_images, test_labels = divided(source, seed, fold)
    flat = initial(seed, fold)
    epoch, curve = len(labels) // settings.batch, []
    for count, (rate, rows) in enumerate(minibatches(len(labels), settings, seed, 0, 1), 1):
        step(flat, images[rows], labels[rows], rate)
        if count % epoch == 0:
            curve.append(accuracy(flat, test_images, test_labels))
    return curve


def together(settings: Settings, source: Digits, mode: str, runs: list[Run]) -> list[tuple[list[float], float]]:
    """Accuracies of the shared parameters after each epoch, one run after another; called in each of four workers.

    An epoch is over when this worker is through with its part. Only before the last do all wait for each other: a
    barrier after each epoch would change what is measured.

    Beside each, the most pushes of others that came between two reads of this worker: the mean is 3 for four
    workers whatever happens, but they run side by side only where the most is near it.
    """
    mv.init(**MODES[mode])
    results = []
    for number, run in enumerate(runs):
        images, labels, test_images, test_labels = divided(source, run.seed, run.fold)
        rule, every = run.way.at(run.every)
        local = initial(run.seed, run.fold)
        shared = mv.rules.share(local, rule)
        count, curve = 0, []
        epoch = len(labels) // mv.workers_num() // settings.batch
        rate_and_rows = minibatches(len(labels), settings, run.seed, mv.worker_id(), mv.workers_num())
        for count, (rate, rows) in enumerate(rate_and_rows, 1):
            step(local, images[rows], labels[rows], run.way.factor * rate)
            if count % every == 0:
                shared.exchange(local)
            if count % epoch == 0 and count < epoch * settings.epochs:
                curve.append(accuracy(shared.table.snapshot(), test_images, test_labels))
        if count % every:
            shared.exchange(local)  # what was changed since the last one
        mv.barrier()
        seen = mv.stats()["tables"][shared.table.number]["staleness_max"]
        curve.append(accuracy(shared.table.snapshot(), test_images, test_labels))
        results.append((curve, seen))
        mv.barrier()
        if mv.is_master_worker() and (number + 1) % 50 == 0:
            print(f"{mode}: {number + 1} of {len(runs)} runs", flush=True)
    return results


def interval(values: np.ndarray) -> tuple[float, float, float]:
    """Mean, lower and upper end of its 95 % interval."""
    from scipy.stats import t

    half = t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / len(values) ** 0.5
    return float(values.mean()), float(values.mean() - half), float(values.mean() + half)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("sharing_loss"), help="folder for what comes out")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(10)), help="2 or more; default: 0 to 9")
    parser.add_argument("--epochs", type=int, default=Settings.epochs)
    parser.add_argument(
        "--ways", type=int, nargs="+", default=list(range(len(WAYS))), help="numbers of rules to run, from 0"
    )
    parser.add_argument("--every", type=int, nargs="+", default=list(EVERY), help="minibatches between exchanges")
    parser.add_argument("--name", default="sharing_loss", help="what the files' names begin with")
    options = parser.parse_args()
    if len(options.seeds) < 2:
        raise SystemExit("an interval needs 2 seeds or more")
    settings = replace(Settings(), epochs=options.epochs)
    ways = [WAYS[number] for number in options.ways]

    began = time.monotonic()
    pairs = [(seed, fold) for seed in options.seeds for fold in range(FOLDS)]
    source = digits()
    one = {pair: alone(settings, source, *pair) for pair in pairs}
    accuracy_of_one = float(np.mean([curve[-1] for curve in one.values()]))
    print(f"one worker: {accuracy_of_one:.2%} in the mean of {len(pairs)} runs", flush=True)
    four: dict[Run, tuple[list[float], float]] = {}
    for mode in MODES:
        runs = [Run(way, every, *pair) for way in ways if way.mode == mode for every in options.every for pair in pairs]
        if runs:
            ended = mv.run(together, WORKERS, (settings, source, mode, runs))[0]
            four |= dict(zip(runs, ended, strict=True))

    results = []
    for way in ways:
        for every in options.every:
            points = np.array(
                [
                    [100 * (four[Run(way, every, seed, fold)][0][-1] - one[seed, fold][-1]) for fold in range(FOLDS)]
                    for seed in options.seeds
                ]
            ).mean(axis=1)
            mean, low, high = interval(points)
            stale = float(np.mean([four[Run(way, every, *pair)][1] for pair in pairs]))
            results.append(
                {"rule": way.name, "every": every, "points": mean, "low": low, "high": high, "staleness_max": stale}
            )
            print(f"{way.name:34} every {every:2}: {mean:+.2f} points, 95 % interval {low:+.2f} .. {high:+.2f}")
    options.out.mkdir(parents=True, exist_ok=True)
    report = {
        "what": "final accuracy of 4 workers minus that of 1, in points; mean and 95 % interval over seeds",
        "command": "python examples/experiments/sharing_loss.py " + " ".join(sys.argv[1:]),
        "settings": {**asdict(settings), "network": SIZES, "seeds": options.seeds, "folds": FOLDS},
        "machine": {"cores": len(os.sched_getaffinity(0)), "load_at_end": os.getloadavg()[0]},
        "python": platform.python_version(),
        "seconds": round(time.monotonic() - began),
        "accuracy_of_one": accuracy_of_one,
        "results": results,
    }
    (options.out / f"{options.name}.json").write_text(json.dumps(report, indent=1) + "\n")
    with (options.out / f"{options.name}.csv").open("w", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(["rule", "every", "seed", "fold", "accuracy_4", "accuracy_1"])
        for run, (curve, _) in four.items():
            alone_ = one[run.seed, run.fold][-1]
            rows.writerow([run.way.name, run.every, run.seed, run.fold, f"{curve[-1]:.5f}", f"{alone_:.5f}"])
    with (options.out / f"{options.name}_epochs.csv").open("w", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(["rule", "every", "epoch", "accuracy"])
        curves = {("one worker", 1): list(one.values())}
        for way in ways:
            for every in options.every:
                curves[way.name, every] = [four[Run(way, every, *pair)][0] for pair in pairs]
        for (name, every), several in curves.items():
            for epoch, mean in enumerate(np.mean(several, axis=0), 1):
                rows.writerow([name, every, epoch, f"{mean:.5f}"])


if __name__ == "__main__":
    main()
