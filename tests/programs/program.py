"""A random synchronous program: ``multiverso run program.py SEED [keyed] [kill]``; prints a digest of what was read.

The seed makes the tables, their updaters, the managers and their rules, how often the run is saved, and what each step
does; the same in all workers, which draw their numbers apart. In half of them one worker leaves early, and prints
nothing. With ``keyed`` there are keyed tables, too; with ``kill``
one worker ends in the middle of the first start, by SIGKILL or with an error.
"""

from __future__ import annotations

import hashlib
import os
import random
import signal
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

import multiverso as mv
from multiverso.params import SharedParams

KEYS = np.arange(40)
UPDATERS = (
    "add",
    "sgd",
    mv.updaters.momentum(0.9),
    mv.updaters.adagrad(0.1),
    mv.updaters.adam(0.05),
    mv.updaters.rmsprop(0.05),
    mv.updaters.chain(mv.updaters.clip(norm=1.0), mv.updaters.adam(0.1)),
)
RULES = (
    mv.rules.asgd(),
    mv.rules.easgd(0.2),
    mv.rules.downpour(fetch=2, push=3),
    mv.rules.model_averaging(),
    mv.rules.diloco(0.7, 0.9),
)
Step = Callable[[str, np.random.Generator], "bytes | None"]


def array_steps(plan: random.Random) -> tuple[Any, Step]:
    size, updater = plan.choice([1, 7, 1000, 70_000]), plan.choice(UPDATERS)
    table = mv.ArrayTableHandler(size, dtype=plan.choice(["float32", "float64"]), updater=updater, init_value=2.0)

    def step(kind: str, draws: np.random.Generator) -> bytes | None:
        for _ in range({"read": 0, "two adds": 2}.get(kind, 1)):
            table.add_async(draws.normal(size=size)).wait() if kind == "no read" else table.add(draws.normal(size=size))
        return None if kind == "no read" else table.get().tobytes()

    return table, step


def exchange_steps(plan: random.Random) -> tuple[Any, Step]:
    """An array that is exchanged. What a worker holds of it comes back with the table's values, so it holds no more."""
    table = mv.ArrayTableHandler(plan.choice([3, 9000]), updater=plan.choice(UPDATERS[:6]))

    def step(kind: str, draws: np.random.Generator) -> bytes | None:
        if kind == "no read":
            return None
        last = np.zeros(table.size, "float32")
        local = draws.normal(size=table.size).astype("float32")
        table.exchange(local, last)
        return local.tobytes()

    return table, step


def matrix_steps(plan: random.Random) -> tuple[Any, Step]:
    rows, columns = plan.choice([3, 50, 700]), plan.choice([1, 5, 64])
    table = mv.MatrixTableHandler(
        rows, columns, dtype=plan.choice(["float32", "float64"]), updater=plan.choice(UPDATERS)
    )

    def step(kind: str, draws: np.random.Generator) -> bytes | None:
        if kind == "two adds":
            table.add(draws.normal(size=(rows, columns)))
        if kind != "read":
            ids = draws.integers(rows, size=4)
            table.add(draws.normal(size=(4, columns)), ids)
        if kind == "no read":
            return None
        return (table.get(np.arange(3)) if kind == "add" else table.get()).tobytes()

    return table, step


def keyed_steps(plan: random.Random) -> tuple[Any, Step]:
    dim = plan.choice([1, 6])
    table = mv.KeyedTable(dim, updater=plan.choice(UPDATERS), initial=("normal", 0.1), seed=3)

    def step(kind: str, draws: np.random.Generator) -> bytes | None:
        for _ in range({"read": 0, "two adds": 2}.get(kind, 1)):
            keys = draws.integers(len(KEYS), size=draws.integers(1, 9))
            table.add(draws.normal(size=(len(keys), dim)), keys)
        return None if kind == "no read" else table.get(KEYS).tobytes()

    return table, step


def manager_steps(plan: random.Random) -> tuple[Any, Step]:
    rule, dtype = plan.choice(RULES), plan.choice(["float32", "float64"])
    every = 1 if rule.name == "downpour" else plan.choice([1, 2, 3])
    arrays = [np.zeros(plan.choice([3, 5000]), dtype), np.ones((2, 3), dtype)]
    manager = SharedParams(arrays, rule=rule, every=every)

    def step(kind: str, draws: np.random.Generator) -> bytes:
        for array in manager.arrays:
            array += draws.normal(size=array.shape)
        manager.step()
        return b"".join(array.tobytes() for array in manager.arrays)

    return manager, step


def main(seed: int, keyed: bool, kill: bool) -> None:
    plan = random.Random(seed)
    mv.init(sync=True)
    kinds = [array_steps, exchange_steps, matrix_steps, manager_steps, *([keyed_steps] * 2 * keyed)]
    made = [plan.choice(kinds)(plan) for _ in range(plan.randint(1, 4))]
    steps, every = plan.randint(6, 25), plan.choice([1, 2, 3, 5])
    program = [
        [(which, plan.choice(["add", "two adds", "read", "no read"])) for which in range(len(made))]
        for _ in range(steps)
    ]
    victim, ends_at = plan.randrange(mv.workers_num()), plan.randrange(1, steps)
    leaver, leaves_after = plan.randrange(mv.workers_num()), plan.randrange(1, 2 * steps)
    leaves = mv.workers_num() > 1 and mv.worker_id() == leaver and leaves_after < steps
    draws = np.random.default_rng([seed, mv.worker_id()])
    seen = hashlib.sha256()
    with mv.checkpoint("run", *(m for m, _ in made if isinstance(m, SharedParams)), every=every) as checkpoint:
        own = checkpoint.restore()
        if own is not None:
            draws.bit_generator.state, seen = own["draws"], hashlib.sha256(own["seen"])
        for step in range(own["step"] if own else 0, leaves_after if leaves else steps):
            if kill and mv.restarts() == 0 and (mv.worker_id(), step) == (victim, ends_at):
                if plan.random() < 0.3:
                    raise RuntimeError("a worker's own error")
                os.kill(os.getpid(), signal.SIGKILL)
            for which, kind in program[step]:
                seen.update(made[which][1](kind, draws) or b"")
            seen = hashlib.sha256(kept := seen.digest())
            checkpoint.step({"step": step + 1, "draws": draws.bit_generator.state, "seen": kept})
    if not leaves:
        for _, last in made:
            seen.update(last("read", draws) or b"")
        print(f"worker {mv.worker_id()} of {mv.workers_num()}: {seen.hexdigest()[:16]}", flush=True)
    mv.shutdown()


main(int(sys.argv[1]), "keyed" in sys.argv, "kill" in sys.argv)
