"""Runs a random program uninterrupted and in other ways, which must all end with the same bits."""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

PROGRAM = Path(__file__).with_name("program.py")
SECONDS = 120
LAUNCHER = ("-m", "multiverso", "run", "--timeout", str(SECONDS))


class Differs(AssertionError):
    """A program has not ended as it did uninterrupted."""


def in_new_interpreters(folder: str, *command: str) -> subprocess.CompletedProcess[str]:
    """Runs a Python program to its end."""
    words = [sys.executable, *command]
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=2 * SECONDS)


def compare(seed: int, run: Callable[..., subprocess.CompletedProcess[str]] = in_new_interpreters) -> list[str]:
    """Runs the program of a seed in each way; returns which those were.

    Args:
        seed: of the program, and of what is done to it.
        run: what runs a Python program in a folder.

    Raises:
        Differs: one of them has not ended as the first, on one host and uninterrupted.
    """
    plan = random.Random(seed)
    workers, keyed = plan.randint(1, 4), plan.random() < 0.4
    one = ["-n", str(workers)]
    several = [*one, "--hosts", str(min(workers, plan.choice([2, 3])))]
    program = [str(seed), *["keyed"] * keyed]
    killed = [*program, "kill"]
    again = ["--max-restarts", "2"]
    ways = {"one host": [(one, program)], "killed and started again": [([*one, *again], killed)]}
    if workers > 1 and not keyed:  # keyed tables are on one host
        ways |= {
            "several hosts": [(several, program)],
            "killed on several hosts, and started again": [([*several, *again], killed)],
            "killed on one host, and resumed on several": [(one, killed), ([*several, "--resume"], program)],
            "killed on several hosts, and resumed on one": [(several, killed), ([*one, "--resume"], program)],
        }
    first: list[str] = []
    for way, starts in ways.items():
        with tempfile.TemporaryDirectory() as folder:
            said = ""
            for options, arguments in starts:
                ended = run(folder, *LAUNCHER, *options, str(PROGRAM), *arguments)
                said += ended.stderr
        lines = sorted(ended.stdout.splitlines())
        first = first or lines
        if ended.returncode or lines != first or len(lines) < max(1, workers - 1):
            raise Differs(f"seed {seed}, {way}: exit code {ended.returncode}, {lines} instead of {first}\n{said}")
    return list(ways)
