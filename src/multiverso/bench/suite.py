"""Which measurements there are, how the workers' figures become one, and the result as readable tables."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from multiverso.bench import workers
from multiverso.columns import in_columns
from multiverso.launch import run

_PASSES = {"add": 3, "get": 2, "add, get": 5, "exchange": 6}  # arrays read and written


@dataclass(frozen=True)
class Plan:
    """How much to measure."""

    sizes: tuple[int, ...]
    row_batches: tuple[int, ...]
    workers: tuple[int, ...]
    repeats: int
    seconds: float
    elements_a_size: int


FULL = Plan((1_000, 100_000, 1_000_000, 10_000_000, 25_000_000), (100, 1_000, 10_000), (1, 2, 4), 5, 3.0, 10**8)
QUICK = Plan((1_000, 1_000_000), (1_000,), (1, 2), 1, 0.3, 10**7)


def measure(plan: Plan, progress: Callable[[str], None] = lambda what: None) -> dict[str, Any]:
    """Runs every measurement.

    Args:
        plan: sizes, workers, repeats.
        progress: told what is measured next.

    Returns:
        As JSON can carry it: ``machine``, ``single`` and ``rows`` (ratios to the limit in the same run),
        ``together`` (several workers at once, with bytes a second of all) and ``rounds``.
    """
    progress("one worker against private memory")
    single = run(workers.against_the_limit, 1, (list(plan.sizes), plan.seconds))[0]
    progress("rows")
    rows = run(workers.rows_against_the_limit, 1, (list(plan.row_batches), plan.seconds))[0]
    together, rounds = [], []
    for number in plan.workers:
        progress(f"{number} workers at once")
        together += _repeated(plan, number, workers.together)
        if number > 1:
            progress(f"synchronous rounds of {number} workers")
            rounds += _repeated(plan, number, workers.rounds)
    for row in together:
        if row["elements"]:
            passes = _PASSES[row["operation"].removeprefix("private ")]
            moved = passes * 4 * row["elements"]
            row["gigabytes_a_second"] = moved * row["workers"] / row["microseconds"] / 1e3
    return {"machine": describe_machine(), "single": single, "rows": rows, "together": together, "rounds": rounds}


def _repeated(plan: Plan, number: int, function: Callable[..., Any]) -> list[dict[str, Any]]:
    """The median over the repeats of the mean over the workers: they share a machine, so they end up alike."""
    runs = [run(function, number, (list(plan.sizes), plan.elements_a_size)) for _ in range(plan.repeats)]
    result = []
    for position, first in enumerate(runs[0][0]):
        means = [statistics.mean(worker[position]["microseconds"] for worker in one) for one in runs]
        result.append({**first, "workers": number, "microseconds": statistics.median(means), "runs": means})
    return result


def describe_machine() -> dict[str, Any]:
    """Returns what the figures depend on."""
    from multiverso.compiling import prebuilt

    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "numpy": np.__version__,
        "kernels": prebuilt.level() or f"numba {metadata.version('numba')}",
    }


def render(result: dict[str, Any]) -> str:
    """Returns the result as tables for a terminal."""
    machine = result["machine"]
    title = f"{machine['cpu']}, {machine['cores']} cores (load {machine['load']:.1f} at the end)"
    single = []
    for row in result["single"] + result["rows"]:
        size = f"{row['elements']:,}" if "elements" in row else f"{row['rows']:,} rows of 64"
        times = (f"{row[key]:,.2f}" for key in ("microseconds", "limit_microseconds", "ratio"))
        single.append([row["operation"], size, *times])
    together = []
    for row in result["together"] + result["rounds"]:
        speed = f"{row['gigabytes_a_second']:.1f}" if "gigabytes_a_second" in row else ""
        size = f"{row['elements']:,}" if row["elements"] else ""
        together.append([row["operation"], size, str(row["workers"]), f"{row['microseconds']:,.2f}", speed])
    tables = {
        f"one worker, microseconds a call: {title}": (("operation", "size", "shared", "private", "ratio"), single),
        "workers at once, microseconds a call of each": (
            ("operation", "size", "workers", "us", "GB/s of all"),
            together,
        ),
    }
    return "\n\n".join(f"{title}\n{in_columns(head, rows, right=True)}" for title, (head, rows) in tables.items())
