"""What a checkpoint costs the training: steps beside one that is written, and the call itself; JSON.

    python benchmarks/checkpoints.py --numbers 10000000

One worker exchanges a million floats a step, with a table of so many beside it. In turns: nothing is saved; `mv.save`
stops the worker; `mv.checkpoint` writes beside it. ``call_ms`` is how long the worker is held up by one save,
``steps_ms`` the median and the longest of the steps while one is written, and ``write_ms`` how long that takes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import multiverso as mv

STEP_NUMBERS = 1_000_000


def main() -> int:
    """Runs what the command line asks for, and prints a JSON object."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--numbers", type=int, default=10_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    mv.init()
    large = mv.ArrayTableHandler(options.numbers)
    table = mv.ArrayTableHandler(STEP_NUMBERS)
    large.add(np.ones(options.numbers, "float32"))
    local, last = np.zeros(STEP_NUMBERS, "float32"), np.zeros(STEP_NUMBERS, "float32")

    def step() -> float:
        began = time.perf_counter()
        local.__iadd__(1)
        table.exchange(local, last)
        return 1e3 * (time.perf_counter() - began)

    alone: list[float] = []
    beside: list[float] = []
    calls: dict[str, list[float]] = {"save": [], "checkpoint": []}
    writes: list[float] = []
    with tempfile.TemporaryDirectory() as folder, mv.checkpoint(Path(folder, "beside")) as checkpoint:
        for number in range(options.rounds):
            alone += [step() for _ in range(100)]
            began = time.perf_counter()
            mv.save(Path(folder, "at once"))
            calls["save"].append(1e3 * (time.perf_counter() - began))
            began = time.perf_counter()
            checkpoint.save({"step": number})
            calls["checkpoint"].append(1e3 * (time.perf_counter() - began))
            while checkpoint.is_writing:
                beside.append(step())
            writes.append(1e3 * (time.perf_counter() - began))
    mv.shutdown()

    def of(numbers: list[float]) -> dict[str, Any]:
        return {"median": round(statistics.median(numbers), 3), "most": round(max(numbers), 3)}

    result = {
        "megabytes": 4 * (options.numbers + STEP_NUMBERS) / 1e6,
        "call_ms": {name: of(found) for name, found in calls.items()},
        "steps_ms": {"alone": of(alone), "beside": of(beside)},
        "write_ms": of(writes),
    }
    print(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
