"""Looks for schedules in which a sum is wrong or a barrier does not end: ``python -m simulated [--seed N]``.

With ``--control`` in those of the control connections and the coordinator: orders that are lost or come twice, hosts
that wait for ever or are given up for no reason. With ``--replay`` the one of ``--seed`` is run again, and everything
that happens in it is printed.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable
from random import SystemRandom

from simulated import clocks, quorum, rejoining, rounds, spread, statistics
from simulated.control import Control
from simulated.world import Memory, World, run


def main() -> int:
    """Runs what the command line asks for; returns how many schedules failed."""
    parser = argparse.ArgumentParser(prog="simulated", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--schedules", type=int, help="so many, instead of for a time")
    parser.add_argument("--seed", type=int, help="of the first schedule; the others follow")
    parser.add_argument("--replay", action="store_true", help="one schedule only, with all that happens")
    parser.add_argument("--rounds", action="store_true", help="synchronous rounds instead of sums")
    parser.add_argument("--quorum", action="store_true", help="rounds with a quorum")
    parser.add_argument("--rejoining", action="store_true", help="rounds of hosts that are lost and come again")
    parser.add_argument("--statistics", action="store_true", help="running means and variances instead of sums")
    parser.add_argument("--joins", action="store_true", help="in each a host is lost and comes again")
    parser.add_argument("--clocks", action="store_true", help="bounded staleness instead of sums")
    parser.add_argument("--spread", action="store_true", help="rows by key with backups instead of sums")
    parser.add_argument("--control", action="store_true", help="control connections and coordinator instead")
    options = parser.parse_args()
    memory = Memory()

    def go(seed: int, trace: Callable[[str], None] | None = None) -> World | Control:
        if options.control:
            control = Control(seed, trace or (lambda _: None))
            control.run()
            return control
        if options.clocks:
            return clocks.run(seed, memory, trace)
        if options.spread:
            return spread.run(seed, trace)
        if options.rejoining:
            return rejoining.run(seed, trace)
        if options.quorum:
            return quorum.run(seed, trace)
        if options.statistics:
            return statistics.run(seed, memory, trace)
        return rounds.run(seed, trace) if options.rounds else run(seed, memory, trace, options.joins)

    if options.replay:
        go(options.seed, print)
        print("nothing wrong")
        return 0
    first = SystemRandom().randrange(1 << 40) if options.seed is None else options.seed
    began, done, failed, faults, frames = time.monotonic(), 0, 0, 0, 0
    while time.monotonic() - began < options.seconds if options.schedules is None else done < options.schedules:
        seed = first + done
        done += 1
        try:
            world = go(seed)
        except Exception:
            failed += 1
            traceback.print_exc(limit=-2)
            kinds = ("rounds", "quorum", "rejoining", "control", "statistics", "clocks", "joins", "spread")
            kind = "".join(f"--{kind} " for kind in kinds if getattr(options, kind))
            again = f"'{kind}--replay'"
            print(f"seed {seed} failed: make simulate SEED={seed} ARGS={again}", flush=True)
            if failed >= 10:
                break
            continue
        faults += world.faults
        frames += sum(len(kept) for kept in world.history.values())
    seconds = time.monotonic() - began
    print(
        f"{done} schedules from seed {first} in {seconds:.0f} s ({60 * done / seconds:.0f} a minute), "
        f"{frames} frames, {faults} faults, {failed} failed"
    )
    return failed


sys.exit(main())
