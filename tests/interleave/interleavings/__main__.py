"""Looks for schedules that break a law: ``python -m interleavings [--seconds N] [--seed N] [--law NAME] [--trace]``.

With ``--replay`` one seed is run once, with ``--trace`` every step of it is printed.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from random import SystemRandom

from interleavings.laws import LAWS
from interleavings.scheduler import print_step
from interleavings.source import Source
from interleavings.world import MEMORY, How


def main() -> int:
    """Runs what the command line asks for; returns how many laws were broken."""
    parser = argparse.ArgumentParser(prog="interleavings", description=__doc__.partition("\n")[0])
    parser.add_argument("--law", choices=LAWS, action="append", help="only this one (may be given again)")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, help="of the first schedule; the others follow")
    parser.add_argument("--replay", action="store_true", help="one schedule only: that of --seed")
    parser.add_argument("--trace", action="store_true", help="print each step")
    options = parser.parse_args()
    source = Source(MEMORY)
    names = options.law or list(LAWS)
    if options.replay:
        for name in names:
            steps = LAWS[name](source, options.seed, How(trace=print_step if options.trace else None))
            print(f"{name} {options.seed}: {steps} steps, nothing wrong")
        return 0
    seed = SystemRandom().randrange(1 << 40) if options.seed is None else options.seed
    broken = 0
    print(f"{options.seconds:g} s of {', '.join(names)} from seed {seed}", flush=True)
    for name in names:
        law, until, schedules, steps = (LAWS[name], time.monotonic() + options.seconds / len(names), 0, 0)
        failed: dict[str, list[int]] = {}
        began = time.monotonic()
        while time.monotonic() < until:
            schedule = seed + schedules
            try:
                steps += law(source, schedule)
            except AssertionError as error:
                failed.setdefault(str(error)[:60], []).append(schedule)
                if len(failed[str(error)[:60]]) == 1:
                    traceback.print_exc(limit=-1)
                    print(f"again: --replay --trace --law {name} --seed {schedule}", file=sys.stderr)
            schedules += 1
        rate = steps / (time.monotonic() - began)
        print(f"{name}: {schedules} schedules, {steps} steps, {rate:,.0f} a second; broken by {failed or 'none'}")
        broken += bool(failed)
    return broken


if __name__ == "__main__":
    sys.exit(main())
