"""Runs all tests many times on a machine that is made slow, and lists what failed even once.

    python scripts/again.py [--times 20] [--seed 1] [--logs build/again] COMMAND...

The runs alternate: one beside a process that keeps a core busy, the next while processes of the tests are stopped at
random (scripts/pauses.py). The command prints pytest's short summary; the output of each run is kept in a file.
Ends with 0 if every run passed.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path

PAUSES = Path(__file__).with_name("pauses.py")
# Ends by itself if we are killed.
BUSY = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    sum(range(1_000_000))"
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+::.+?|\S+\.py)(?: - (.*))?$", re.MULTILINE)
PASSED = re.compile(r"\b(\d+) passed\b")


def run(command: list[str], number: int, seed: int, log: Path) -> int:
    """Runs the command once, its output in ``log``; returns its exit code."""
    with ExitStack() as stack:
        if number % 2:
            busy = stack.enter_context(subprocess.Popen([sys.executable, "-c", BUSY]))
            stack.callback(busy.kill)
        else:
            command = [sys.executable, str(PAUSES), str(seed + number), *command]
        with log.open("wb") as output:
            return subprocess.run(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--logs", type=Path, default=Path("build/again"))
    parser.add_argument("command", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    given.logs.mkdir(parents=True, exist_ok=True)
    failed: dict[str, list[str]] = defaultdict(list)
    runs_failed = 0
    for number in range(1, given.times + 1):
        log, began = given.logs / f"{number:02}.log", time.monotonic()
        status = run(given.command, number, given.seed, log)
        text = log.read_text(errors="replace")
        found = dict(FAILED.findall(text))
        for name, reason in found.items():
            failed[name].append(f"run {number}: {reason}")
        runs_failed += bool(status)
        print(
            f"run {number} of {given.times}, {'beside a load' if number % 2 else 'with pauses'}: exit code {status}, "
            f"{sum(map(int, PASSED.findall(text)))} passed, {len(found)} failed, {time.monotonic() - began:.0f} s",
            *(f"  {name}: {reason}" for name, reason in found.items()),
            sep="\n",
            flush=True,
        )
    print(f"make again: {runs_failed} of {given.times} runs failed; logs in {given.logs}")
    for name, reasons in sorted(failed.items()):
        print(f"  {name}", *(f"    {reason}" for reason in reasons), sep="\n")
    return int(runs_failed > 0)


if __name__ == "__main__":
    sys.exit(main())
