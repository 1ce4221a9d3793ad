"""Random rows of a large table in small pages and then in huge ones, in one run: prints JSON.

python benchmarks/huge_pages.py [--mebibytes 2048] [--output FILE]

The node would make the pages huge in the background; here the worker does, at once, so that both are measured.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from reporting import give_report

COLUMNS, BATCH = 64, 10_000


def measured(table: Any, rows: int, seconds: float) -> dict[str, list[float]]:
    """Nanoseconds a row, 10th percentile and median, of reads and adds in turns."""
    random = np.random.default_rng(0)
    out, delta = np.zeros((BATCH, COLUMNS), "f4"), np.zeros((BATCH, COLUMNS), "f4")
    times: dict[str, list[float]] = {"get": [], "add": []}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        ids = random.integers(0, rows, BATCH)
        began = time.perf_counter_ns()
        table.get(ids, out=out)
        between = time.perf_counter_ns()
        table.add(delta, ids)
        times["add"].append((time.perf_counter_ns() - between) / BATCH)
        times["get"].append((between - began) / BATCH)
    return {name: [round(float(np.percentile(some, q)), 1) for q in (10, 50)] for name, some in times.items()}


def main() -> None:
    """Prints JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mebibytes", type=int, default=2048)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    os.environ["MULTIVERSO_HUGE_PAGES"] = "0"
    import multiverso as mv
    from multiverso.layout.words import HUGE_PAGE
    from multiverso.memory import huge_pages

    mv.init()
    rows = options.mebibytes * 1024 * 1024 // (4 * COLUMNS)
    table = mv.MatrixTableHandler(rows, COLUMNS)
    segment = table._shard.segment
    small = measured(table, rows, options.seconds)
    began, pages = time.perf_counter(), range(0, segment.size - HUGE_PAGE + 1, HUGE_PAGE)
    first = segment.address + -segment.address % HUGE_PAGE
    made = sum(
        huge_pages.make_huge(first + page)
        for page in pages
        if page + HUGE_PAGE + first <= segment.address + segment.size
    )
    took = time.perf_counter() - began
    large = measured(table, rows, options.seconds)
    mv.shutdown()
    result = {
        "mebibytes": options.mebibytes,
        "what": "nanoseconds a row of 64 floats: 10th percentile and median",
        "small pages": small,
        "huge pages": large,
        "huge pages made": made,
        "seconds to make them": round(took, 2),
        "times as quick": {name: round(small[name][1] / large[name][1], 2) for name in small},
    }
    give_report(result, options.output)


if __name__ == "__main__":
    main()
