"""A storm of signals: ``python tests/interrupts [--number N] [--seed N] [KIND ...]``; see `make interrupts`.

Each operation and mode has a process and a session of its own, so that one that ends early is named, however it ended,
and ends nobody else. At the end, also at an early one, stands what became of each."""

from __future__ import annotations

import argparse
import faulthandler
import os
import signal
import subprocess
import sys
import threading
import time
from types import FrameType

from interrupting import Storm
from operations import CASES, pair

_ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM)


class Ended(BaseException):
    """A signal ends the whole run."""


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


def outcome(case: str, options: argparse.Namespace) -> str:
    """Runs one case in a process of its own; returns "passed", or how it ended."""
    numbers = ["--number", str(options.number), "--seed", str(options.seed)]
    command = [sys.executable, __file__, "--case", case, *numbers]
    with subprocess.Popen(command, start_new_session=True) as child:
        try:
            code = child.wait()
        except BaseException:
            os.killpg(child.pid, signal.SIGKILL)
            raise
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"failed with exit code {code}" if code else "passed"


def _end(number: int, frame: FrameType | None) -> None:
    raise Ended(signal.Signals(number).name)


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
    cases = [f"{kind}/{mode}" for kind, mode in CASES if not options.kinds or kind in options.kinds]
    became = dict.fromkeys(cases, "was not begun")
    for number in _ENDINGS:
        signal.signal(number, _end)
    try:
        for case in cases:
            became[case] = "was not ended"
            became[case] = outcome(case, options)
            print(f"{case}: {became[case]}", flush=True)
    except Ended as ended:
        print(f"the whole run was ended by {ended}", flush=True)
    finally:
        wrong = [f"{case} {what}" for case, what in became.items() if what != "passed"]
        print(f"{len(cases) - len(wrong)} of {len(cases)} cases passed", *wrong, sep="\n  ", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
