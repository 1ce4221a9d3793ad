"""Staleness between two and three rehearsed hosts, beside what the simulator says for the same table and pace.

``python benchmarks/hosts_staleness.py`` prints JSON. Each host has a worker that adds one to every number at its own
moments, and looks how many of the others' adds are missing in its copy: their mean, over how many they do in a second.
Both count alike; the simulator (``tests/simulation/simulated/staleness.py``) runs the links' own code.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import multiverso as mv

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "simulation"))

ELEMENTS = 1 << 20  # 4 MiB
EVERY = 0.2
ADD_SECONDS = 0.02
SECONDS = 6.0


def measure(counts: str) -> float:
    """In a worker: returns the mean staleness that it saw, in seconds."""
    mv.init(every=EVERY)
    me, hosts = mv.worker_id(), mv.workers_num()
    added = np.memmap(counts, np.int64, "r+", shape=hosts * 8)[::8]  # all hosts are this machine
    table = mv.ArrayTableHandler(ELEMENTS)
    one = np.ones(ELEMENTS, np.float32)
    mv.barrier()
    began = time.monotonic()
    due, seen = began + ADD_SECONDS * me / hosts, []
    while due < began + SECONDS:
        time.sleep(max(0.0, due - time.monotonic()))
        due += ADD_SECONDS
        table.add(one)
        added[me] += 1
        if due > began + SECONDS / 3:
            others = int(added.sum()) - int(added[me])
            missing = others - (float(table.get().mean()) - int(added[me]))
            seen.append(missing * ADD_SECONDS / (hosts - 1))
    mv.barrier()
    mv.shutdown()
    return float(np.mean(seen))


def main() -> None:
    """Measures and prints."""
    from simulated import staleness

    found: dict[int, Any] = {}
    for hosts in (2, 3):
        with tempfile.NamedTemporaryFile() as counts:
            counts.write(bytes(64 * hosts))
            counts.flush()
            seen = mv.run(measure, hosts, args=(counts.name,), hosts=hosts)
        simulated = staleness.measure(
            hosts, nbytes=4 * ELEMENTS, every=EVERY, add_seconds=ADD_SECONDS, seconds=SECONDS, rate=4e8
        )["staleness_seconds"]
        measured = float(np.mean(seen))
        found[hosts] = {
            "measured_seconds": measured,
            "simulated_seconds": simulated,
            "simulated_by_measured": simulated / measured,
        }
    how = {"elements": ELEMENTS, "every_seconds": EVERY, "add_seconds": ADD_SECONDS}
    print(json.dumps({"load": os.getloadavg()[0], **how, "hosts": found}, indent=1))


if __name__ == "__main__":
    main()
