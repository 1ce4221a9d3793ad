"""Kills workers in the middle of adds to and removals from a keyed table: prints JSON, ends with 1 if a law is broken.

python benchmarks/chaos_keyed.py [--kills 1000] [--seed 1] [--workers 3] [--stepped 0.5] [--break all]

The laws, which hold whoever is killed or stopped, and when:

- missed: a key whose add has returned is found, by any worker, with what was added to it;
- torn: a row is of one moment, and its own key's;
- initial: a key without a row reads as its initial row, whoever asks, also after its removal;
- sums: keys that all add to hold every add that has returned exactly once;
- prefix: a call that was killed has done a prefix of its keys, each wholly or not at all;
- sound: no key twice or out of place, no row lost or shared, counts that agree, nothing held.

``--stepped`` of the kills come at a chosen instruction: so many after a worker has named a row, taken a segment, or
claimed a row for a new key, whichever chance has chosen (``stepping.py``).

``--break`` does what must not happen, once in a while: each law has to notice it.
"""

from __future__ import annotations

import argparse
import contextlib
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
from chaos_rows import SECONDS, Life, context
from multiverso.layout import keyed as layout
from multiverso.layout.keyed import at
from multiverso.memory.words import load64
from multiverso.runtime import Node, Session
from reporting import give_report
from stepping import kill_at

DIM, OWN, HOT, EACH = 5, 160, 400, 80
CALLS = 5  # the last of so many removes what an earlier one of them has added
REMOVED = 2
LAWS = ("missed", "torn", "initial", "sums", "prefix", "sound")
STARTED, DONE, TORN, MISSED, INITIAL = range(5)
FIRST = 0  # of life 0, which is nobody's: the first life whose keys are still there
_ODD = np.int64(0x2545F4914F6CDD1D)


def hot_keys() -> Any:
    """Keys that all add to: the ends, sequential, strided, and with equal low bits."""
    ends = [0, -1, -(2**63), 2**63 - 1]
    kinds = [np.arange(2, 102), np.arange(1, 101) << 20, (np.arange(1, 101) << 52) | 5, -np.arange(2, 98) * 7]
    return np.concatenate([np.array(ends), *kinds])


def own_keys(life: int, number: int) -> Any:
    """Keys that only this call of this life adds."""
    with np.errstate(over="ignore"):
        return (np.int64(life << 32) + number * OWN + np.arange(1, OWN + 1, dtype=np.int64)) * _ODD


def value(life: int, number: int) -> int:
    """What a call adds, everywhere."""
    return 1 + (life + number) % 3


def call(life: int, number: int) -> tuple[Any, Any, Any]:
    """The keys of an add in their order, which of them are hot, and the numbers of the hot ones."""
    chance = np.random.default_rng([life, number])
    hot = np.sort(chance.choice(HOT, EACH, replace=False))
    keys = np.concatenate([own_keys(life, number), hot_keys()[hot]])
    order = chance.permutation(keys.size)
    is_hot = order >= OWN
    return keys[order], is_hot, hot[order[is_hot] - OWN]


def is_add(number: int) -> bool:
    """Whether a call adds; else it removes."""
    return number % CALLS != CALLS - 1


def tables(session: Any) -> tuple[Any, Any, Any]:
    """The table, one of the same initial rows to which nobody adds, and what each life has done."""
    arguments: dict[str, Any] = {"dtype": "float64", "initial": ("uniform", 0.5), "seed": 9}
    table = mv.KeyedTable(DIM, name="table", session=session, **arguments)
    same = mv.KeyedTable(DIM, name="initial", session=session, **arguments)
    log = session.shared_memory("log", 1 << 20).view("int64").reshape(-1, 8)
    return table, same, log


