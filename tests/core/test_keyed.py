"""Keyed tables: a dict of rows that all workers share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from core_support import Worker, outcome, together
from hypothesis import given, settings
from hypothesis import strategies as st

import multiverso as mv
from multiverso.errors import (
    ClosedError,
    DtypeMismatchError,
    RowIdError,
    ShapeMismatchError,
    SnapshotError,
    TableMismatchError,
)
from multiverso.runtime import Node, Session
from multiverso.tables.save_all import load_all, save_all

ENDS = (0, -1, 1, -(2**63), 2**63 - 1)
SOUND = {"twins": 0, "misplaced": 0, "shared": 0, "lost": 0, "miscounted": 0, "held": 0}


def test_a_key_reads_as_its_initial_row_until_something_is_added_to_it(alone: Session) -> None:
    table = mv.KeyedTable(3, session=alone, initial=2.5)
    assert table.get([5, 5]).tolist() == [[2.5] * 3] * 2
    assert len(table) == 0
    assert not table.contains(5)
    table.add([[1, 2, 3], [10, 10, 10]], [5, 5])
    assert table.get(5).tolist() == [13.5, 14.5, 15.5]
    assert table.contains([5, 6]).tolist() == [True, False]
    assert len(table) == 1


def test_keys_of_every_kind_find_their_own_rows(alone: Session) -> None:
    """In a row, far apart, with equal low bits, with equal high bits, and both ends of 64 bits."""
    random = np.random.default_rng(3)
    kinds = [
        np.arange(3000),
        np.arange(3000) * 4096 - 7,
        np.arange(1, 3000) << 40,
        (np.arange(1, 3000) << 20) | 77,
        random.integers(-(2**63), 2**63 - 1, 3000),
    ]
    keys = np.unique(np.concatenate([*kinds, np.array(ENDS)]))
    table = mv.KeyedTable(1, dtype="int64", session=alone)
    shuffled = random.permutation(keys)
    table.add(np.arange(1, keys.size + 1)[:, None], shuffled)
    assert np.array_equal(table.get(shuffled)[:, 0], np.arange(1, keys.size + 1))
    assert len(table) == keys.size
    absent = np.setdiff1d(shuffled ^ 0x5555, keys)
    assert not table.contains(absent).any()
    assert table.check() == {"keys": keys.size, **SOUND}
    seen = list(table.items(batch=1000))
    assert max(k.size for k, _ in seen) == 1000
    assert np.array_equal(np.sort(np.concatenate([k for k, _ in seen])), keys)
    for some, rows in seen:
        assert np.array_equal(rows, table.get(some))


@given(
    st.lists(
        st.tuples(st.sampled_from(["add", "get"]), st.lists(st.integers(-6, 6) | st.sampled_from(ENDS), max_size=8)),
        max_size=20,
    )
)
@settings(max_examples=60)
def test_it_is_a_dict(operations: list[tuple[str, list[int]]]) -> None:
    with Node(1) as node, Session(node.address) as session:
        table = mv.KeyedTable(2, dtype="int64", initial=7, session=session)
        model: dict[int, int] = {}
        for number, (what, keys) in enumerate(operations):
            if what == "add":
                table.add(np.full((len(keys), 2), number), np.array(keys, np.int64))
                for key in keys:
                    model[key] = model.get(key, 7) + number
            else:
                assert table.get(np.array(keys, np.int64)).tolist() == [[model.get(k, 7)] * 2 for k in keys]
        assert len(table) == len(model)


def test_initial_rows_depend_on_seed_and_key_alone() -> None:
    keys = np.arange(-1000, 1000)

    def rows(session: Session, **options: Any) -> Any:
        return mv.KeyedTable(8, session=session, **options).get(keys)

    first, second = together(lambda session: rows(session, initial=("normal", 0.5), seed=4))
    assert np.array_equal(first, second)
    alone = together(lambda s: [rows(s, initial=("normal", 0.5), seed=n) for n in (4, 5)], workers=1)[0]
    assert np.array_equal(alone[0], first)
    assert not np.isclose(alone[1], first).any(axis=1).all()
    assert abs(first.std() - 0.5) < 0.02
    assert abs(first.mean()) < 0.02
    uniform = together(lambda s: rows(s, initial="uniform"), workers=1)[0]
    assert -0.05 <= uniform.min() < -0.049
    assert 0.049 < uniform.max() < 0.05


def test_an_updater_gets_each_key_once_a_call(alone: Session) -> None:
    """nesterov is not linear: a key that is named twice must be one step with the sum."""
    from multiverso.updaters import nesterov

    matrix = mv.MatrixTableHandler(4, 2, updater=nesterov(0.1, 0.9), session=alone)
    table = mv.KeyedTable(2, updater=nesterov(0.1, 0.9), session=alone)
    random = np.random.default_rng(0)
    for _ in range(20):
        keys = random.integers(0, 4, 6)
        delta = random.normal(size=(6, 2)).astype("f4")
        total = np.zeros((4, 2), "f4")
        np.add.at(total, keys, delta)
        used = np.unique(keys)
        matrix.add(total[used], row_ids=used)
        table.add(delta, keys)
    np.testing.assert_allclose(table.get(np.arange(4)), matrix.get(), rtol=1e-5)


def test_workers_share_and_nothing_is_lost() -> None:
    def work(session: Session) -> Any:
        table = mv.KeyedTable(4, dtype="int64", session=session)
        random = np.random.default_rng(session.worker_id)
        expected = np.zeros(5000, np.int64)
        for _ in range(40):
            keys = random.integers(0, 5000, 200)
            table.add(np.ones((200, 4), np.int64), keys)
            np.add.at(expected, keys, 1)
            rows = table.get(keys)
            assert (rows == rows[:, :1]).all()
        session.barrier()
        return expected, table.get(np.arange(5000)), table.check(), len(table)

    results = together(work, workers=4)
    total = sum(result[0] for result in results)
    for _, rows, checked, number in results:
        assert np.array_equal(rows, np.repeat(total[:, None], 4, axis=1))
        assert checked == {"keys": np.count_nonzero(total), **SOUND}
        assert number == np.count_nonzero(total)


VICTIM = """
session = Session(node, worker_id, timeout_seconds=60)
table = mv.KeyedTable(16, dtype="int64", name="t", session=session)
log = session.shared_memory("log", 4096).view("int64")
random = np.random.default_rng(worker_id * 1000 + int(log[100 + worker_id]))
log[100 + worker_id] += 1
say("there")
while True:
    keys = random.integers(0, 20_000, 64)
    log[worker_id] += 1  # begun
    table.add(np.ones((64, 16), np.int64), keys)
    log[8 + worker_id] += 1  # acknowledged
    rows = table.get(keys)
    if (rows != rows[:, :1]).any() or (rows < 1).any():
        log[16] += 1
