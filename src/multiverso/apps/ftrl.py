"""Sparse logistic regression by FTRL-Proximal, on LIBSVM files, trained by any number of processes.

    python -m multiverso.apps.ftrl clicks.svm --test later.svm --run runs/clicks
    multiverso run -n 4 -m multiverso.apps.ftrl clicks/ --run runs/clicks

McMahan et al. 2013, "Ad click prediction: a view from the trenches", algorithm 1. A weight begins to exist when a
sample with its feature comes, in a `KeyedTable` whose updater keeps the sums beside it. With one worker and
``--batch 1`` it is the paper's algorithm; a batch's gradients are summed into one step. Started again with the same
``--run`` it continues after its last save.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import numpy.typing as npt

import multiverso as mv
from multiverso.apps import reading
from multiverso.apps.reading import Samples
from multiverso.apps.work import SHOWN, Work, once, start
from multiverso.files.opening import write_whole

Array = npt.NDArray[Any]
BIAS = -1  # the key of what every sample has


@dataclass(frozen=True)
class Settings:
    """What to train; the paper's names."""

    source: Path
    run: Path
    alpha: float = 0.1
    beta: float = 1.0
    l1: float = 1.0
    l2: float = 1.0
    batch: int = 64
    epochs: int = 1
    save_seconds: float = 60.0


@dataclass(frozen=True)
class Result:
    """What came out.

    Attributes:
        table: the weights: (1,) float32 by feature, and `BIAS`.
        curve: (n, 2): after how many samples, and the mean loss of those between, each told before it was learnt
            from; of the master alone.
        samples: how many samples all workers have read.
    """

    table: mv.KeyedTable
    curve: Array
    samples: int


def gradient(table: mv.KeyedTable, samples: Samples) -> tuple[Array, Array, Array]:
    """Returns the features of some samples, the gradient of their summed log loss, and each sample's loss."""
    keys, places = np.unique(np.append(samples.ids, BIAS), return_inverse=True)
    weights = table.get(keys)[:, 0].astype(np.float64)
    bias, places = weights[places[-1]], places[:-1]
    whose = samples.sample_of()
    margin = np.bincount(whose, samples.values * weights[places], minlength=len(samples)) + bias
    clicked = samples.labels > 0
    loss = np.logaddexp(0, np.where(clicked, -margin, margin))
    error = 0.5 * (1 + np.tanh(margin / 2)) - clicked
    total = np.bincount(places, samples.values * error[whose], minlength=keys.size)
    total[np.searchsorted(keys, BIAS)] += error.sum()
    return keys, total, loss


def train(settings: Settings) -> Result:
    """Trains in all workers of the current job: collective."""
    updater = mv.updaters.ftrl(settings.alpha, settings.beta, settings.l1, settings.l2)
    table = mv.KeyedTable(1, updater=updater, name="weights")  # first: refused, it leaves nothing behind
    listed = settings.run / "pieces.txt"
    once(settings.run, listed.exists, lambda: reading.write_pieces(listed, settings.source))
    parts = reading.read_pieces(listed)
    work = Work(
        settings.run, len(parts), settings.epochs, save_seconds=settings.save_seconds, what="ftrl", unit="samples"
    )
    work.resume()
    curve = []
    for piece in work:
        samples = reading.parse_samples(parts[piece].lines())
        losses = []
        for first in range(0, len(samples), settings.batch):
            keys, total, loss = gradient(table, samples.part(first, min(first + settings.batch, len(samples))))
            table.add(total.astype(np.float32), keys)
            losses.append(loss)
        work.count(len(samples))
        if losses:
            curve.append((work.counted, float(np.concatenate(losses).mean())))
            work.note = f", loss {curve[-1][1]:.4f}"
    return Result(table, np.array(curve).reshape(-1, 2), work.counted)


def test(table: mv.KeyedTable, path: Path) -> dict[str, float]:
    """Returns the mean log loss, the share of right answers and the area under the ROC curve on a file."""
    samples = reading.parse_samples(path.read_bytes())
    whose = samples.sample_of()
    weighted = samples.values * table.get(samples.ids)[:, 0]
    margin = np.bincount(whose, weighted, minlength=len(samples)) + float(table.get(BIAS)[0])
    clicked = samples.labels > 0
    _, ranks, number = np.unique(margin, return_inverse=True, return_counts=True)
    rank = (np.cumsum(number) - (number - 1) / 2)[ranks]
    ones = int(clicked.sum())
    pairs = max(ones * (len(samples) - ones), 1)
    return {
        "loss": float(np.logaddexp(0, np.where(clicked, -margin, margin)).mean()),
        "accuracy": float(((margin > 0) == clicked).mean()),
        "auc": float((rank[clicked].sum() - ones * (ones + 1) / 2) / pairs),
    }


def save_text(path: Path, table: mv.KeyedTable) -> int:
    """Writes a line for each weight that is not 0, with the feature's id (-1: the bias); returns how many."""
    lines = [
        f"{key} {weight:.9g}\n"
        for keys, rows in table.items()
        for key, weight in zip(keys.tolist(), rows[:, 0].tolist(), strict=True)
        if weight != 0
    ]
    write_whole(path, "".join(sorted(lines, key=lambda line: int(line.split(" ")[0]))).encode())
    return len(lines)


def draw(path: Path, curve: Array) -> None:
    """Draws the loss over the samples (needs matplotlib)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="tight")
    axes = figure.subplots()
    axes.plot(*curve.T, color="tab:orange")
    axes.set(xlabel="samples", ylabel="log loss, before each sample is learnt")
    figure.savefig(path, dpi=120)


@click.command(context_settings=SHOWN)
@click.argument("source", type=click.Path(path_type=Path))
@click.option("--test", "test_file", type=click.Path(path_type=Path), help="A file to test on at the end.")
@click.option(
    "--run", type=click.Path(path_type=Path), default="ftrl-run", help="Folder of this run: saves, weights.txt."
)
@click.option("--alpha", type=float, default=0.1, help="Learning rate alpha / (beta + sqrt(n)).")
@click.option("--beta", type=float, default=1.0, help="See alpha.")
@click.option("--l1", type=float, default=1.0, help="L1 weight: makes weights 0.")
@click.option("--l2", type=float, default=1.0, help="L2 weight.")
@click.option("--batch", type=int, default=64, help="Samples in a step.")
@click.option("--epochs", type=int, default=1, help="How often the samples are read.")
@click.option("--save-seconds", type=float, default=60.0, help="Save when the last save is so old.")
@click.option("--picture", is_flag=True, help="Draw the loss: loss.png (matplotlib).")
def main(test_file: Path | None, picture: bool, **options: Any) -> None:
    """Sparse logistic regression by FTRL-Proximal on SOURCE: a LIBSVM file, or a folder of them."""
    settings = Settings(**options)
    run = settings.run
    mv.init()
    began = time.perf_counter()
    result = train(settings)
    seconds = time.perf_counter() - began
    if mv.is_master_worker():
        kept = save_text(run / "weights.txt", result.table)
        print(
            f"{result.samples:,} samples in {seconds:.1f} s by {mv.num_workers()} workers; {kept:,} of "
            f"{len(result.table):,} weights are not 0: {run / 'weights.txt'}"
        )
        if test_file is not None:
            print(", ".join(f"{name} {value:.4f}" for name, value in test(result.table, test_file).items()))
        if picture and len(result.curve):
            draw(run / "loss.png", result.curve)
    mv.barrier()
    mv.shutdown()


if __name__ == "__main__":
    start(main)
