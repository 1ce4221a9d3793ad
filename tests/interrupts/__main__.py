"""A storm of signals: ``python tests/interrupts [--number N] [--seed N] [KIND ...]``; see `make interrupts`.

Each operation and mode has a process of its own, so that one that ends early is named, however it ended."""

from __future__ import annotations

import argparse
import faulthandler
import os
import signal
import subprocess
import sys
import threading
import time

from interrupting import Storm
from operations import CASES, pair


def storm(kind: str, mode: str, number: int, seed: int) -> int:
    faulthandler.enable()
    threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
    began, steps = time.monotonic(), 0
    with pair(kind, mode) as both, Storm(seed) as signals:
        while signals.number < number:
            both.step(signals)
            steps += 1
    left = threading.active_count() - threads, len(os.listdir("/proc/self/fd")) - files
    print(
        f"{kind} {mode}: {signals.number} interruptions in {steps} steps, the twins are equal, "
        f"{left[0]} threads and {left[1]} descriptors left, {time.monotonic() - began:.0f} s",
        flush=True,
    )
    return 1 if any(left) else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="interrupts", description=__doc__)
    parser.add_argument("kinds", nargs="*", help="only these operations")
    parser.add_argument("--number", type=int, default=10_000, help="signals in each operation and mode")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        kind, _, mode = options.case.partition("/")
        return storm(kind, mode, options.number, options.seed)
    failed = []
    for kind, mode in CASES:
        if options.kinds and kind not in options.kinds:
            continue
        numbers = ["--number", str(options.number), "--seed", str(options.seed)]
        code = subprocess.run(
            [sys.executable, __file__, "--case", f"{kind}/{mode}", *numbers], check=False
        ).returncode
        if code:
            how = (
                f"was ended by {signal.Signals(-code).name}" if code < 0 else f"failed with exit code {code}"
            )
            print(f"{kind} {mode}: {how}", flush=True)
            failed.append(f"{kind} {mode}")
    print(f"failed: {', '.join(failed)}" if failed else "all passed", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