def work(address: str, life: int, pipe: Any, broken: bool = False) -> None:
    """A worker: adds, removes and looks until it is killed or told to stop."""
    with Session(address, timeout_seconds=SECONDS) as session:
        table, same, log = tables(session)
        mine = log[life]
        pipe.send(session.worker_id)
        chance = np.random.default_rng(life)
        number = 0
        while not pipe.poll():
            number += 1
            mine[STARTED] = number
            if is_add(number):
                keys, _, _ = call(life, number)
                if broken and life % 3 == 0 and number == 2:  # the end first, and no more
                    table.add(np.full((OWN, DIM), value(life, number), "f8"), keys[EACH:])
                    os.kill(os.getpid(), signal.SIGKILL)
                table.add(np.full((keys.size, DIM), value(life, number), "f8"), keys)
            else:
                gone = own_keys(life, number - CALLS + 1 + REMOVED)[: OWN // 2]
                table.remove(gone)
                mine[INITIAL] += int((table.get(gone) != same.get(gone)).any(axis=1).sum())
            mine[DONE] = number
            other = int(chance.integers(log[0, FIRST], life + 1))
            known = int(log[other, DONE])
            which = int(chance.integers(1, known + 1)) if known else 0
            if which and is_add(which):
                keys = own_keys(other, which)[OWN // 2 :]  # these stay
                off = table.get(keys) - same.get(keys)
                mine[TORN] += torn(off)
                mine[MISSED] += int((off[:, 0] != value(other, which)).sum() + (~table.contains(keys)).sum())
            rows = table.get(hot_keys()) - same.get(hot_keys())
            mine[TORN] += torn(rows)
            if broken and number % 3 == 0 and is_add(number):
                places = table._calls.find(keys[:2])
                memory = table._memory.rows()[places].view("float64")
                table._memory.rows()[places, :8] = (memory[:, :1] + 0.25).view("uint8")  # half a row
                other_table = mv.KeyedTable(DIM, dtype="float64", initial=1.0, session=session, name="wrong")
                absent = np.array([12345 + life])
                mine[INITIAL] += int((other_table.get(absent) != same.get(absent)).any())


def warm(table: Any) -> None:
    """Makes each kind of call once, with no effect: kernels that are not on disk yet would take a worker's time."""
    table.add(np.zeros((1, DIM)), hot_keys()[:1])
    table.get(hot_keys()[:1])
    table.remove(own_keys(0, 0))
    table.check()


def work_badly(address: str, life: int, pipe: Any) -> None:
    """A worker that does what must not happen."""
    work(address, life, pipe, broken=True)


def torn(rows: Any) -> int:
    """How many rows are not of one moment."""
    return int((rows != rows[:, :1]).any(axis=1).sum())


class Ledger:
    """What must be in the table. Owner: the process that kills."""

    def __init__(self, table: Any, same: Any, log: Any) -> None:
        self._table, self._same, self._log = table, same, log
        self._expected = np.zeros(HOT, np.int64)
        self.broken = dict.fromkeys(LAWS, 0)
        self.calls = self.cut = 0

    def close(self, lives: list[int], broken: bool) -> None:
        """Compares everything with what lives that are over have done, and lets go of what they have added."""
        possible: dict[int, list[int]] = {}
        forget = []
        for life in lives:
            started, done = int(self._log[life, STARTED]), int(self._log[life, DONE])
            self.calls += done
            for number in range(1, done + 1):
                if is_add(number):
                    self._acknowledged(life, number, done)
                    forget.append(own_keys(life, number))
            if started != done:
                self.cut += 1
                forget += [own_keys(life, n) for n in (started, max(1, started - CALLS + 1 + REMOVED))]
                self._in_flight(life, started, possible)
            for law, place in (("torn", TORN), ("missed", MISSED), ("initial", INITIAL)):
                self.broken[law] += int(self._log[life, place])
        self._sums(possible)
        if forget:
            keys = np.concatenate(forget)
            self._table.remove(keys)
            wrong = (self._table.get(keys) != self._same.get(keys)).any(axis=1)
            self.broken["initial"] += int(wrong.sum())
        if broken:
            words = self._table._memory
            words.set_word("NEXT_ROW", words.word("NEXT_ROW") + (3 << 16))  # rows that are nobody's
        found = self._table.check()
        self.broken["sound"] += sum(number for name, number in found.items() if name != "keys")

    def _off(self, keys: Any) -> Any:
        rows = self._table.get(keys) - self._same.get(keys)
        self.broken["torn"] += torn(rows)
        return rows[:, 0]

    def _acknowledged(self, life: int, number: int, done: int) -> None:
        off = self._off(own_keys(life, number))
        wanted = np.full(OWN, value(life, number))
        remover = number - REMOVED + CALLS - 1
        if number % CALLS == REMOVED and remover <= done:
            wanted[: OWN // 2] = 0
        elif number % CALLS == REMOVED and remover == self._log[life, STARTED]:  # killed in it
            wanted[: OWN // 2] = off[: OWN // 2]
        self.broken["missed"] += int((off != wanted).sum())
        np.add.at(self._expected, call(life, number)[2], value(life, number))

    def _in_flight(self, life: int, number: int, possible: dict[int, list[int]]) -> None:
        if is_add(number):
            keys, is_hot, hot = call(life, number)
            applied = self._off(keys[~is_hot])
            self._prefix(applied == value(life, number), applied == 0)
            for place in hot.tolist():
                possible.setdefault(place, []).append(value(life, number))
        else:
            of = number - CALLS + 1 + REMOVED
            off = self._off(own_keys(life, of)[: OWN // 2])
            self._prefix(off == 0, off == value(life, of))

    def _prefix(self, done: Any, left: Any) -> None:
        ordered = bool((np.diff(done.astype(int)) <= 0).all())
        self.broken["prefix"] += int((done == left).sum()) + (not ordered)

    def _sums(self, possible: dict[int, list[int]]) -> None:
        found = self._off(hot_keys())
        for place in range(HOT):
            sums = {0}
            for more in possible.get(place, []):
                sums |= {total + more for total in sums}
            self.broken["sums"] += float(found[place] - self._expected[place]) not in sums
        self._expected = found.astype(np.int64)


def moments(table: Any, worker_id: int) -> list[Callable[[], bool]]:
    """What a worker can be in the middle of, as its undo slot and the words show it."""
    memory = table._memory
    undo, words = memory.undo_slot(worker_id), memory.address + memory.word("SEGMENT_WORDS")
    rows = memory.address + memory.word("ROW_WORDS")

    def holds_a_segment() -> bool:
        segment = load64(undo + at.SEGMENT) - 1
        return segment >= 0 and load64(words + 8 * segment) & 4095 == worker_id + 1

    def changes_a_row() -> bool:
        word = load64(undo + at.UNDO_WORD) - 1
        return load64(undo + at.UNDO_ROW) > 0 <= word and load64(rows + 8 * word) & 4095 == worker_id + 1

    return [changes_a_row, holds_a_segment, lambda: load64(undo + at.CLAIM) & 3 in (layout.CLAIMING, layout.CLAIMED)]


def run(
    kills: int, workers: int, seed: int, stepped: float = 0.0, broken: bool = False, epoch: int = 16
) -> dict[str, Any]:
    """Kills workers at random moments, some of them stopped before, and compares the table now and then."""
    chance = random.Random(seed)
    result: dict[str, Any] = {"kills": 0, "stops": 0, "stepped": 0}
    life = 0
    works: Callable[[str, int, Any], None] = work_badly if broken else work
    with Node(None, on_lost="continue") as node, Session(node.address, 0, timeout_seconds=SECONDS) as session:
        table, same, log = tables(session)
        ledger = Ledger(table, same, log)
        warm(table)
        while result["kills"] < kills:
            lives: list[Life] = []
            over = []
            log[0, FIRST] = life + 1
            for _ in range(min(epoch, kills - result["kills"])):
                while len(lives) < workers:
                    life += 1
                    lives.append(Life(node.address, life, works))
                time.sleep(chance.random() * 0.02)
                victim = lives.pop(chance.randrange(len(lives)))
                if chance.random() < stepped:
                    reached = chance.choice(moments(table, victim.worker_id))
                    further = chance.choice((0, 5, 50, 500, 5000))
                    result["stepped"] += kill_at(victim.process.pid or 0, reached, chance.randrange(further + 1))
                elif chance.random() < 0.3:
                    with contextlib.suppress(ProcessLookupError):  # who breaks a law may have killed itself
                        os.kill(victim.process.pid or 0, signal.SIGSTOP)
                    result["stops"] += 1
                    time.sleep(chance.random() * 0.02)
                victim.end(kill=True)
                result["kills"] += 1
                over.append(victim.life)
            while len(lives) < workers:  # each number's new life puts in order what the last one had in hand
                life += 1
                lives.append(Life(node.address, life, work))
            for left in lives:
                left.end(kill=False)
                over.append(left.life)
            ledger.close(over, broken)
            if life + workers + epoch >= log.shape[0]:
                raise ValueError(f"at most {log.shape[0]} lives; run again with another seed")
        stats = table.stats()
    counts = {name: stats[name] for name in ("taken_over", "put_back", "splits", "keys_removed", "waits")}
    result |= {"calls": ledger.calls, "calls_cut": ledger.cut, "lives": life, **counts}
    return {**result, "broken": ledger.broken}


def main() -> int:
    """Prints JSON; returns 1 if a law was broken, or if one was broken on purpose and not all noticed it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--stepped", type=float, default=0.0, help="share of the kills")
    parser.add_argument("--break", dest="broken", choices=("all",))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    context.set_forkserver_preload(["multiverso", "chaos_keyed"])
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    broken = options.broken is not None
    result = {"seed": options.seed, **run(options.kills, options.workers, options.seed, options.stepped, broken)}
    give_report(result, options.json, indent=None)
    return int(any(result["broken"].values()))


if __name__ == "__main__":
    sys.exit(main())
