"""Random adds, removals, ticks, saves and loads of a keyed table on several hosts, beside a dictionary."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rehearsing import rehearsal

import multiverso as mv
from multiverso.hosts.spread.placement import groups_of, homes_of
from multiverso.runtime import Session

IDLE_TICKS, STEPS = 3, 60
OPERATIONS = ("add", "add", "add", "remove", "tick", "tick", "save", "load", "save a part", "load parts")
Rows = dict[int, tuple[int, int]]  # of each key its value, and its host's time when it was added to last


class Model:
    """What the table should hold. The same in each worker, which draws the same operations."""

    def __init__(self, hosts: int) -> None:
        self.homes = homes_of(range(hosts))
        self.rows: Rows = {}
        self.times = [0] * hosts
        self.saved: dict[str, tuple[Rows, int]] = {}

    def home(self, key: int) -> int:
        return int(self.homes[groups_of(np.array([key]))][0])

    def add(self, key: int, value: int) -> None:
        self.rows[key] = (self.rows.get(key, (0, 0))[0] + value, self.times[self.home(key)])

    def tick(self, host: int) -> None:
        self.times[host] += 1
        gone = [k for k, (_, used) in self.rows.items() if self.times[self.home(k)] - used >= IDLE_TICKS]
        for key in gone:
            if self.home(key) == host:
                del self.rows[key]

    def load(self, what: str) -> None:
        """What is loaded counts as used just now."""
        rows, time = self.saved[what]
        self.times = [time] * len(self.times)
        self.rows = {key: (value, time) for key, (value, _) in rows.items()}


def work(session: Session, workers: tuple[int, ...], seed: int, folder: Path) -> None:
    draw = random.Random(seed)
    hosts = [host for host, number in enumerate(workers) for _ in range(number)]
    eviction = mv.Eviction(idle_ticks=IDLE_TICKS)
    table = mv.KeyedTable(2, dtype="int64", eviction=eviction, name="rows", session=session)
    model = Model(len(workers))
    done: list[Any] = []
    for _ in range(STEPS):
        actor, operation = draw.randrange(len(hosts)), draw.choice(OPERATIONS)
        keys = [7919 * draw.randrange(40) for _ in range(draw.randrange(1, 8))]
        mine, whole, parts = actor == session.worker_id, folder / "whole", folder / "parts"
        done.append((actor, operation, keys))
        if operation == "add":
            if mine:
                table.add(np.repeat(np.arange(1, len(keys) + 1), 2).reshape(-1, 2), keys)
            for value, key in enumerate(keys, 1):
                model.add(key, value)
        elif operation == "remove":
            if mine:
                table.remove(keys)
            for key in keys:
                model.rows.pop(key, None)
        elif operation == "tick":
            if mine:
                table.tick(seconds=20)
            model.tick(hosts[actor])
        elif operation == "save":
            if mine:
                table.save(whole)
            model.saved["load"] = dict(model.rows), model.times[hosts[actor]]
        elif operation == "save a part":
            if session.worker_id == hosts.index(hosts[session.worker_id]):  # one of each host
                table.save_increment(parts)
            model.saved["load parts"] = dict(model.rows), max(model.times)
        elif operation in model.saved:
            if mine:
                table.load(whole if operation == "load" else parts)
            model.load(operation)
        session.barrier()
        found = {int(key): row.tolist() for keys_, rows in table.items() for key, row in zip(keys_, rows, strict=True)}
        assert found == {key: [value, value] for key, (value, _) in model.rows.items()}, done[-8:]
        session.barrier()


@pytest.mark.parametrize("workers", [(1, 1), (2, 1), (1, 1, 1)], ids=str)
def test_a_table_holds_what_a_dictionary_does(workers: tuple[int, ...], tmp_path: Path) -> None:
    for seed in range(2):
        (tmp_path / f"{seed}").mkdir()
        with rehearsal(*workers) as job:
            job.run(lambda session: work(session, workers, seed, tmp_path / f"{seed}"))  # noqa: B023
