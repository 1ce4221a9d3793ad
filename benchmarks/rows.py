"""Rows of a matrix against the machine's limits, in one run: prints JSON.

python benchmarks/rows.py [--quick] [--realtime] [--output FILE] [--old PYTHON]

Each call has ids of its own, so that no call finds in the cache what another one has just used; and once more after an
untimed read of the same rows, as in a step that pulls rows and pushes to them. Two workers stand beside two processes
with private arrays, which share nothing but the memory's ways, and beside two that add to the same array without any
words (sums are lost then): what the machine gives at best. One worker and both are timed in turns, each worker on a
core of its own. With `--realtime`, which the system must permit, nothing else runs on these meanwhile: by the clock, a
busy machine then measures as an idle one, but for its memory. Turns in which a worker was disturbed are left out.

`--old` is the interpreter of another version's environment, whose tables are measured in turns with these.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import multiverso as mv
from reporting import give_report

ROWS, COLUMNS = 100_000, 64
BATCHES = (100, 1_000, 10_000)
KINDS = ("uniform", "zipf")
MINE = 0.97  # of a turn: a worker had its core


def ids_of(kind: str, batch: int, seed: int) -> Any:
    """Random row ids: uniform, or by Zipf's law with exponent 1 over shuffled rows."""
    random = np.random.default_rng(seed)
    if kind == "uniform":
        return random.integers(0, ROWS, batch)
    weights = np.cumsum(1.0 / np.arange(1, ROWS + 1))
    ranks = np.searchsorted(weights, random.random(batch) * weights[-1])
    return np.random.default_rng(0).permutation(ROWS)[ranks]


Call = Callable[[Any], object]


def settle_on(core: int) -> None:
    """Keeps this thread on one of the cores that it may use."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[core % len(cores)]})


@contextlib.contextmanager
def undisturbed(realtime: bool) -> Iterator[None]:
    """With ``realtime`` this thread runs before everything else on its core; what it starts does not."""
    if realtime:
        os.sched_setscheduler(0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(10))
    try:
        yield
    finally:
        if realtime:
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def wait_for_huge_pages(seconds: float = 3.0) -> None:
    """Waits until the node has made the table's pages huge, as NumPy's large arrays have them from the beginning."""
    end, seen, since = time.monotonic() + seconds, -1, time.monotonic()
    while time.monotonic() < end and time.monotonic() - since < seconds / 4:
        rows = Path("/proc/self/smaps_rollup").read_text().splitlines()
        now = sum(int(row.split()[1]) for row in rows if row.startswith("ShmemPmdMapped"))
        if now != seen:
            seen, since = now, time.monotonic()
        time.sleep(0.05)


def turns(
    calls: dict[str, Call], lots: list[Any], seconds: float, before: dict[str, Call] | None = None
) -> dict[str, list[float]]:
    """Times calls in turns, each with ids of its own: nanoseconds a row, 10th percentile and median.

    Args:
        calls: what is timed, by name.
        lots: of ids.
        seconds: for how long.
        before: what each call's ids are given to first, untimed.
    """
    samples: dict[str, list[float]] = {name: [] for name in calls}
    end, turn, apart = time.perf_counter() + seconds, 0, len(lots) // len(calls)
    for call in calls.values():
        call(lots[0])
    while time.perf_counter() < end or turn < 20:
        turn += 1
        for place, (name, call) in enumerate(calls.items()):
            lot = lots[(turn + place * apart) % len(lots)]
            if before is not None:
                before[name](lot)
            began = time.perf_counter_ns()
            call(lot)
            samples[name].append((time.perf_counter_ns() - began) / lot.size)
    return {name: [round(float(np.percentile(times, q)), 2) for q in (10, 50)] for name, times in samples.items()}


def one_worker(batch: int, kind: str, seconds: float, private: bool = True, realtime: bool = False) -> dict[str, Any]:
    """A table beside private memory; without ``private``, the table and NumPy alone (any version)."""
    mv.init()
    table = mv.MatrixTableHandler(ROWS, COLUMNS)
    memory = np.random.default_rng(0).standard_normal((ROWS, COLUMNS), dtype="f4")
    table.add(memory)
    wait_for_huge_pages()
    lots = [ids_of(kind, batch, seed) for seed in range(60)]
    delta, out, taken = (np.zeros((batch, COLUMNS), "f4") for _ in range(3))
    calls: dict[str, Call] = {
        "take": lambda ids: np.take(memory, ids, axis=0, out=taken, mode="clip"),
        "get": lambda ids: table.get(ids, out=out),
        "add": lambda ids: table.add(delta, ids),
    }
    before = {"take": calls["take"], "get": calls["get"], "add": calls["get"]}
    if private:
        from multiverso.bench import limits

        ahead = limits.scatter_add_ahead.compiled("float32")
        plain = limits.scatter_add.compiled("float32")
        # as many calls to each array, or one is more in the cache than another
        flat, other, flat_delta = memory.reshape(-1), memory.copy(), delta.reshape(-1)
        flat_other = other.reshape(-1)
        taken_again = taken.copy()  # what has just been written to is in the cache for whoever is next
        calls["private add, ahead"] = lambda ids: ahead(flat, COLUMNS, ids, flat_delta)
        calls["private add, plain"] = lambda ids: plain(flat_other, COLUMNS, ids, flat_delta)
        calls["take again"] = lambda ids: np.take(other, ids, axis=0, out=taken_again, mode="clip")
        before |= {"private add, ahead": calls["take"], "private add, plain": calls["take again"]}
        before["take again"] = calls["take again"]
    with undisturbed(realtime):
        found = {"apart": turns(calls, lots, seconds), "just_read": turns(calls, lots, seconds, before)}
    mv.shutdown()
    return found


class Turn(NamedTuple):
    """One worker's: how many rows, from when to when, and for how long of that it had a core."""

    rows: int
    began: float
    ended: float
    had: float


