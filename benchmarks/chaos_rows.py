"""Kills workers in the middle of adds and exchanges of rows: prints JSON, ends with 1 if anything is wrong.

python benchmarks/chaos_rows.py [--kills 1000] [--seed 1] [--workers 3] [--stepped 0.5]

What has to hold: every call that returned is in the table exactly once; of a call that was killed an exact prefix of
its rows, each wholly or not at all, as its undo slot tells; no row is ever read torn; nothing stays held.

``--stepped`` of the kills come at a chosen instruction: so many after a worker has named a row (``stepping.py``).
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import multiverso as mv
from multiverso.layout import words as at
from multiverso.memory.words import load64
from multiverso.runtime import Node, Session
from reporting import give_report
from stepping import kill_at

ROWS, COLUMNS, BATCH = 4_000, 32, 8192
KINDS = 6  # of batches in a life, which come again and again: making them takes longer than the calls
SECONDS = 60.0
EXACT = 2**24  # up to here a float32 counts by ones
context = multiprocessing.get_context("forkserver")


def batch(life: int, number: int) -> tuple[Any, Any, bool]:
    """The ids and values of a call, and whether it is an exchange. Half of the ids are of 32 hot rows."""
    kind = number % KINDS
    chance = np.random.default_rng([life, kind])
    exchange = kind % 3 == 0
    ids = chance.integers(0, ROWS, BATCH)
    ids[::2] = chance.integers(0, 32, BATCH // 2) * (ROWS // 32)
    if exchange:
        ids = np.unique(ids)
    return ids, chance.integers(1, 4, ids.size), exchange


def torn(rows: Any) -> int:
    """How many rows are not of one moment."""
    return int((rows != rows[:, :1]).any(axis=1).sum())


def work(address: str, life: int, pipe: Any) -> None:
    """A worker: adds, exchanges and reads until it is killed or told to stop."""
    with Session(address, timeout_seconds=SECONDS) as session:
        table = mv.MatrixTableHandler(ROWS, COLUMNS, name="rows", session=session)
        log = session.shared_memory("log", 1 << 20).view("int64").reshape(-1, 8)[life]
        pipe.send(session.worker_id)
        chance = np.random.default_rng(life)
        batches = [batch(life, kind) for kind in range(KINDS)]
        deltas = [np.repeat(values.astype("f4"), COLUMNS).reshape(-1, COLUMNS) for _, values, _ in batches]
        number = 0
        while not pipe.poll():
            number += 1
            (ids, _, exchange), delta = batches[number % KINDS], deltas[number % KINDS]
            log[0] = number
            if exchange:
                local, last = delta.copy(), np.zeros_like(delta)
                table.exchange(local, last, ids)
                log[2] += torn(local)
            else:
                table.add(delta, ids)
            log[1] = number
            if number % 8 == 0:
                log[2] += torn(table.get(chance.integers(0, ROWS, 128)))
            if number % 40 == 0:
                log[2] += torn(table.get(changed=True)[1])


def warm(table: Any) -> None:
    """Makes each kind of call once, with no effect: kernels that are not on disk yet would take a worker's time."""
    local, zeros = np.zeros((1, COLUMNS), "f4"), np.zeros((1, COLUMNS), "f4")
    table.add(zeros, [0])
    table.exchange(local, zeros, [0])
    table.get([0])
    table.get(changed=True)


class Life:
    """One process, which does ``work(address, life, pipe)``."""

    def __init__(self, address: str, life: int, work: Callable[[str, int, Any], None]) -> None:
        self.life = life
        self.pipe, theirs = context.Pipe()
        # daemons: they would outlive a program that fails, which waits for others at its end
        self.process = context.Process(target=work, args=(address, life, theirs), daemon=True)
        self.process.start()
        theirs.close()
        if not self.pipe.poll(SECONDS):
            raise TimeoutError(f"worker of life {life} does not come")
        self.worker_id: int = self.pipe.recv()

    def end(self, kill: bool) -> None:
        """Kills it, or tells it to go, and waits until it has."""
        if kill:
            self.process.kill()
        else:
            with contextlib.suppress(BrokenPipeError):  # it has ended by itself
                self.pipe.send("stop")
        self.process.join(SECONDS)
        if self.process.exitcode is None:
            raise TimeoutError(f"worker of life {self.life} does not end")
        self.process.close()
        self.pipe.close()


