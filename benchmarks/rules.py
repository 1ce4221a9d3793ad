"""What an exchange by each rule costs, beside the table's own exchange and a plain copy, in the same run.

python benchmarks/rules.py                 # 1,000,000 floats; seconds; prints JSON
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable

import numpy as np

import multiverso as mv


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=1_000_000, help="numbers, float32")
    parser.add_argument("--repeat", type=int, default=300, help="rounds over all of them, interleaved")
    options = parser.parse_args()
    mv.init()
    local = np.zeros(options.size, "float32")
    last = local.copy()
    table = mv.ArrayTableHandler(options.size)
    calls: dict[str, Callable[[], object]] = {
        "numpy.copyto": lambda: np.copyto(last, local),
        "table.exchange": lambda: table.exchange(local, last),
    }
    for rule in (mv.rules.asgd(), mv.rules.easgd(0.2), mv.rules.downpour()):
        shared = mv.rules.share(local, rule)
        calls[f"rule {rule}"] = lambda shared=shared: shared.exchange(local)  # type: ignore[misc]
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(options.repeat):
        for name, call in calls.items():
            began = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - began)
    mv.shutdown()
    base = min(times["table.exchange"])
    results = {
        name: {
            "milliseconds": round(1e3 * min(seconds), 4),
            "median_milliseconds": round(1e3 * statistics.median(seconds), 4),
            "times_the_exchange": round(min(seconds) / base, 2),
        }
        for name, seconds in times.items()
    }
    machine = {"processor": platform.machine(), "python": platform.python_version()}
    print(json.dumps({"size": options.size, "dtype": "float32", "machine": machine, "results": results}, indent=1))


if __name__ == "__main__":
    main()
