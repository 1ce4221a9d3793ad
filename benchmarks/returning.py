"""What others notice when a host with rows by key is lost, started again, and takes its rows back: JSON.

    python benchmarks/returning.py [--rows 1000000] [--repeats 3] [--output FILE]

Three hosts with a worker each, a rehearsal: all share this machine's cores. Each worker adds to and reads 500 random
rows of 16 int64 at a time, of a table with ``copies=2``. All processes of the second host are killed and started again
by the launcher. ``longest``: of the calls of the two others, in seconds: before the kill, from then until the new
worker has begun, from then until rows live on its host again, and in the ten seconds after that.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from reporting import give_report

DEADLINE = 300.0
BEFORE_SECONDS, AFTER_SECONDS = 8.0, 10.0
WORKER = """
import json, os, signal, sys, time
import numpy as np
import multiverso as mv

rows, before, after, notes = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]), sys.argv[4]

def note(**what):
    with open(notes, "a") as file:
        file.write(json.dumps(what) + "\\n")

mv.init()
me, is_new = mv.worker_id(), mv.incarnation() > 0
dice, ones = np.random.default_rng((me, is_new)), np.ones((500, 16), np.int64)
over = mv.ArrayTableHandler(1, name="over")
table = mv.KeyedTable(16, dtype="int64", copies=2, name="rows")
if me == 0:
    for low in range(0, rows, 10_000):
        table.add(np.ones((min(10_000, rows - low), 16), np.int64), np.arange(low, min(low + 10_000, rows)))
mv.barrier()
moments, calls = [time.time()], []
while not over.get()[0]:
    keys, began = dice.integers(0, rows, 500), time.time()
    table.add(ones, keys)
    table.get(keys)
    calls.append((began, time.time() - began))
    if me == 1 and not is_new and time.time() > moments[0] + before:
        note(killed=time.time())
        for pid in (os.getppid(), os.getpid()):
            os.kill(pid, signal.SIGKILL)
    if is_new and len(moments) == 1 and (moved := table.check()["keys"]):
        moments.append(time.time())
    if is_new and len(moments) == 2 and time.time() > moments[1] + after:
        over.add([1])
        note(begun=moments[0], returned=moments[1], rows=moved)
if me != 1:
    note(calls=calls)
mv.shutdown()
"""


def measure(rows: int) -> dict[str, Any]:
    """Runs one job; returns seconds from the kill to each moment, and the longest calls in between.

    Raises:
        RuntimeError: the job failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        program, notes = Path(folder, "worker.py"), Path(folder, "notes")
        program.write_text(WORKER)
        options = ["--hosts", 3, "-n", 3, "--on-failure", "continue", "--replace", 1]
        arguments = [program, rows, BEFORE_SECONDS, AFTER_SECONDS, notes]
        command = [sys.executable, "-m", "multiverso", "run", *options, *arguments]
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=DEADLINE, check=False)
        noted = [json.loads(line) for line in notes.read_text().splitlines()]
    said: dict[str, Any] = {name: value for one in noted for name, value in one.items()}
    said["calls"] = [call for one in noted for call in one.get("calls", [])]
    if done.returncode or "returned" not in said:
        raise RuntimeError(f"the job ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    moments = [0.0, said["killed"], said["begun"], said["returned"], float("inf")]
    names = ("before", "lost", "returning", "after")
    longest = {
        name: round(max(seconds for began, seconds in said["calls"] if low <= began < high), 3)
        for name, low, high in zip(names, moments, moments[1:], strict=False)
    }
    after = {what: round(said[what] - said["killed"], 2) for what in ("begun", "returned")}
    return {"seconds_after_the_kill": after, "rows_moved": said["rows"], "longest": longest}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    runs = [measure(given.rows) for _ in range(given.repeats)]
    longest = {name: statistics.median(run["longest"][name] for run in runs) for name in runs[0]["longest"]}
    give_report({"rows": given.rows, "longest": longest, "runs": runs}, given.output)


if __name__ == "__main__":
    main()
