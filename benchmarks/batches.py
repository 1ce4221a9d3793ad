"""One of four workers is four times as slow: how much longer than it has to does an epoch take?

    python benchmarks/batches.py                 # some seconds; prints JSON
    python benchmarks/batches.py --out results.json

A batch takes as long as it is told to, by sleeping (10 ms, and 40 ms in the slowed worker), so that neither the number
of cores nor other work on the machine decides. The ideal is the time in which four workers of these speeds can do
all batches at all: batches / (3 / 10 ms + 1 / 40 ms). Dealt as workers ask (`mv.batches`) beside equal parts that are
fixed beforehand (`mv.shard`), in turns.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import multiverso as mv
from reporting import give_report

WORKERS = 4
SLOW = 3
BATCHES = 400
SIZE = 8


def epochs(seconds: float, slowed: float, rounds: int) -> dict[str, Any]:
    """One worker: its seconds for each epoch until all have ended it, and its number of batches."""
    mv.init()
    mine = seconds * (slowed if mv.worker_id() == SLOW else 1)
    took: dict[str, list[float]] = {"dealt": [], "parts": []}
    number = []
    for turn in range(rounds):
        for how in took:
            mv.barrier()
            began = time.perf_counter()
            if how == "dealt":
                number.append(0)
                for _ in mv.batches(BATCHES * SIZE, SIZE):
                    time.sleep(mine)
                    number[-1] += 1
            else:
                rows = mv.shard(BATCHES * SIZE, epoch=turn)
                for _ in range(0, len(rows), SIZE):
                    time.sleep(mine)
            mv.barrier()
            took[how].append(time.perf_counter() - began)
    mv.shutdown()
    return {"took": took, "batches": number}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.01, help="of a batch in a quick worker")
    parser.add_argument("--slowed", type=float, default=4.0, help="how many times as long in the slow one")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    results = mv.run(
        epochs, workers=WORKERS, args=(options.seconds, options.slowed, options.rounds), timeout_seconds=300
    )
    ideal = BATCHES / ((WORKERS - 1) / options.seconds + 1 / (options.seconds * options.slowed))
    median = {how: statistics.median(results[0]["took"][how]) for how in ("dealt", "parts")}
    report = {
        "machine": f"{platform.machine()}, Python {platform.python_version()}",
        "workers": WORKERS,
        "batches": BATCHES,
        "slowed": options.slowed,
        "ideal_seconds": round(ideal, 3),
        "dealt_seconds": round(median["dealt"], 3),
        "fixed_parts_seconds": round(median["parts"], 3),
        "dealt_over_ideal": round(median["dealt"] / ideal, 3),
        "fixed_parts_over_ideal": round(median["parts"] / ideal, 3),
        "batches_of_each_worker": [result["batches"] for result in results],
    }
    give_report(report, options.out, indent=2)


if __name__ == "__main__":
    main()
