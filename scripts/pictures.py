"""Draws pictures of the documentation from the data beside them, in docs/results: python scripts/pictures.py

Accuracy by epoch for the page about learning rates and for the tutorial; examples/experiments makes the data. Wants
matplotlib.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("svg")
from matplotlib import pyplot

RESULTS = Path(__file__).resolve().parent.parent / "docs" / "results"
ONE, MANY, THIRD, FOURTH = "#8d99ae", "#3f51b5", "#c8553d", "#588157"
LARGE = (7.0, 3.6)
# Text stays text, and the same data give the same file.
mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "multiverso", "font.family": "sans-serif"})


def figure(size: tuple[float, float], across: str, up: str) -> tuple[Any, Any]:
    """An empty picture."""
    made, axes = pyplot.subplots(figsize=size, layout="constrained")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set(xlabel=across, ylabel=up)
    return made, axes


def write(made: Any, name: str) -> None:
    """Saves a picture."""
    path = RESULTS / f"{name}.svg"
    path.parent.mkdir(exist_ok=True)
    made.savefig(path, metadata={"Date": None, "Creator": None})
    pyplot.close(made)
    path.write_text("\n".join(line.rstrip() for line in path.read_text().splitlines()) + "\n")


def percent(values: Sequence[float]) -> list[float]:
    return [100 * value for value in values]


def learning_rate() -> None:
    """EASGD at one worker's rate and at four times it, beside ASGD and one worker."""
    with (RESULTS / "sharing_loss_curves_epochs.csv").open() as file:
        rows = list(csv.DictReader(file))
    made, axes = figure(LARGE, "epoch", "accuracy (%)")
    for rule, label, colour, line in (
        ("one worker", "one worker", ONE, "-"),
        ("asgd (async)", "4 workers, ASGD, rate x1", FOURTH, "--"),
        ("easgd:0.225 (async, rate x4)", "4 workers, EASGD, rate x4", MANY, "-"),
        ("easgd:0.225 (async)", "4 workers, EASGD, rate x1", THIRD, "-"),
    ):
        mine = [row for row in rows if row["rule"] == rule]
        values = percent([float(row["accuracy"]) for row in mine])
        axes.plot([int(row["epoch"]) for row in mine], values, line, color=colour, label=label)
    axes.set_ylim(80, 98.5)
    axes.legend(frameon=False, fontsize=10)
    write(made, "learning_rate")


def tutorial() -> None:
    """One process, and four that exchange after every minibatch: what epochs.csv has of them."""
    with (RESULTS / "epochs.csv").open() as file:
        rows = list(csv.DictReader(file))
    made, axes = figure(LARGE, "epoch", "validation accuracy (%)")
    for code, label, colour in (("0M-1G", "one process", ONE), ("1M-4G-1S", "4 workers", MANY)):
        mine = [row for row in rows if row["configuration"] == code]
        values = percent([float(row["accuracy"]) for row in mine])
        axes.plot([int(row["epoch"]) for row in mine], values, color=colour, label=label)
    axes.legend(frameon=False, fontsize=10)
    axes.xaxis.get_major_locator().set_params(integer=True)
    write(made, "accuracy_four")


def main() -> None:
    learning_rate()
    tutorial()


if __name__ == "__main__":
    main()
