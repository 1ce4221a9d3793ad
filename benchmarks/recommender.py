"""The two-tower recommender: its losses and samples a second, beside PyTorch alone with sparse Adagrad.

    python benchmarks/recommender.py                        # a minute; prints JSON
    python benchmarks/recommender.py --picture curve.png

Runs `examples/recommender/two_tower.py` three ways in turns: PyTorch alone, one worker, two workers.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

PROGRAM = Path(__file__).resolve().parent.parent / "examples/recommender/two_tower.py"
WAYS = {"alone": ["--alone"], "1 worker": [], "2 workers": []}


def run(way: str, steps: int, folder: Path) -> dict[str, Any]:
    workers = 2 if way == "2 workers" else 1
    launcher = ["-m", "multiverso", "run", "-n", str(workers)] if workers > 1 else []
    file = folder / "result.json"
    command = [sys.executable, *launcher, str(PROGRAM), "--steps", str(steps), "--json", str(file), *WAYS[way]]
    subprocess.run(command, check=True, capture_output=True)
    result: dict[str, Any] = json.loads(file.read_text())
    return result


def draw(path: Path, losses: dict[str, Any]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="tight")
    axes = figure.subplots()
    for (way, curve), style in zip(losses.items(), ("-", "--", ":"), strict=True):
        stride = 2 if way == "2 workers" else 1  # of the master's steps, which are every second one
        smooth = np.convolve(curve, np.ones(50 // stride) / (50 // stride), "valid")
        axes.plot(np.arange(smooth.size) * stride, smooth, style, label=way)
    axes.set(xlabel="steps of all workers", ylabel="log loss")
    axes.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    speeds: dict[str, list[float]] = {way: [] for way in WAYS}
    losses: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(options.rounds):
            for way in WAYS:
                result = run(way, options.steps, Path(folder))
                speeds[way].append(result["samples_a_second"])
                losses[way] = result["losses"]
    if options.picture:
        draw(options.picture, losses)
    difference = np.abs(np.array(losses["alone"]) - losses["1 worker"]) / losses["alone"]
    report = {
        "samples_a_second": {way: round(statistics.median(rows)) for way, rows in speeds.items()},
        "last_losses": {way: round(float(np.mean(curve[-100:])), 4) for way, curve in losses.items()},
        "first_losses": {way: round(float(np.mean(curve[:50])), 4) for way, curve in losses.items()},
        "largest_difference_of_a_step_s_loss": float(f"{difference.max():.2g}"),
        "steps": options.steps,
        "rounds": options.rounds,
        "machine": platform.machine(),
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
