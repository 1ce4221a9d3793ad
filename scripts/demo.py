"""Runs the example with one and with four workers and shows both side by side. Called by `make demo`.

With ``--hosts 2`` the four are on as many hosts, which are all this machine: `make demo HOSTS=2`.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = "examples/logistic_regression.py"
DEADLINE_SECONDS = 300


def train(workers: int, hosts: int = 1) -> list[str]:
    """Runs the example, shows its lines as they come, and returns them without the launcher's prefix."""
    command = [str(Path(sys.executable).parent / "multiverso"), "run", "-n", str(workers)]
    command += ["--timeout", str(DEADLINE_SECONDS), *(["--hosts", str(hosts)] if hosts > 1 else []), EXAMPLE]
    print("$ multiverso", *command[1:], flush=True)
    lines = []
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(re.sub(r"^\[\d+\] ", "", line.rstrip()))
    if process.returncode:
        raise SystemExit(f"the run with {workers} worker(s) failed with exit code {process.returncode}")
    print()
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--hosts", type=int, choices=range(1, 5), default=1, help="on how many hosts the four workers are"
    )
    hosts = parser.parse_args().hosts
    columns = [train(1), train(4, hosts)]
    last = [dict(field.split("=") for field in lines[-1].split()) for lines in columns]
    curves = [re.findall(r"^epoch=(\d+) accuracy=(\S+)$", "\n".join(lines), re.M) for lines in columns]
    if hosts > 1:
        print(f"{'':36}{f'on {hosts} hosts':>12}")
    print(f"{'':24}{'1 worker':>12}{'4 workers':>12}")
    for (epoch, one), (_, four) in zip(*curves, strict=True):
        if int(epoch) in (1, 2, 5) or int(epoch) % 10 == 0:
            print(f"{f'accuracy after epoch {epoch}':24}{one:>12}{four:>12}")
    for name in ("accuracy", "seconds", "exchanges_per_second"):
        label = "accuracy at the end" if name == "accuracy" else name.replace("_", " ")
        print(f"{label:24}{last[0][name]:>12}{last[1][name]:>12}")


if __name__ == "__main__":
    main()