def together(batch: int, kind: str, seconds: float, rounds: int, realtime: bool) -> dict[str, Any]:
    """One of two workers: for each call, its turns with the other one idle (of the first worker), and not."""
    from multiverso.bench import limits

    mv.init()
    me = mv.worker_id()
    table = mv.MatrixTableHandler(ROWS, COLUMNS)
    lots = [ids_of(kind, batch, 100 * me + seed) for seed in range(32)]
    delta, out = np.zeros((batch, COLUMNS), "f4"), np.zeros((batch, COLUMNS), "f4")
    ahead = limits.scatter_add_ahead.compiled("float32")
    own, shared = np.ones((ROWS, COLUMNS), "f4").reshape(-1), table.memory().reshape(-1)
    flat = delta.reshape(-1)
    wait_for_huge_pages()
    calls: dict[str, Call] = {
        "get": lambda ids: table.get(ids, out=out),
        "add": lambda ids: table.add(delta, ids),
        "private add, ahead": lambda ids: ahead(own, COLUMNS, ids, flat),
        "shared add without words": lambda ids: ahead(shared, COLUMNS, ids, flat),
    }

    def timed(call: Call, first: int) -> Turn:
        with undisturbed(realtime):
            number, began, used = 0, time.perf_counter(), time.thread_time()
            while time.perf_counter() - began < seconds:
                call(lots[(first + number) % len(lots)])
                number += 1
            return Turn(number * batch, began, time.perf_counter(), time.thread_time() - used)

    settle_on(me)
    found: dict[str, dict[int, list[Turn]]] = {name: {1: [], 2: []} for name in calls}
    for call in calls.values():
        for lot in lots:
            call(lot)
    for turn in range(rounds):
        for name, call in calls.items():
            for workers in (1, 2):
                mv.barrier()
                if me < workers:
                    found[name][workers].append(timed(call, turn))
                mv.barrier()
    mv.shutdown()
    return found


def of_another_version(python: str, batch: int, kind: str, seconds: float) -> dict[str, Any]:
    """The same table in another environment, by this file."""
    command = [python, __file__, "--one", str(batch), kind, str(seconds)]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return found


def rate(turns: tuple[Turn, ...]) -> float | None:
    """Rows a second of workers at once; None if one had not its core, or was not there for all of it."""
    whole = min(turn.ended for turn in turns) - max(turn.began for turn in turns)
    if any(min(turn.had, whole) < MINE * (turn.ended - turn.began) for turn in turns):
        return None
    return sum(turn.rows / (turn.ended - turn.began) for turn in turns)


def speed_up(batch: int, kind: str, seconds: float, rounds: int, realtime: bool) -> dict[str, Any]:
    """Rows a second of two workers against one: medians of the turns in which nobody was disturbed."""
    workers = mv.run(together, 2, (batch, kind, seconds, rounds, realtime))
    found: dict[str, Any] = {}
    for name, turns in workers[0].items():
        ones = [one for turn in turns[1] if (one := rate((Turn(*turn),)))]
        pairs = zip(turns[2], workers[1][name][2], strict=True)
        both = [two for pair in pairs if (two := rate(tuple(Turn(*turn) for turn in pair)))]
        found[name] = {"turns": rounds, "undisturbed": [len(ones), len(both)]}
        if ones and both:
            alone, both_at_once = float(np.median(ones)), float(np.median(both))
            found[name] |= {
                "one_worker_rows_a_second": round(alone),
                "two_workers_rows_a_second": round(both_at_once),
                "speed_up": round(both_at_once / alone, 3),
            }
    return found


def ratios(found: dict[str, Any]) -> dict[str, float]:
    """Of the medians."""
    pairs = {"get / take": ("get", "take"), "add / private add, ahead": ("add", "private add, ahead")}
    pairs["add / private add, plain"] = ("add", "private add, plain")
    return {
        name: round(found[above][1] / found[below][1], 3)
        for name, (above, below) in pairs.items()
        if above in found and below in found
    }


def main() -> None:
    """Prints JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--realtime", action="store_true", help="nothing else runs where it measures")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--old", help="another version's interpreter")
    parser.add_argument("--one", nargs=3, metavar=("BATCH", "KIND", "SECONDS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        batch, kind, seconds = options.one
        print(json.dumps(one_worker(int(batch), kind, float(seconds), private=False)))
        return
    seconds = 0.3 if options.quick else 2.0
    cases = []
    for kind in KINDS:
        for batch in BATCHES:
            found = one_worker(batch, kind, seconds, realtime=options.realtime)
            case = {"ids": kind, "batch": batch}
            for how, times in found.items():
                case[how] = {"nanoseconds_a_row": times, "ratios": ratios(times)}
            if options.old:
                old = of_another_version(options.old, batch, kind, seconds)
                case["old_nanoseconds_a_row"] = old
            cases.append(case)
            print(json.dumps(case), file=sys.stderr, flush=True)
    result = {
        "rows": ROWS,
        "columns": COLUMNS,
        "what": "nanoseconds a row: 10th percentile and median",
        "one_worker": cases,
        "two_workers": {
            kind: speed_up(1_000, kind, 0.02, 15 if options.quick else 60, options.realtime) for kind in KINDS
        },
    }
    give_report(result, options.output)


if __name__ == "__main__":
    main()
