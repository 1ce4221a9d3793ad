"""Golden traces: what each updater and rule makes of a few small numbers, step by step, as it was when it was right.

``make golden`` writes them anew, which is right only when an algorithm is changed on purpose; the difference in
``golden_traces.json`` belongs into the review of that change. Every operation is rounded as IEEE 754 says and no sum
depends on time, so the numbers are equal to the last bit on every machine.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

import multiverso as mv
from multiverso.cli.warmup import everything
from multiverso.compiling.on_demand import ensure_all
from multiverso.runtime import Node, Session
from multiverso.updaters import BY_NAME

STORED = Path(__file__).with_suffix(".json")
SIZE, STEPS = 3, 4
Trace = list[Any]

UPDATERS: dict[str, Callable[[], mv.updaters.Updater]] = {
    **BY_NAME,
    "adam(count_per='table')": lambda: mv.updaters.adam(count_per="table"),
    "delayed_nesterov(2)": lambda: mv.updaters.delayed_nesterov(2),
}
RULES: dict[str, Callable[[], mv.rules.Rule]] = {
    "asgd()": mv.rules.asgd,
    "downpour(fetch=2, push=3)": lambda: mv.rules.downpour(fetch=2, push=3),
    "dcasgd(0.1, 0.5)": lambda: mv.rules.dcasgd(0.1, 0.5),
    "dcasgd_adaptive(0.1)": lambda: mv.rules.dcasgd_adaptive(0.1),
    "easgd(0.3)": lambda: mv.rules.easgd(0.3),
    "model_averaging()": mv.rules.model_averaging,
    "local_sgd(0.7, 0.9)": lambda: mv.rules.local_sgd(0.7, 0.9),
}


def given(worker: int, step: int, dtype: str) -> Any:
    """What a worker changes in a step: numbers that are not exact in binary, so that the order of sums shows."""
    whole = np.array([(7 * worker + 3 * step + 5 * i) % 11 - 5 for i in range(SIZE)])
    return (whole / 10).astype(dtype)


def of_updater(name: str, workers: int, dtype: str) -> Trace:
    """The table after each round (of one worker: each add)."""

    def work(session: Session) -> Trace:
        table = mv.ArrayTableHandler(SIZE, given(0, 9, dtype), dtype=dtype, updater=UPDATERS[name](), session=session)
        seen = []
        for step in range(STEPS):
            table.add(given(session.worker_id, step, dtype))
            seen.append(table.get().tolist())
        return seen

    return _together(work, workers)[0]


def of_updater_by_row(name: str) -> Trace:
    """A row after each of one worker's adds to a table of rows by key."""

    def work(session: Session) -> Trace:
        table = mv.KeyedTable(SIZE, dtype="float64", updater=UPDATERS[name](), session=session)
        seen = []
        for step in range(STEPS):
            table.add(given(0, step, "float64")[np.newaxis], [7])
            seen.append(table.get([7])[0].tolist())
        return seen

    return _together(work, 1)[0]


def of_rule(name: str, workers: int, dtype: str) -> Trace:
    """After each exchange: each worker's parameters, and the centre."""

    def work(session: Session) -> Trace:
        local = given(0, 9, dtype)
        shared = mv.rules.share(local, RULES[name](), session=session)
        seen = []
        for step in range(STEPS):
            local += given(session.worker_id, step, dtype)
            shared.exchange(local)
            seen.append((local.tolist(), shared.table.snapshot().tolist()))
            session.barrier()  # a snapshot is of the last finished round: nobody may be in the next yet
        return seen

    traces = _together(work, workers)
    return [{"workers": [trace[step][0] for trace in traces], "centre": traces[0][step][1]} for step in range(STEPS)]


def _together(work: Callable[[Session], Trace], workers: int) -> list[Trace]:
    def worker(address: str, number: int) -> Trace:
        with Session(address, number, sync=workers > 1, timeout_seconds=250) as session:
            return work(session)

    with closing(Node(workers=workers)) as node, ThreadPoolExecutor(workers) as threads:
        futures = [threads.submit(worker, node.address, number) for number in range(workers)]
        return [future.result(280) for future in futures]


def cases() -> dict[str, Callable[[], Trace]]:
    """Returns every trace by name, to be made when called."""
    found: dict[str, Callable[[], Trace]] = {}
    found["updater adam, by row"] = lambda: of_updater_by_row("adam")
    for name, make in UPDATERS.items():
        if any(state.per == "row" for state in make().states):
            found[f"updater {name}, by row"] = lambda n=name: of_updater_by_row(n)
            continue
        for workers in (1, 3):
            found[f"updater {name}, {_mode(workers)}"] = lambda n=name, w=workers: of_updater(n, w, "float64")
    for name, rule in RULES.items():
        for workers in (1, 3):
            if workers > 1 or "async" in rule().modes:
                found[f"rule {name}, {_mode(workers)}"] = lambda n=name, w=workers: of_rule(n, w, "float64")
    found["rule asgd(), 3 workers in rounds, float32"] = lambda: of_rule("asgd()", 3, "float32")
    found["updater nesterov, 3 workers in rounds, float32"] = lambda: of_updater("nesterov", 3, "float32")
    return found


def _mode(workers: int) -> str:
    return "1 worker" if workers == 1 else f"{workers} workers in rounds"


def read() -> dict[str, Trace]:
    """Returns the stored traces."""
    stored: dict[str, Trace] = json.loads(STORED.read_text())
    return stored


def write() -> None:
    """Stores today's traces."""
    ensure_all(everything(["float32", "float64"]))  # before anybody waits for anybody, however long it takes
    traces = {name: make() for name, make in cases().items()}
    lines = [
        f"{json.dumps(name)}: [\n  " + ",\n  ".join(map(json.dumps, trace)) + "\n]" for name, trace in traces.items()
    ]
    STORED.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    write()
    print(f"wrote {STORED}; git diff shows what has changed")