class Ledger:
    """What must be in the table. Owner: the process that kills."""

    def __init__(self, table: Any, log: Any) -> None:
        self.expected = np.zeros(ROWS, np.int64)
        self.calls = self.cut = self.taken_over = self.put_back = 0
        self.possible: dict[int, list[int]] = {}  # rows that a killed call was at: done or not
        self._table, self._log = table, log

    def undo_slot(self, worker_id: int) -> int:
        """Address of the undo slot that a worker with one thread uses."""
        shard = self._table._shard
        first: int = shard.base + shard.places.undo_slots
        return first + int(shard.header["undo_stride"]) * at.UNDO_SLOTS_EACH * worker_id

    def close(self, worker_id: int, life: int) -> None:
        """Enters what a life has done, when it is over."""
        started, done = int(self._log[life, 0]), int(self._log[life, 1])
        for kind in range(KINDS):
            ids, values, _ = batch(life, kind)
            times = len(range(kind if kind else KINDS, done + 1, KINDS))
            np.add.at(self.expected, ids, values * times)
        self.calls += done
        self.count(worker_id)
        if started == done:
            return
        self.cut += 1
        ids, values, _ = batch(life, started)
        slot = self.undo_slot(worker_id)
        position = load64(slot + at.UNDO_POSITION)
        if load64(slot + at.UNDO_USER) <= 0 or position < 0:  # before it did so, or after it was over
            for row, value in zip(ids.tolist(), values.tolist(), strict=True):
                self.possible.setdefault(row, []).append(value)
        else:
            np.add.at(self.expected, ids[:position], values[:position])
            for row, value in zip(ids[position : position + 1], values[position : position + 1], strict=True):
                self.possible.setdefault(int(row), []).append(int(value))

    def count(self, worker_id: int) -> None:
        """Enters what a worker had to do for the dead; the next life of its number counts from 0."""
        numbers = self._table._shard.statistics(worker_id)
        self.taken_over += int(numbers["locks_recovered"])
        self.put_back += int(numbers["rows_put_back"])

    def wrong(self) -> int:
        """How many rows hold what they cannot hold."""
        found = self._table.get()
        off = found[:, 0].astype(np.int64) - self.expected
        wrong = torn(found)
        for row in np.flatnonzero(off):
            sums = {0}
            for value in self.possible.get(int(row), []):
                sums |= {total + value for total in sums}
            wrong += int(off[row]) not in sums
        if found.max() >= EXACT:
            raise OverflowError(f"a sum of {found.max():,.0f}: float32 cannot tell any more what is missing")
        self._table.add(-found)  # or sums grow beyond that in some hundred kills
        self.expected[:], self.possible = 0, {}
        return wrong


def run(kills: int, workers: int, seed: int, stepped: float = 0.0, epoch: int = 16) -> dict[str, Any]:
    """Kills workers at random moments, some of them stopped before, and compares the table now and then."""
    chance = random.Random(seed)
    result: dict[str, Any] = {"kills": 0, "stops": 0, "stepped": 0, "wrong": 0, "torn": 0, "held": 0}
    life = 0
    with Node(None, on_lost="continue") as node, Session(node.address, 0, timeout_seconds=SECONDS) as session:
        table = mv.MatrixTableHandler(ROWS, COLUMNS, name="rows", session=session)
        log = session.shared_memory("log", 1 << 20).view("int64").reshape(-1, 8)
        ledger = Ledger(table, log)
        warm(table)
        while result["kills"] < kills:
            lives: list[Life] = []
            for _ in range(epoch):
                while len(lives) < workers:
                    life += 1
                    lives.append(Life(node.address, life, work))
                time.sleep(chance.random() * 0.02)
                victim = lives.pop(chance.randrange(len(lives)))
                if chance.random() < stepped:
                    slot = ledger.undo_slot(victim.worker_id)
                    word = slot + chance.choice((at.UNDO_ROW, at.UNDO_USER))
                    further = chance.randrange(chance.choice((1, 6, 51, 501)))
                    result["stepped"] += kill_at(
                        victim.process.pid or 0,
                        lambda word=word: load64(word) != 0,  # type: ignore[misc]
                        further,
                    )
                elif chance.random() < 0.3:
                    os.kill(victim.process.pid or 0, signal.SIGSTOP)
                    result["stops"] += 1
                    time.sleep(chance.random() * 0.02)
                victim.end(kill=True)
                result["kills"] += 1
                ledger.close(victim.worker_id, victim.life)
            for left in lives:
                left.end(kill=False)
                ledger.close(left.worker_id, left.life)
            result["wrong"] += ledger.wrong()
            result["held"] += int(np.count_nonzero(table._shard.stripe_words() & 0xFFFFF))
        result["torn"] = int(log[:, 2].sum())
        ledger.count(0)
        result |= {"taken_over": ledger.taken_over, "rows_put_back": ledger.put_back}
        result |= {"calls": ledger.calls, "calls_cut": ledger.cut, "lives": life}
    return result


def main() -> int:
    """Prints JSON; returns 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--stepped", type=float, default=0.0, help="share of the kills")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    context.set_forkserver_preload(["multiverso", __file__.rpartition("/")[2].removesuffix(".py")])
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    result = {"seed": options.seed, **run(options.kills, options.workers, options.seed, options.stepped)}
    give_report(result, options.json, indent=None)
    return int(bool(result["wrong"] or result["torn"] or result["held"]))


if __name__ == "__main__":
    sys.exit(main())
