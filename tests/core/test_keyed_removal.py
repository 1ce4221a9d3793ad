"""Keys that go: removed, evicted, or not admitted yet; with real processes that are killed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from core_support import Worker, together
from hypothesis import given, settings
from hypothesis import strategies as st

import multiverso as mv
from multiverso import Eviction
from multiverso.runtime import Node, Session

SOUND = {"twins": 0, "misplaced": 0, "shared": 0, "lost": 0, "miscounted": 0, "held": 0}
Step = tuple[str, list[int]]


@given(
    st.lists(
        st.tuples(st.sampled_from(["add", "get", "remove"]), st.lists(st.integers(-6, 6), max_size=8)), max_size=30
    )
)
@settings(max_examples=40)
def test_it_is_a_dict_from_which_keys_are_removed(steps: list[Step]) -> None:
    with Node(1) as node, Session(node.address) as session:
        table = mv.KeyedTable(2, dtype="int64", initial=7, session=session)
        model: dict[int, int] = {}
        for number, (what, keys) in enumerate(steps):
            if what == "add":
                table.add(np.full((len(keys), 2), number), np.array(keys, np.int64))
                for key in keys:
                    model[key] = model.get(key, 7) + number
            elif what == "remove":
                had = [model.pop(key, None) is not None for key in keys]
                assert table.remove(np.array(keys, np.int64)).tolist() == had
            else:
                assert table.get(np.array(keys, np.int64)).tolist() == [[model.get(k, 7)] * 2 for k in keys]
        assert len(table) == len(model)
        assert dict(zip(*_all(table), strict=True)) == model
        assert table.check() == {"keys": len(model), **SOUND}


def _all(table: mv.KeyedTable) -> tuple[list[int], list[int]]:
    found = list(table.items())
    return [int(k) for keys, _ in found for k in keys], [int(r[0]) for _, rows in found for r in rows]


def test_rows_of_removed_keys_are_used_again(alone: Session) -> None:
    table = mv.KeyedTable(16, session=alone)
    for turn in range(12):
        keys = np.arange(turn * 2000, (turn + 1) * 2000)
        table.add(np.ones((2000, 16)), keys)
        assert table.remove(keys).all()
    assert len(table) == 0
    assert table.stats()["bytes"] < 4 * 2000 * 64 + 64 * 16384
    assert table.check() == {"keys": 0, **SOUND}


def test_a_key_gets_its_row_at_the_nth_call_that_adds_to_it(alone: Session) -> None:
    table = mv.KeyedTable(2, admission=3, initial=1.0, session=alone)
    table.add(np.ones((4, 2)), [1, 1, 2, 3])  # twice in a call is once
    table.add(np.ones((2, 2)), [1, 2])
    assert len(table) == 0
    assert table.stats()["candidates"] == 3
    assert not table.contains([1, 2, 3]).any()
    assert table.get([1, 2, 3]).tolist() == [[1, 1]] * 3
    table.add(np.full((1, 2), 5), [1])
    assert table.get([1, 2]).tolist() == [[6, 6], [1, 1]]
    assert len(table) == 1
    assert _all(table) == ([1], [6])
    assert table.remove([1, 2]).tolist() == [True, False]
    table.add(np.ones((2, 2)), [1, 2])
    assert len(table) == 0, "a key that was removed begins to be counted anew"
    assert table.check() == {"keys": 0, **SOUND}


def test_what_was_not_used_for_long_goes(alone: Session) -> None:
    table = mv.KeyedTable(1, eviction=Eviction(idle_ticks=2), session=alone)
    table.add(np.ones((3000, 1)), np.arange(3000))
    assert table.tick() == 0
    table.add(np.ones((10, 1)), np.arange(10))
    table.get(np.arange(3000))  # reading is no use
    assert table.tick(seconds=60) == 2990
    assert sorted(_all(table)[0]) == list(range(10))
    assert table.tick(seconds=60) == 10
    assert table.ticks == 3


@pytest.mark.parametrize("by", ["recency", "frequency"])
def test_beyond_the_most_keys_the_worst_go(alone: Session, by: str) -> None:
    table = mv.KeyedTable(1, eviction=Eviction(most_keys=1000, by=by), session=alone)
    often, late = np.arange(500), np.arange(10_000, 10_500)
    for _ in range(20):
        table.add(np.ones((500, 1)), often)
    table.tick()
    for start in range(20_000, 20_000 + 60 * 500, 500):  # new ones all the time, each once
        table.add(np.ones((500, 1)), np.arange(start, start + 500))
    table.tick()
    table.add(np.ones((500, 1)), late)
    table.evict()
    assert len(table) <= 1000
    kept = table.contains(late if by == "recency" else often).mean()
    assert kept > 0.9
    assert by == "frequency" or table.contains(often).mean() < 0.2
    assert table.check() == {"keys": len(table), **SOUND}


@pytest.mark.parametrize("least", [1.0, 1e-170, 1e160])
def test_small_rows_go(alone: Session, least: float) -> None:
    """Also where the squares are beyond float64."""
    table = mv.KeyedTable(4, dtype="float64", eviction=Eviction(least_norm=least), session=alone)
    table.add(np.full((2000, 4), 0.49 * least), np.arange(2000))  # norm 0.98
    table.add(np.full((1000, 4), 0.02 * least), np.arange(1000))  # 1.02
    assert table.evict() == 1000
    assert table.contains(np.arange(1000)).all()


def test_eviction_ends_when_its_time_is_over_and_goes_on_from_there(alone: Session) -> None:
    table = mv.KeyedTable(1, eviction=Eviction(idle_ticks=1), session=alone)
    table.add(np.ones((20_000, 1)), np.arange(20_000))
    gone = [table.tick(seconds=0)]
    assert 0 < gone[0] < 2000, "one segment"
    while len(table):
        gone.append(table.evict(seconds=0))
        assert gone[-1] > 0
    assert sum(gone) == 20_000


def test_policies_that_are_none_are_refused(alone: Session) -> None:
    for bad in (
        lambda: Eviction(),
        lambda: Eviction(idle_ticks=0),
        lambda: Eviction(idle_ticks=50_001),
        lambda: Eviction(most_keys=2.5),  # type: ignore[arg-type]
        lambda: Eviction(most_keys=1, by="size"),
        lambda: Eviction(least_norm=-1.0),
        lambda: mv.KeyedTable(1, admission=0, session=alone),
        lambda: mv.KeyedTable(1, admission=256, session=alone),
        lambda: mv.KeyedTable(1, eviction=3, session=alone),  # type: ignore[arg-type]
        lambda: mv.KeyedTable(1, dtype="int32", eviction=Eviction(least_norm=1.0), session=alone),
        lambda: mv.KeyedTable(1, session=alone).evict(),
        lambda: mv.KeyedTable(1, eviction=Eviction(idle_ticks=1), session=alone).evict(seconds=-1),
    ):
        with pytest.raises(ValueError, match=r"got|has no eviction|says what|is for tables"):
            bad()


def test_iterating_removing_and_adding_at_the_same_time_show_each_key_that_stays_once() -> None:
    stays = np.arange(3000)

    def work(session: Session) -> Any:
        table = mv.KeyedTable(2, dtype="int64", initial=5, name="t", session=session)
        if session.worker_id == 0:
            table.add(np.ones((3000, 2), np.int64), stays)
        session.barrier()
        seen = []
        if session.worker_id == 0:
            for _ in range(5):
                found = list(table.items(batch=500))
                seen.append(np.sort(np.concatenate([k for k, _ in found])))
                for keys, rows in found:
                    assert (rows[keys < 3000] == 6).all()
                    assert set(np.unique(rows)) <= {5, 6, 7}
        else:
            for turn in range(10):
                keys = np.arange(turn * 500 + 10_000, turn * 500 + 10_500)
                table.add(np.full((500, 2), 2), keys)
                table.remove(keys)
        session.barrier()
        return seen, table.check()

    (seen, checked), _ = together(work)
    for keys in seen:
        assert np.array_equal(keys[keys < 3000], stays)
        assert np.unique(keys).size == keys.size
    assert checked == {"keys": 3000, **SOUND}


# Each victim has keys of its own, and notes what it is about to do, and what came of it.
VICTIM = """
KEYS = 400
session = Session(node, worker_id, timeout_seconds=60)
table = mv.KeyedTable(8, dtype="int64", name="t", initial=7, session=session)
log = session.shared_memory("log", 65536).view("int64")
mine = log[1000 * worker_id : 1000 * (worker_id + 1)]  # 0: lives, 1: steps, 2: errors, 3: step under way, 4: its keys
expected, flight = mine[100:100 + KEYS], mine[500:600]  # expected: adds since the key came, 0: it is not there
keys = worker_id * 2**33 + np.arange(KEYS)
mine[0] += 1
random = np.random.default_rng(int(worker_id * 1000 + mine[0]))

