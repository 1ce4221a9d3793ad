"""Keeps the table of Pythons in docs/internals/platforms.md: what has been run where.

python scripts/platforms.py [FILE ...]

Each FILE is what scripts/wheels.py has printed. It is added to docs/results/platforms.json, in the place of what was
seen before with the same Python on the same kind of processor, and the table is written anew.
"""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE, RESULTS = ROOT / "docs/internals/platforms.md", ROOT / "docs/results/platforms.json"
BEGIN, END = "<!-- made by scripts/platforms.py -->\n\n", "\n<!-- end -->\n"
_HEAD = (
    "| Python | NumPy | kernels | the README's lines, without Numba | tests of the core there, with Numba | seen |\n"
)


def table(runs: Sequence[dict[str, Any]]) -> str:
    """Returns the table of some runs, as Markdown."""
    return _HEAD + "|---|---|---|---|---|---|\n" + "".join(map(_row, runs))


def _row(run: dict[str, Any]) -> str:
    lines = f"passes; {run['megabytes_beyond_numpy']} MB beyond NumPy" if "megabytes_beyond_numpy" in run else "passes"
    cells = [run["python"], run["numpy"], run["kernels"], lines, run["tests"], f"{run['date']}, {run['commit']}"]
    return "| " + " | ".join(cells) + " |\n"


def added(runs: Sequence[dict[str, Any]], wheel: dict[str, Any], seen: dict[str, str]) -> list[dict[str, Any]]:
    """Returns all runs, oldest Python first, with those of one output of wheels.py in the place of older ones."""
    by_place = {(run["python"], run["machine"]): run for run in runs}
    for run in wheel["tried"]:
        tests = run["tests"].partition(" in ")[0]
        by_place[run["python"], run["machine"]] = {**run, "tests": tests, **seen}
    return sorted(by_place.values(), key=lambda run: (run["machine"] != "x86_64", _order(run["python"])))


def _order(version: str) -> list[int]:
    return [int(part) for part in version.split()[0].split(".")]


def main() -> None:
    runs = json.loads(RESULTS.read_text())
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    seen = {"date": datetime.date.today().isoformat(), "commit": commit.stdout.strip()}
    for name in sys.argv[1:]:
        runs = added(runs, json.loads(Path(name).read_text()), seen)
    RESULTS.write_text(json.dumps(runs, indent=1) + "\n")
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + table(runs) + END + rest.partition(END)[2])


if __name__ == "__main__":
    main()
