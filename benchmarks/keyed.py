"""Keys by the million: what a keyed table finds, takes in, weighs, and how it grows: prints JSON.

python benchmarks/keyed.py [--quick] [--keys N ...] [--output FILE]

Wall time is what a user sees; beside it stands the processor's time of the calling thread, which a busy machine
changes less.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import multiverso as mv
from reporting import give_report

DIM, BATCH, LOOKUP = 16, 10_000, 100
HUGE_SECONDS = 60.0  # to wait for the node at most


def keys_of(number: int) -> Any:
    """Different keys in random order, of any bits."""
    return np.random.default_rng(0).permutation(number).astype(np.int64) * 0x9E3779B1 - (number << 20)


def pace(call: Callable[[Any], object], keys: Any) -> dict[str, float]:
    """Goes through keys in batches: millions a second of wall time, and processor nanoseconds a key."""
    processor, began = time.thread_time_ns(), time.perf_counter()
    for start in range(0, keys.size, BATCH):
        call(keys[start : start + BATCH])
    seconds, processor = time.perf_counter() - began, time.thread_time_ns() - processor
    return {
        "millions_a_second": round(keys.size / seconds / 1e6, 3),
        "processor_ns_a_key": round(processor / keys.size, 1),
    }


def huge_bytes() -> int:
    """How much shared memory this process sees in huge pages."""
    rows = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(1024 * int(row.split()[1]) for row in rows if row.startswith("ShmemPmdMapped"))


def wait_for_huge_pages(touch: Callable[[], object], seconds: float) -> int:
    """Uses the table until the node has stopped making its pages large: bytes in large ones."""
    end, seen, since = time.monotonic() + seconds, -1, time.monotonic()
    while time.monotonic() < end and time.monotonic() - since < 4:
        touch()
        now = huge_bytes()
        if now != seen:
            seen, since = now, time.monotonic()
        time.sleep(0.5)
    return seen


def of_one_size(number: int) -> dict[str, Any]:
    """One worker: inserts, finds, adds, and what a key weighs."""
    mv.init()
    table = mv.KeyedTable(DIM, initial="uniform", name="benchmark")
    keys, random = keys_of(number), np.random.default_rng(1)
    delta, out = np.zeros((BATCH, DIM), "f4"), np.zeros((BATCH, DIM), "f4")
    table.add(delta, keys[:BATCH])
    table.get(keys[:BATCH], out=out)  # compiled, and mapped
    found: dict[str, Any] = {"keys": number}
    found["insert"] = pace(lambda part: table.add(delta[: part.size], part), keys[BATCH:])
    anywhere = random.permutation(keys)
    get = lambda part: table.get(part, out=out[: part.size])  # noqa: E731
    found["get, small pages"] = pace(get, anywhere)
    found["bytes_in_huge_pages"] = wait_for_huge_pages(lambda: pace(get, anywhere), HUGE_SECONDS)
    found["get"] = pace(get, anywhere)
    found["get in the order of insertion"] = pace(get, keys)
    found["get, absent"] = pace(get, anywhere ^ (1 << 62))
    found["add"] = pace(lambda part: table.add(delta[: part.size], part), anywhere)
    memory, taken = np.ones((number, DIM), "f4"), np.zeros((BATCH, DIM), "f4")
    places = random.permutation(number)
    take = lambda part: np.take(memory, part, axis=0, out=taken[: part.size], mode="clip")  # noqa: E731
    found["np.take of as many rows"] = pace(take, places)
    stats = table.stats()
    rows = stats["keys"] * table.spec.row_bytes
    # beside the row: its stamp, its share of a word, the segments and their words and counts
    beside = stats["bytes"] - rows + 16 * stats["segments"] + 4 * stats["keys"]
    found["bytes_a_key_beside_the_row"] = round(beside / stats["keys"], 1)
    mv.shutdown()
    return found


def growth(smallest: int, largest: int) -> dict[str, Any] | None:
    """Worker 0 inserts; worker 1 looks keys up meanwhile, and then as often while nothing grows."""
    mv.init()
    table = mv.KeyedTable(DIM, initial="uniform", name="growing")
    shared = mv.ArrayTableHandler(1)
    keys = keys_of(largest)
    delta, out = np.zeros((BATCH, DIM), "f4"), np.zeros((LOOKUP, DIM), "f4")
    found = None
    if mv.worker_id() == 0:
        pace(lambda part: table.add(delta[: part.size], part), keys[:smallest])
        mv.barrier()
        inserted = pace(lambda part: table.add(delta[: part.size], part), keys[smallest:])
        shared.add(np.ones(1, "f4"))
        mv.barrier()
        found = {"insert": inserted}
    else:
        random = np.random.default_rng(2)
        lots = [keys[random.integers(0, smallest, LOOKUP)] for _ in range(256)]
        table.get(lots[0], out=out)
        mv.barrier()

        private = np.ones((smallest, DIM), "f4")
        places = [random.integers(0, smallest, LOOKUP) for _ in range(256)]

        def look(until: Callable[[], bool]) -> dict[str, Any]:
            """Looks keys up, and as many rows of private memory in turns, which no table can hold up."""
            kinds: dict[str, Callable[[int], object]] = {
                "lookups": lambda i: table.get(lots[i], out=out),
                "private": lambda i: np.take(private, places[i], axis=0, out=out, mode="clip"),
            }
            wall: dict[str, list[int]] = {name: [] for name in kinds}
            processor: dict[str, list[int]] = {name: [] for name in kinds}
            number = 0
            while number % 64 or not until():
                for name, call in kinds.items():
                    used, began = time.thread_time_ns(), time.perf_counter_ns()
                    call(number % 256)
                    wall[name].append(time.perf_counter_ns() - began)
                    processor[name].append(time.thread_time_ns() - used)
                number += 1
            found: dict[str, Any] = {"number": number}
            for name in kinds:
                found[name] = {
                    clock: {
                        what: round(float(np.percentile(times[name], q)) / 1e3, 1)
                        for what, q in (("median", 50), ("p99", 99), ("p99.99", 99.99), ("longest", 100))
                    }
                    for clock, times in (("microseconds", wall), ("processor_microseconds", processor))
                }
            return found

        before = table.stats()
        growing_began = time.perf_counter()
        growing = look(lambda: shared.get()[0] > 0)
        growing_seconds = time.perf_counter() - growing_began
        mv.barrier()
        after = table.stats()
        growing |= {name: after[name] - before[name] for name in ("splits", "waits")}
        end = time.perf_counter() + growing_seconds
        found = {"while_it_grows": growing, "at_rest": look(lambda: time.perf_counter() > end)}
    mv.barrier()
    mv.shutdown()
    return found


def increments(number: int, share: float = 0.01) -> dict[str, Any] | None:
    """Worker 0 trains on 1 % of the rows; worker 1 writes snapshots meanwhile, or does not."""
    mv.init()
    table = mv.KeyedTable(DIM, initial="uniform", name="snapshots")
    stage = mv.ArrayTableHandler(1)
    keys = keys_of(number)
    few = keys[: max(BATCH, int(number * share))]
    delta = np.ones((BATCH, DIM), "f4")
    found: dict[str, Any] | None = None
    add = lambda part: table.add(delta[: part.size], part)  # noqa: E731
    if mv.worker_id() == 0:
        pace(add, keys)
        mv.barrier()
        mv.barrier()  # all of it is written
        pace(add, few)
        rates: dict[str, list[float]] = {"alone": [], "meanwhile": []}
        mv.barrier()
        for _ in range(5):
            for name in rates:
                mv.barrier()
                processor, done, end = time.thread_time_ns(), 0, time.perf_counter() + 0.3
                while time.perf_counter() < end:
                    pace(add, few)
                    done += few.size
                rates[name].append((time.thread_time_ns() - processor) / done)
                mv.barrier()
        medians = {name: round(float(np.median(times)), 1) for name, times in rates.items()}
        slowed = medians["meanwhile"] / medians["alone"] - 1
        found = {"processor_ns_an_add": medians, "slowed_by": round(slowed, 3)}
    else:
        with tempfile.TemporaryDirectory() as folder:
            mv.barrier()
            whole = table.save_increment(folder)
            mv.barrier()
            mv.barrier()
            part = table.save_increment(folder)
            seconds = []
            for _ in range(5):
                for writes in (False, True):
                    mv.barrier()
                    if writes:
                        began = time.perf_counter()
                        table.save_increment(folder)
                        seconds.append(time.perf_counter() - began)
                    mv.barrier()
        found = {
            "rows": number,
            "touched": part.keys,
            "whole_bytes": whole.nbytes,
            "increment_bytes": part.nbytes,
            "share": round(part.nbytes / whole.nbytes, 5),
            "seconds_an_increment": round(float(np.median(seconds)), 4),
        }
    stage.get()
    mv.barrier()
    mv.shutdown()
    return found


def together(found: list[Any]) -> dict[str, Any]:
    """What two workers have found."""
    return {name: value for part in found for name, value in (part or {}).items()}


def main() -> None:
    """Prints JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--keys", type=float, nargs="*")
    parser.add_argument("--only", choices=("sizes", "growth", "increments"))
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    sizes = [int(n) for n in options.keys or ((1e5, 3e5) if options.quick else (1e5, 1e6, 1e7))]
    result: dict[str, Any] = {"dim": DIM, "batch": BATCH}
    if options.only in (None, "sizes"):
        result["sizes"] = []
        for number in sizes:
            result["sizes"].append(of_one_size(number))
            print(json.dumps(result["sizes"][-1]), file=sys.stderr, flush=True)
    if options.only in (None, "growth"):
        result["growth"] = together(mv.run(growth, 2, (sizes[0], sizes[-1])))
        print(json.dumps(result["growth"]), file=sys.stderr, flush=True)
    if options.only in (None, "increments"):
        result["increments"] = together(mv.run(increments, 2, (min(sizes[-1], 1_000_000),)))
    give_report(result, options.output)


if __name__ == "__main__":
    main()