def look(which):
    rows = table.get(keys[which]) - 7
    mine[2] += int((rows != rows[:, :1]).any())  # torn, or another key's
    return rows[:, 0]

if mine[3]:  # the last life ended in the middle of this: each key is as before or as after
    which = flight[: mine[4]]
    is_now = look(which)
    before = expected[which]
    after = before + 1 if mine[3] == 1 else 0 * before
    done = is_now == after
    mine[2] += int(((is_now != before) & ~done).any())
    differ = np.flatnonzero(before != after)
    mine[2] += int((np.diff(done[differ].astype(int)) > 0).any())  # a prefix
    there = table.contains(keys[which])
    expected[which] = is_now
    expected[which[~there]] = 0
    mine[3] = 0
say("there")
while True:
    which = np.sort(random.choice(KEYS, 60, replace=False))
    flight[: which.size] = which
    mine[4] = which.size
    if random.random() < 0.6:
        mine[3] = 1
        table.add(np.ones((which.size, 8), np.int64), keys[which])
        expected[which] += 1
    else:
        mine[3] = 2
        had = table.remove(keys[which])
        mine[2] += int((had < (expected[which] > 0)).any())
        expected[which] = 0
    mine[3] = 0
    mine[1] += 1
    mine[2] += int((look(np.arange(KEYS)) != expected).any())
