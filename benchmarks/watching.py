"""What a page costs its job, and whether scrapes hold while workers are killed: prints JSON.

    python benchmarks/watching.py [--seconds 4] [--turns 5] [--kills 1000] [--out FILE]

The cost is measured in turns: the same job, two workers that exchange 100,000 floats all the time, with ``--page``
and without, and its exchanges a second. The kills: four workers of a job that replaces them, SIGKILL to one after
another while `/metrics` is read without a pause; each answer has to be complete and to name every worker.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

from reporting import give_report

EXCHANGES = """
import sys, time
import numpy as np
import multiverso as mv
mv.init()
table = mv.ArrayTableHandler(100_000)
local, last = np.zeros(100_000, "float32"), np.zeros(100_000, "float32")
mv.barrier()
end, done = time.perf_counter() + float(sys.argv[1]), 0
while time.perf_counter() < end:
    table.exchange(local, last)
    done += 1
print("exchanges", done)
mv.shutdown()
"""
KILLED = """
import os, time
import numpy as np
import multiverso as mv
mv.init()
table = mv.ArrayTableHandler(100, name="weights")
open(f"worker-{mv.worker_id()}", "w").write(str(os.getpid()))
while not os.path.exists("stop"):
    table.add(np.ones(100))
    mv.log(loss=1.0)
    time.sleep(0.001)
mv.shutdown()
"""
WORKERS = 4


def run(program: str, folder: Path, *options: object, arguments: tuple[object, ...] = ()) -> subprocess.Popen[str]:
    """Starts a job; its own words go to a file."""
    path = folder / "job.py"
    path.write_text(program)
    command = [sys.executable, "-m", "multiverso", "run", *map(str, options), str(path), *map(str, arguments)]
    with (folder / "said").open("w") as said:
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=said, text=True, cwd=folder)


def cost(folder: Path, seconds: float, turns: int) -> dict[str, Any]:
    """Returns the exchanges a second of both workers, in turns, with a page and without."""
    rates: dict[str, list[float]] = {"with": [], "without": []}
    for turn in range(2 * turns):
        which = ("with", "without")[(turn + turn // 2) % 2]
        with run(EXCHANGES, folder, "-n", 2, *["--page"] * (which == "with"), arguments=(seconds,)) as job:
            out, _ = job.communicate(timeout=seconds + 120)
            if job.returncode:
                raise RuntimeError((folder / "said").read_text())
        rates[which].append(sum(map(int, re.findall(r"exchanges (\d+)", out))) / seconds)
    medians = {which: statistics.median(found) for which, found in rates.items()}
    return {**{which: round(value) for which, value in medians.items()}, "ratio": medians["with"] / medians["without"]}


def scrape(address: str) -> dict[str, float]:
    """Returns the numbers of `/metrics`, if the answer is whole."""
    with urllib.request.urlopen(address.replace("/?", "/metrics?"), timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))}


def adds_of(found: dict[str, float]) -> list[float]:
    """Returns what is told of each worker."""
    return [value for name, value in found.items() if name.startswith("multiverso_worker_adds_total")]


def kills(number: int) -> dict[str, int]:
    """Kills workers while pages are read, in jobs one after another; returns how often, and what was missing."""
    total: Counter[str] = Counter()
    while total["kills"] < number:
        with tempfile.TemporaryDirectory() as folder:
            total += kills_of_one_job(Path(folder), min(number - total["kills"], 4 * WORKERS))
    return {what: total[what] for what in ("kills", "replaced", "scrapes", "incomplete", "failed", "failed_jobs")}


def kills_of_one_job(folder: Path, number: int) -> Counter[str]:
    """As `kills`; few enough that those who take the dead ones' places begin soon."""
    job = run(KILLED, folder, "-n", WORKERS, "--page", "--on-failure", "continue", "--replace", number)
    while len([*folder.glob("worker-*")]) < WORKERS:
        if job.poll() is not None:
            raise RuntimeError((folder / "said").read_text())
        time.sleep(0.1)
    address = re.findall(r"page: (\S+)", (folder / "said").read_text())[0]
    while len(adds_of(scrape(address))) < WORKERS:  # it looks twice a second
        time.sleep(0.1)
    pids: dict[int, int] = {}
    found: Counter[str] = Counter()
    end = time.monotonic() + 60 + 5 * number
    while found["kills"] < number:
        if job.poll() is not None or time.monotonic() > end:
            raise RuntimeError(f"the job ended after {found['kills']} kills: {(folder / 'said').read_text()}")
        worker = random.randrange(WORKERS)
        text = (folder / f"worker-{worker}").read_text()
        if text and int(text) != pids.get(worker):
            pids[worker] = int(text)
            os.kill(int(text), signal.SIGKILL)
            found["kills"] += 1
        try:
            answer = scrape(address)
        except (OSError, ValueError):
            found["failed"] += 1
            continue
        found["scrapes"] += 1
        found["incomplete"] += len(adds_of(answer)) != WORKERS or answer["multiverso_up"] != 1
    (folder / "stop").touch()
    job.communicate(timeout=120)
    found["failed_jobs"] += job.returncode != 0
    found["replaced"] += (folder / "said").read_text().count("is started again")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    result: dict[str, Any] = {}
    if options.turns:
        with tempfile.TemporaryDirectory() as folder:
            result["exchanges_a_second"] = cost(Path(folder), options.seconds, options.turns)
    if options.kills:
        result["scrapes"] = kills(options.kills)
    give_report(result, options.out)


if __name__ == "__main__":
    main()
