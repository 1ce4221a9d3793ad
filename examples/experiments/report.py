"""What comes out of an experiment: tables, a CSV file, three pictures."""

from __future__ import annotations

import csv
import os
import platform
from dataclasses import asdict
from pathlib import Path

import torch
from plan import Configuration, Settings, parse_rule
from training import Epoch

import multiverso as mv

Runs = dict[str, tuple[Configuration, list[Epoch]]]


def hardware() -> dict[str, str]:
    """Returns what it ran on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "")
    kilobytes = int(Path("/proc/meminfo").read_text().split()[1])
    found = {
        "processor": f"{model or platform.machine()}, {len(os.sched_getaffinity(0))} cores for this run",
        "memory": f"{kilobytes / 2**20:.0f} GiB",
        "load average": f"{os.getloadavg()[2]:.1f} in the last 15 minutes, other work on the machine included",
        "software": f"Python {platform.python_version()}, PyTorch {torch.__version__}, multiverso {mv.__version__}",
    }
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        found["GPU"] = f"{len(names)} x {names[0]}"
    return found


def write(folder: Path, settings: Settings, numbers: int, runs: Runs) -> str:
    """Writes everything to a folder and returns the tables."""
    folder.mkdir(parents=True, exist_ok=True)
    text = tables(settings, numbers, runs)
    (folder / "tables.md").write_text(text)
    with (folder / "epochs.csv").open("w", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(["configuration", "workers", "every", "rule", "mode", "epoch", "seconds", "loss", "accuracy"])
        for code, (configuration, epochs) in runs.items():
            for epoch in epochs:
                how = [configuration.workers, configuration.every, configuration.rule, configuration.mode]
                what = [epoch.number + 1, f"{epoch.seconds:.4f}", f"{epoch.loss:.5f}", f"{epoch.accuracy:.5f}"]
                rows.writerow([code, *how, *what])
    pictures(folder, runs)
    return text


def tables(settings: Settings, numbers: int, runs: Runs) -> str:
    """Returns the tables: hardware, settings, model, results."""
    shown = {name: value for name, value in asdict(settings).items() if value is not None}
    drops = ", ".join(f"{settings.rate_at(drop):g} from epoch {drop + 1}" for drop in settings.drops)
    model = {
        "network": f"ResNet-{settings.depth} of width {settings.width}, batch normalisation, shortcuts without weights",
        "parameters": f"{numbers:,}",
        "optimizer": f"SGD, Nesterov momentum {settings.momentum}, weight decay {settings.decay}",
        "learning rate": f"{settings.rate:g}" + (f", {drops}" if drops else ""),
    }
    for name in ("depth", "width", "rate", "drops", "momentum", "decay", "folder"):
        shown.pop(name, None)
    results = [
        [
            code,
            str(configuration.workers),
            f"every {configuration.every}" if configuration.used else "-",
            f"{parse_rule(configuration.rule)}, {configuration.mode}" if configuration.used else "-",
            f"{max(epoch.accuracy for epoch in epochs):.2%}",
            f"{epochs[-1].accuracy:.2%}",
            f"{_mean_seconds(epochs):.2f}",
            f"{_mean_seconds(next(iter(runs.values()))[1]) / _mean_seconds(epochs):.2f}",
        ]
        for code, (configuration, epochs) in runs.items()
    ]
    heads = (
        "configuration",
        "processes",
        "exchange",
        "rule, mode",
        "best accuracy",
        "final",
        "s per epoch",
        "speed-up",
    )
    return "\n\n".join(
        [
            "## Hardware\n\n" + _table(["", ""], [list(pair) for pair in hardware().items()]),
            "## Settings\n\n" + _table(["", ""], [[name, str(value)] for name, value in shown.items()]),
            "## Model\n\n" + _table(["", ""], [list(pair) for pair in model.items()]),
            "## Results\n\n" + _table(list(heads), results),
            "Seconds per epoch: training of all workers, barrier to barrier, without loading and validation; mean "
            "of all epochs but the first. Speed-up: against the first row.\n",
        ]
    )


def _mean_seconds(epochs: list[Epoch]) -> float:
    later = epochs[1:] or epochs
    return sum(epoch.seconds for epoch in later) / len(later)


def _table(heads: list[str], rows: list[list[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def pictures(folder: Path, runs: Runs) -> None:
    """Draws accuracy against epochs and against time, and time against epochs."""
    import matplotlib

    matplotlib.use("Agg")
    from itertools import accumulate

    from matplotlib import pyplot

    for name, across, up in (
        ("accuracy_epoch", "epoch", "validation accuracy (%)"),
        ("accuracy_time", "seconds of training", "validation accuracy (%)"),
        ("time_epoch", "epoch", "seconds of training"),
    ):
        figure, axes = pyplot.subplots(figsize=(7.5, 5), layout="constrained")
        for style, (code, (_, epochs)) in enumerate(runs.items()):
            series = {
                "epoch": [epoch.number + 1 for epoch in epochs],
                "seconds of training": list(accumulate(epoch.seconds for epoch in epochs)),
                "validation accuracy (%)": [100 * epoch.accuracy for epoch in epochs],
            }
            line = ("-", "--", "-.", ":")[style % 4]
            axes.plot(series[across], series[up], line, marker=".", markersize=4, label=code)
        if up.startswith("validation"):
            best = 100 * max(epoch.accuracy for _, epochs in runs.values() for epoch in epochs)
            worst_final = 100 * min(epochs[-1].accuracy for _, epochs in runs.values())
            axes.set_ylim(max(0.0, 2 * worst_final - best - 10), min(100.5, best + 1))
        if across == "epoch":
            axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set(xlabel=across, ylabel=up)
        axes.grid(alpha=0.3)
        axes.legend()
        figure.savefig(folder / f"{name}.png", dpi=110)
        pyplot.close(figure)