"""


def test_workers_that_are_killed_while_they_add_and_remove_leave_a_dict() -> None:
    with Node(None, on_lost="continue") as node, Session(node.address, 0, timeout_seconds=60) as session:
        table = mv.KeyedTable(8, dtype="int64", name="t", initial=7, session=session)
        log = session.shared_memory("log", 65536).view("int64")
        random = np.random.default_rng(0)
        turn = 0

        def churn(victim: int, steps: int) -> None:
            """Adds keys that nobody else has and removes them, until a victim has come so far."""
            nonlocal turn
            until = log[1000 * victim + 1] + steps
            while log[1000 * victim + 1] < until and workers[victim].process.poll() is None:
                turn += 1
                keys = -(turn % 7) * 1000 - np.arange(1, 300)
                table.add(np.ones((keys.size, 8), np.int64), keys)
                assert (table.get(keys) == 8).all()
                assert table.remove(keys).all()

        workers = {w: Worker(node, w, VICTIM) for w in (1, 2)}
        try:
            for worker in workers.values():
                assert worker.hear() == ["there"]
            for _ in range(3):
                victim = int(random.integers(1, 3))
                churn(victim, int(random.integers(20, 60)))
                workers[victim].__exit__()
                workers[victim] = Worker(node, victim, VICTIM)
                assert workers[victim].hear() == ["there"]
                churn(victim, 5)
        finally:
            for worker in workers.values():
                worker.__exit__()
        assert [int(log[1000 * w + 2]) for w in (1, 2)] == [0, 0]
        table.get(np.arange(10))
        checked = table.check()
        assert {**checked, "keys": 0, "held": 0} == {"keys": 0, **SOUND}
        assert (log[1001], log[2001]) > (20, 20)
