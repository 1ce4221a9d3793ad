"""A keyed table on several hosts beside a dict: random calls, one worker's after another's, with barriers in between.

MULTIVERSO_TEST_SEEDS: how many tables are tried.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rehearsing import rehearsal, seeds

import multiverso as mv
from multiverso.runtime import Session

CALLS = ["add", "add", "add", "get", "get", "remove", "contains", "len", "items", "wait", "prefetch", "load"]
STEPS = 60


@dataclass
class World:
    """What a seed draws: a table, who calls what, and what the table then holds."""

    seed: int
    hosts: tuple[int, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    calls: list[tuple[int, str, Any, int]] = field(default_factory=list)
    rows: dict[int, int] = field(default_factory=dict)
    candidates: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        drawn = random.Random(self.seed)
        self.hosts = drawn.choice([(1, 1), (1, 1, 1), (2, 1)])
        self.options = {
            "dtype": drawn.choice(["int32", "int64", "float32", "float64"]),
            "updater": drawn.choice(["add", "sgd"]),
            "initial": drawn.choice([0, 5]),
            "admission": drawn.choice([1, 1, 1, 2, 3]),
            "cache_rows": drawn.choice([64, 200, 100_000]),
        }
        self.dim, space = drawn.choice([1, 3, 16]), drawn.choice([50, 400, 5000])
        for _ in range(STEPS):
            keys = [drawn.randrange(-space, space) * 1009 for _ in range(drawn.choice([0, 1, 5, 40]))]
            who, call = drawn.randrange(sum(self.hosts)), drawn.choice(CALLS)
            self.calls.append((who, call, np.array(keys, np.int64), drawn.randrange(1, 5)))

    def add(self, keys: list[int], value: int) -> None:
        value = -value if self.options["updater"] == "sgd" else value
        for key in dict.fromkeys(keys):
            delta = value * keys.count(key)
            adds = self.candidates.pop(key, 0) + 1
            if key in self.rows or adds >= self.options["admission"]:
                self.rows[key] = self.value(key) + delta
            else:
                self.candidates[key] = adds

    def value(self, key: int) -> int:
        return int(self.rows.get(key, self.options["initial"]))


def compare(table: Any, world: World, call: str, keys: Any, value: int, file: Path) -> None:
    listed, rows = keys.tolist(), world.rows
    match call:
        case "add":
            table.add(np.full((keys.size, world.dim), value), keys)
            world.add(listed, value)
        case "get":
            found = table.get(keys)
            assert found.shape == (keys.size, world.dim)
            assert found[:, 0].tolist() == [world.value(key) for key in listed]
        case "remove":
            wanted = [rows.pop(key, None) is not None for key in listed]
            removed = table.remove(keys).tolist()
            if world.options["admission"] == 1:  # a candidate goes, too, and is said to have been there or not
                assert removed == [
                    was and key not in listed[:k] for k, (key, was) in enumerate(zip(listed, wanted, strict=True))
                ]
            for key in listed:
                world.candidates.pop(key, None)
        case "contains":
            assert table.contains(keys).tolist() == [key in rows for key in listed]
        case "len":
            assert len(table) == len(rows)
        case "items" | "load":
            if call == "load":
                table.save(file)
                table.load(file)
                world.candidates.clear()
            found = {
                int(key): int(row[0]) for keys, some in table.items(17) for key, row in zip(keys, some, strict=True)
            }
            assert found == rows
        case "wait":
            time.sleep(0.05 * value)  # copies grow old
        case "prefetch":
            table.prefetch(keys)


@pytest.mark.parametrize("seed", seeds(3))
def test_it_is_a_dict(seed: int, tmp_path: Path) -> None:
    world = World(seed)

    def work(session: Session) -> None:
        options: Any = world.options
        table = mv.KeyedTable(world.dim, session=session, **options)
        session.barrier()
        last = None
        for who, call, keys, value in world.calls:
            # adds of one worker that meet on the way count as one, for a key that needs several
            if who != last or world.options["admission"] > 1:
                session.barrier()
                last = who
            if who == session.worker_id:
                compare(table, world, call, keys, value, tmp_path / "table.safetensors")
        session.barrier()
        compare(table, world, "get", np.array([*world.rows, 1], np.int64), 0, tmp_path)
        found = table.check()
        assert not any(found[what] for what in found if what != "keys"), found
        session.barrier()

    with rehearsal(*world.hosts) as job:
        job.run(work)
