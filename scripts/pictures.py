"""Draws pictures of the documentation from the data beside them, in docs/results: python scripts/pictures.py

Accuracy by epoch for the page about learning rates and for the tutorial, and a small picture of each program of the
gallery. `scripts/gallery.py` and `examples/experiments/sharing_loss.py` make the data. Wants matplotlib.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("svg")
from matplotlib import pyplot

RESULTS = Path(__file__).resolve().parent.parent / "docs" / "results"
ONE, MANY, THIRD, FOURTH = "#8d99ae", "#3f51b5", "#c8553d", "#588157"
SMALL, LARGE = (2.6, 1.7), (7.0, 3.6)
# Text stays text, and the same data give the same file.
mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "multiverso", "font.family": "sans-serif"})


def figure(size: tuple[float, float], across: str, up: str) -> tuple[Any, Any]:
    """An empty picture."""
    made, axes = pyplot.subplots(figsize=size, layout="constrained")
    axes.spines[["top", "right"]].set_visible(False)
    text = 7.5 if size == SMALL else 10
    axes.tick_params(labelsize=text)
    axes.set_xlabel(across, fontsize=text)
    axes.set_ylabel(up, fontsize=text)
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


def gallery() -> None:
    """A curve, or two bars, for each program that was run."""
    noted: dict[str, Any] = json.loads((RESULTS / "gallery.json").read_text())
    for name, data in noted.items():
        if name.startswith("resuming/"):
            continue
        to = "gallery/" + name.lower().removesuffix(".py").replace("/", "_").replace("-", "_")
        if name.startswith("platoon/"):
            steps = "minibatches of all" if name.endswith("/lstm") else "epoch of 100 steps"
            made, axes = figure(SMALL, steps, "validation error (%)")
            for workers, colour in (("1", ONE), ("2", MANY)):
                axes.plot(data[f"at {workers}"], percent(data[workers]), color=colour, label=label(workers))
            axes.legend(frameon=False, fontsize=7.5)
        elif len(data["1"]) == 1:
            made, axes = figure(SMALL, "characters right (%)", "")
            bars(axes, {label(workers): data[workers][0] for workers in ("2", "1")}, [MANY, ONE])
        else:
            made, axes = figure(SMALL, "epoch", "validation accuracy (%)")
            for workers, colour in (("1", ONE), ("2", MANY)):
                values = percent(data[workers])
                axes.plot(range(1, len(values) + 1), values, color=colour, label=label(workers))
            axes.xaxis.get_major_locator().set_params(integer=True)
            axes.legend(frameon=False, fontsize=7.5)
        write(made, to)
    resumed(noted)
    actors()


def label(workers: str) -> str:
    return "one worker" if workers == "1" else f"{workers} workers"


def bars(axes: Any, values: dict[str, float], colours: Sequence[str]) -> None:
    """Bars from left to right, from the bottom up, with their percentages."""
    drawn = axes.barh(list(values), percent(list(values.values())), color=colours)
    axes.bar_label(drawn, fmt="%.1f", fontsize=7.5, padding=-26, color="white")
    axes.set_xlim(0, 100)


def resumed(noted: dict[str, Any]) -> None:
    """Accuracy of runs that nothing disturbed and of runs that were killed and resumed."""
    frameworks = [name for name in ("keras", "jax", "torch") if f"resuming/with_{name}.py" in noted]
    made, axes = figure((4.6, 2.6), "accuracy after 3 epochs (%)", "")
    for kind, colour, shift in (("undisturbed", ONE, 0.2), ("killed and resumed", MANY, -0.2)):
        values = percent([noted[f"resuming/with_{name}.py"][kind][0] for name in frameworks])
        drawn = axes.barh([n + shift for n in range(len(frameworks))], values, 0.38, color=colour, label=kind)
        axes.bar_label(drawn, fmt="%.2f", fontsize=7.5, padding=-32, color="white")
    axes.set_yticks(range(len(frameworks)), frameworks)
    axes.legend(frameon=False, fontsize=7.5, ncols=2, loc="lower center", bbox_to_anchor=(0.45, 1.0))
    write(made, "gallery/resumed")


def actors() -> None:
    """CartPole's reward against the bound on the age of samples: each run, and the medians."""
    data = json.loads((RESULTS / "lag.json").read_text())
    made, axes = figure((4.6, 2.6), "versions that a sample may be old", "reward (500 at most)")
    at = {row["lag"]: number for number, row in enumerate(data["table"])}
    axes.plot([at[run["lag"]] for run in data["runs"]], [run["reward"] for run in data["runs"]], "o", ms=4, color=ONE,
              label="a run")  # fmt: skip
    axes.plot(list(at.values()), [row["reward"] for row in data["table"]], color=MANY, label="median of three")
    axes.set_xticks(list(at.values()), list(map(str, at)))
    axes.legend(frameon=False, fontsize=7.5)
    write(made, "gallery/actors")


def main() -> None:
    learning_rate()
    tutorial()
    gallery()


if __name__ == "__main__":
    main()
