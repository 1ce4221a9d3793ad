"""A storm of signals: ``python tests/interrupts [--number N] [--seed N] [KIND ...]``; see `make interrupts`."""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time

from interrupting import Storm
from operations import CASES, pair


def main() -> int:
    parser = argparse.ArgumentParser(prog="interrupts", description=__doc__)
    parser.add_argument("kinds", nargs="*", help="only these operations")
    parser.add_argument("--number", type=int, default=10_000, help="signals in each operation and mode")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    for kind, mode in CASES:
        if options.kinds and kind not in options.kinds:
            continue
        threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
        began, steps = time.monotonic(), 0
        with pair(kind, mode) as both, Storm(options.seed) as storm:
            while storm.number < options.number:
                both.step(storm)
                steps += 1
        left = threading.active_count() - threads, len(os.listdir("/proc/self/fd")) - files
        print(
            f"{kind} {mode}: {storm.number} interruptions in {steps} steps, the twins are equal, "
            f"{left[0]} threads and {left[1]} descriptors left, {time.monotonic() - began:.0f} s",
            flush=True,
        )
        if any(left):
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
