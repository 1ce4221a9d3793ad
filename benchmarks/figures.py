"""The figures of docs/experiments.md about rows, keys and applications, one program after another.

python benchmarks/figures.py [NAME ...] [--quick] [--gensim PYTHON] [--folder benchmarks/results]

Each program's JSON goes to FOLDER/NAME.json, and into it what share of all processors others used meanwhile: figures in
seconds count where that is nearly nothing, ratios within a run always.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PICTURES = HERE.parent / "docs" / "results"
PROGRAMS: dict[str, tuple[list[str], list[str]]] = {  # name: arguments, arguments for a quick look
    "rows": (["rows.py"], ["rows.py", "--quick"]),
    "huge_pages": (["huge_pages.py"], ["huge_pages.py", "--mebibytes", "128", "--seconds", "0.2"]),
    "keyed": (["keyed.py", "--only", "sizes", "--keys", "1e6", "1e7"], ["keyed.py", "--only", "sizes", "--quick"]),
    "keyed_growth": (["keyed.py", "--only", "growth"], ["keyed.py", "--only", "growth", "--quick"]),
    "keyed_increments": (["keyed.py", "--only", "increments"], ["keyed.py", "--only", "increments", "--quick"]),
    "word2vec": (["word2vec.py", "--rounds", "2"], ["word2vec.py", "--sentences", "2000", "--rounds", "1"]),
    "recommender": (
        ["recommender.py", "--steps", "10000", "--rounds", "1"],
        ["recommender.py", "--steps", "100", "--rounds", "1"],
    ),
}


def busy_seconds() -> float:
    """Processor seconds that anybody has used since the machine started."""
    user, nice, system, _, _, irq, softirq, *_ = map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def own_seconds() -> float:
    """Those that the programs started here have used."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run(arguments: list[str]) -> dict[str, Any]:
    """Runs a program; returns what it prints, and how quiet the machine was."""
    began, busy, own = time.monotonic(), busy_seconds(), own_seconds()
    command = [sys.executable, str(HERE / arguments[0]), *arguments[1:]]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    seconds = time.monotonic() - began
    others = (busy_seconds() - busy) - (own_seconds() - own)
    result: dict[str, Any] = json.loads(output[output.index("{") :])
    result["run"] = {
        "command": " ".join(["python", f"benchmarks/{arguments[0]}", *arguments[1:]]),
        "date": date.today().isoformat(),
        "seconds": round(seconds, 1),
        "processors": os.cpu_count(),
        "used_by_others": round(max(0.0, others) / seconds / (os.cpu_count() or 1), 3),
    }
    return result


def main() -> None:
    """Writes JSON files."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(PROGRAMS)}; all by default")
    parser.add_argument("--quick", action="store_true", help="small and short: whether they run, not figures")
    parser.add_argument("--gensim", help="a Python that has gensim, to stand beside word2vec")
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    unknown = set(options.names) - set(PROGRAMS)
    if unknown:
        parser.error(f"no such figures: {', '.join(sorted(unknown))}; there are {', '.join(PROGRAMS)}")
    folder = options.folder or (Path(tempfile.mkdtemp()) if options.quick else HERE / "results")
    for name in options.names or PROGRAMS:
        arguments = list(PROGRAMS[name][options.quick])
        if name == "word2vec" and options.gensim:
            arguments += ["--gensim", options.gensim]
        if name == "recommender" and not options.quick:
            arguments += ["--picture", os.path.relpath(PICTURES / "recommender.png")]
        print(f"{name}: {' '.join(arguments)} ...", file=sys.stderr, flush=True)
        result = run(arguments)
        if "--gensim" in arguments:
            result["run"]["command"] = result["run"]["command"].replace(options.gensim, "PYTHON")
        (folder / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
        print(f"{folder / name}.json; others used {result['run']['used_by_others']:.0%}", file=sys.stderr)


if __name__ == "__main__":
    main()