"""


def test_workers_that_are_killed_lose_nothing_that_was_acknowledged() -> None:
    with Node(None, on_lost="continue") as node, Session(node.address, 0, timeout_seconds=60) as session:
        table = mv.KeyedTable(16, dtype="int64", name="t", session=session)
        log = session.shared_memory("log", 4096).view("int64")
        for _ in range(3):
            with Worker(node, 1, VICTIM) as one, Worker(node, 2, VICTIM) as other:
                assert [one.hear(), other.hear()] == [["there"], ["there"]]
                begun = int(log[8:16].sum())
                while log[8:16].sum() < begun + 200:
                    table.add(np.ones((64, 16), np.int64), np.arange(64))
                    log[0] += 1
                    log[8] += 1
                one.process.kill()
                one.process.wait()
                rows = table.get(np.arange(20_000))  # takes over what it held
                assert (rows == rows[:, :1]).all()
        rows = table.get(np.arange(20_000))
        assert (rows == rows[:, :1]).all()
        assert log[16] == 0
        assert 64 * int(log[8:16].sum()) <= int(rows[:, 0].sum()) <= 64 * int(log[:8].sum())
        checked = table.check()
        assert checked == {"keys": checked["keys"], **SOUND}


def test_a_saved_table_is_the_same_again(alone: Session, tmp_path: Path) -> None:
    from multiverso.updaters import nesterov

    table = mv.KeyedTable(3, updater=nesterov(), initial="normal", seed=1, session=alone)
    keys = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, 3000)
    table.add(np.ones((3000, 3)), keys)
    table.save(tmp_path / "t")
    other = mv.KeyedTable(3, updater=nesterov(), initial="normal", seed=1, session=alone)
    other.load(tmp_path / "t")
    assert np.array_equal(other.get(keys), table.get(keys))
    for one in (table, other):
        one.add(np.ones((3000, 3)), keys)  # the momentum, too
    assert np.array_equal(other.get(keys), table.get(keys))
    assert other.check() == {"keys": 3000, **SOUND}
    with pytest.raises(SnapshotError, match="dim"):
        mv.KeyedTable(4, updater=nesterov(), session=alone).load(tmp_path / "t")
    (tmp_path / "t").write_bytes((tmp_path / "t").read_bytes()[:1000])
    with pytest.raises(SnapshotError, match="cannot be read"):
        other.load(tmp_path / "t")
    with pytest.raises(SnapshotError, match="cannot be read"):
        other.load(tmp_path / "none")


def test_all_tables_of_a_session_are_saved_and_loaded_together(tmp_path: Path) -> None:
    keys = np.arange(-20, 20)

    def tables(session: Session) -> Any:
        first = mv.KeyedTable(2, initial="uniform", session=session)
        second = mv.KeyedTable(1, dtype="int64", name="counts", session=session)
        return mv.ArrayTableHandler(3, 1.0, session=session), first, second

    with Node(1) as node, Session(node.address) as session:
        array, first, second = tables(session)
        first.add(np.ones((40, 2)), keys)
        second.add(keys[:, None], keys)
        save_all(session, tmp_path)
        expected = array.get(), first.get(keys), second.get(keys)
    with Node(1) as node, Session(node.address) as session:
        array, first, second = tables(session)
        first.add(np.ones((60, 2)), np.arange(60))  # what was not saved reads as if it had never been
        load_all(session, tmp_path)
        for got, saved in zip((array.get(), first.get(keys), second.get(keys)), expected, strict=True):
            assert np.array_equal(got, saved)
        fresh = mv.KeyedTable(2, initial="uniform", name="other", session=session)
        assert np.array_equal(first.get(np.arange(30, 60)), fresh.get(np.arange(30, 60)))
        with pytest.raises(SnapshotError, match="keyed:name:other"):
            load_all(session, tmp_path)


@pytest.mark.parametrize(
    "keys, error",
    [
        ([1.5], "integers"),
        ([2**63], "64 bits"),
        ([[1], [2, 3]], "integers"),
        (["a"], "integers"),
        (np.zeros((1, 2)), r"integers.*\(delta, keys\)"),
        ([True], "integers"),
    ],
)
def test_keys_that_are_none_are_refused(alone: Session, keys: Any, error: str) -> None:
    table = mv.KeyedTable(2, session=alone)
    for call in (lambda: table.get(keys), lambda: table.add(np.zeros((1, 2)), keys), lambda: table.contains(keys)):
        with pytest.raises(RowIdError, match=error):
            call()
    assert len(table) == 0


def test_what_does_not_fit_is_refused_before_anything_changes(alone: Session) -> None:
    table = mv.KeyedTable(2, dtype="int32", session=alone)
    with pytest.raises(ShapeMismatchError, match=r"expects shape \(2, 2\)"):
        table.add(np.zeros((2, 3), "i4"), [1, 2])
    with pytest.raises(DtypeMismatchError, match="float"):
        table.add(np.zeros((2, 2)), [1, 2])
    with pytest.raises(ShapeMismatchError, match="out has shape"):
        table.get([1, 2], out=np.zeros((3, 2), "i4"))
    assert len(table) == 0
    for bad in ("normal", ("uniform", 1.0), 0.5, float("nan"), None, ("normal", float("inf"))):
        with pytest.raises(ValueError, match=r"initial|whole number"):
            mv.KeyedTable(2, dtype="int32", initial=bad, session=alone)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="seed"):
        mv.KeyedTable(2, seed=1.5, session=alone)  # type: ignore[arg-type]
    with pytest.raises(ShapeMismatchError, match="dim"):
        mv.KeyedTable(0, session=alone)


def test_other_arguments_under_one_name_are_refused(alone: Session) -> None:
    mv.KeyedTable(2, name="t", session=alone)
    assert mv.KeyedTable(2, name="t", session=alone).dim == 2
    for other in ({"seed": 1}, {"initial": 1.0}, {"dtype": "float64"}, {"updater": "nesterov"}):
        with pytest.raises(TableMismatchError):
            mv.KeyedTable(2, name="t", session=alone, **other)
    refused = together(lambda s: outcome(lambda: mv.KeyedTable(2, seed=s.worker_id, session=s)), workers=2)
    assert sorted(type(r).__name__ for r in refused) == ["KeyedTable", "TableMismatchError"]


def test_sessions_with_bounded_staleness_do_not_have_them() -> None:
    with (
        Node(1) as node,
        Session(node.address, staleness=3) as session,
        pytest.raises(ValueError, match="without staleness="),
    ):
        mv.KeyedTable(2, session=session)


def test_it_ends_with_its_session() -> None:
    with Node(1) as node:
        with Session(node.address) as session:
            table = mv.KeyedTable(2, session=session)
            table.add(np.ones((1, 2)), [1])
        for call in (lambda: table.get([1]), lambda: table.add(np.ones((1, 2)), [1]), lambda: len(table), table.stats):
            with pytest.raises(ClosedError):
                call()


def test_shapes_outputs_and_statistics(alone: Session) -> None:
    table = mv.KeyedTable(2, session=alone)
    table.add(np.arange(8.0).reshape(2, 2, 2), [[1, 2], [3, 4]])
    assert table.get([[1, 2], [3, 4]]).tolist() == np.arange(8.0).reshape(2, 2, 2).tolist()
    out = np.empty((2, 2), "f4")
    assert table.get([4, 1], out=out) is out
    assert out.tolist() == [[6, 7], [0, 1]]
    assert table.get([4], dtype="float16").dtype == np.float16
    assert table.get([]).shape == (0, 2)
    stats = table.stats()
    assert stats["keys"] == 4
    assert (stats["adds"], stats["rows_added"]) == (1, 4)
    assert stats["bytes"] >= 4 * 64
    assert "keyed table of 2 float32" in repr(table)
