"""Setting values, rows in every call, waiting for a version, and a help page without internals."""

from __future__ import annotations

import pydoc
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from core_support import MODES, together, wait_for

import multiverso as mv
from multiverso.errors import DtypeMismatchError, MultiversoError, RowIdError, ShapeMismatchError, WaitTimeoutError
from multiverso.layout import words as at
from multiverso.memory.words import load32, store32
from multiverso.runtime import Session
from multiverso.runtime.session import waiting
from multiverso.updaters import Updater


@pytest.mark.parametrize("mode", MODES)
def test_set_overwrites_the_values_of_all(mode: str) -> None:
    def work(session: Session) -> Any:
        table = mv.ArrayTableHandler(4, [1, 2, 3, 4], session=session)
        table.add([1] * 4)
        table.get()
        session.barrier()
        if session.worker_id == 1:
            table.set([[5, 6], [7, 8]])
        session.barrier()
        before = table.snapshot().tolist()
        session.barrier()
        table.add([1] * 4)
        table.get()
        session.barrier()
        return before, table.snapshot().tolist()

    assert together(work, 2, **MODES[mode]) == [([5, 6, 7, 8], [7, 8, 9, 10])] * 2


def test_set_refuses_what_does_not_fit_and_leaves_the_updater_alone(alone: Session) -> None:
    def apply(values, delta, state, stride, hyper, count):  # type: ignore[no-untyped-def]
        for i in range(count):
            state[i] += 1
            values[i] += delta[i] * state[i]

    table = mv.ArrayTableHandler(2, updater=Updater("counting", apply, states=1), session=alone)
    table.add([1, 1])
    for value, error in (([1, 2, 3], ShapeMismatchError), (["a", "b"], DtypeMismatchError)):
        with pytest.raises(error):
            table.set(value)
    assert table.get().tolist() == [1, 1]
    table.set([10, 20])
    table.add([1, 1])
    assert table.get().tolist() == [12, 22]


@pytest.mark.parametrize("mode", MODES)
def test_rows_are_exchanged(mode: str) -> None:
    def work(session: Session) -> Any:
        table = mv.MatrixTableHandler(4, 2, session=session)
        rows = [3, session.worker_id]
        local, last = np.zeros((2, 2), "f4"), np.zeros((2, 2), "f4")
        local += [[1], [2]]
        table.exchange(local, last, row_ids=rows)
        same = local.tolist() == last.tolist()
        session.barrier()
        return same, local[1].tolist(), table.snapshot().tolist(), local[0].tolist()

    found = together(work, 2, **MODES[mode])
    for same, mine, whole, common in found:
        assert same
        assert mine == [2, 2]
        assert whole == [[2, 2], [2, 2], [0, 0], [2, 2]]
        assert common in ([[1, 1], [2, 2]] if mode != "sync" else [[2, 2]])


def test_bad_rows_of_an_exchange_change_nothing(alone: Session) -> None:
    table = mv.MatrixTableHandler(4, 2, session=alone)
    local, last = np.ones((2, 2), "f4"), np.zeros((2, 2), "f4")
    for rows in ([0, 4], [-1, 0], [0.5, 1]):
        with pytest.raises(RowIdError):
            table.exchange(local, last, row_ids=rows)
    with pytest.raises(ShapeMismatchError):
        table.exchange(local, last, row_ids=[0, 1, 2])
    with pytest.raises(ShapeMismatchError, match="share memory"):
        table.exchange(local, local, row_ids=[0, 1])
    assert (local == 1).all()
    assert (last == 0).all()
    assert not table.get().any()


def test_rows_in_the_background(alone: Session) -> None:
    table = mv.MatrixTableHandler(3, 2, session=alone)
    ids = np.array([2, 0])
    data = np.ones((2, 2), "f4")
    first = table.add_async(data, row_ids=ids)
    data += 5
    ids[:] = 1  # both were copied
    first.wait()
    assert table.get_async([2, 1]).wait().tolist() == [[1, 1], [0, 0]]
    out = np.empty((1, 2), "f4")
    assert table.get_async([0], out=out).wait() is out
    local, last = np.full((1, 2), 4.0, "f4"), np.ones((1, 2), "f4")
    table.exchange_async(local, last, row_ids=[0]).wait()
    assert local.tolist() == last.tolist() == [[4, 4]]
    table.add_async(np.ones((3, 2))).wait()
    assert table.get_async().wait().tolist() == [[5, 5], [1, 1], [2, 2]]
    for call in (
        lambda: table.add_async([[1, 1]], row_ids=[3]),
        lambda: table.get_async([-1]),
        lambda: table.exchange_async(local, last, row_ids=[3]),
    ):
        with pytest.raises(RowIdError, match="nothing was changed"):
            call()


@pytest.mark.parametrize("mode", MODES)
def test_waiting_for_a_version(mode: str) -> None:
    def work(session: Session) -> Any:
        table = mv.ArrayTableHandler(2, session=session)
        for _ in range(3):
            if session.worker_id == 0 or mode != "async":
                table.exchange(np.ones(2, "f4"), np.zeros(2, "f4"))
        return table.wait_version(3)

    assert all(version >= 3 for version in together(work, 2, **MODES[mode]))


@pytest.mark.parametrize("mode", MODES)
def test_who_waits_for_a_version_is_woken(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "_NAP_SECONDS", 600.0)  # so long it sleeps if nobody wakes it

    def work(session: Session) -> Any:
        table = mv.ArrayTableHandler(2, session=session)
        base, came = next(iter(session.tables().values())).base, []
        waiter = threading.Thread(target=lambda: came.append(table.wait_version(3, timeout_seconds=60)))
        waiter.start()
        for _ in range(3):
            wait_for(lambda: load32(base + at.WATCHED))
            table.exchange(np.ones(2, "f4"), np.zeros(2, "f4"))
        waiter.join()
        return came

    assert together(work, 1, **MODES[mode]) == [[3]]


def test_whatever_changes_a_table_wakes_a_node_that_rests(alone: Session) -> None:
    """So that other hosts hear of it at once; reads leave it asleep."""
    array, matrix = mv.ArrayTableHandler(2, session=alone), mv.MatrixTableHandler(3, 2, session=alone)
    local = np.ones(2, "f4")
    shared = mv.rules.share(local, mv.rules.easgd(0.5), session=alone)
    rests, row = alone.control.address + at.NODE_RESTS, np.ones((1, 2), "f4")
    changes: dict[str, Callable[[], object]] = {
        "add": lambda: array.add(row),
        "exchange": lambda: array.exchange(np.ones(2, "f4"), np.zeros(2, "f4")),
        "set": lambda: array.set(row),
        "add of rows": lambda: matrix.add(row, [1]),
        "note_written": array.note_written,
        "a rule's step": lambda: shared.exchange(local),
    }
    for what, change in changes.items():
        store32(rests, 1)
        array.get()
        matrix.get([0])
        assert load32(rests) == 1
        change()
        assert load32(rests) != 1, what
    store32(rests, 0)


def test_a_version_that_does_not_come(alone: Session) -> None:
    table = mv.ArrayTableHandler(2, session=alone)
    with pytest.raises(WaitTimeoutError, match=r"version 1 of the array of 2"):
        table.wait_version(1, timeout_seconds=0.01)
    for value in (1.5, -1, True):
        with pytest.raises(ValueError, match="version is a whole number"):
            table.wait_version(value)  # type: ignore[arg-type]
    assert table.wait_version(0) == 0


INTERNAL = (
    "local_state",
    "compile_rule",
    "apply",
    "apply_async",
    "staged",
    "restage",
    "leave",
    "replace",
    "flush_until",
)


@pytest.mark.parametrize("kind", [mv.ArrayTableHandler, mv.MatrixTableHandler, mv.TableHandler])
def test_the_help_page_shows_no_internals(kind: type) -> None:
    text = pydoc.plain(pydoc.render_doc(kind))
    shown = {name for name in dir(kind) if not name.startswith("_")}
    assert not shown & set(INTERNAL)
    assert "add(" in text


@pytest.mark.parametrize("mode", MODES)
def test_the_learning_rate_is_set_for_all_workers(mode: str) -> None:
    def work(session: Session) -> Any:
        table = mv.ArrayTableHandler(3, session=session, updater=mv.updaters.momentum(0.5, 0.0))
        session.barrier()
        if session.worker_id == 0:
            table.learning_rate = 0.25
        session.barrier()
        if session.worker_id == 1:
            table.add([4, 4, 4])
        session.barrier()
        return table.learning_rate, table.get().tolist()

    assert together(work, 2, **MODES[mode]) == [(0.25, [-1, -1, -1])] * 2


def test_a_learning_rate_is_refused_where_it_makes_no_sense(alone: Session) -> None:
    table = mv.ArrayTableHandler(3, session=alone, updater="adam")
    for wrong in (0, -1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="learning rate"):
            table.learning_rate = wrong
    for wrong in (1e39, 1e-50):
        with pytest.raises(ValueError, match="in float32"):
            table.learning_rate = wrong
    assert table.learning_rate == pytest.approx(0.001)
    plain = mv.ArrayTableHandler(3, session=alone)
    with pytest.raises(MultiversoError, match="has no learning rate"):
        plain.learning_rate = 0.1


@pytest.mark.parametrize("mode", MODES)
def test_only_the_rows_that_changed_are_read(mode: str) -> None:
    """All of a stripe: here 8 KiB are 128 rows of 16 numbers."""

    def work(session: Session) -> Any:
        table = mv.MatrixTableHandler(1000, 16, session=session)
        everything = np.arange(1000)
        ids, values = table.get(changed=True)
        first = np.array_equal(ids, everything) and not values.any()
        session.barrier()
        if session.worker_id == 0:
            table.add(np.ones((2, 16)), row_ids=[3, 700])
        session.barrier()
        ids, values = table.get(changed=True)
        expected = np.zeros((1000, 16))
        expected[[3, 700]] = 1
        changed = everything if mode == "sync" else np.r_[0:128, 640:768]
        second = np.array_equal(ids, changed) and np.array_equal(values, expected[changed])
        session.barrier()
        ids, values = table.get(changed=True)
        third = ids.size == (1000 if mode == "sync" else 0) and values.shape == (ids.size, 16)
        session.barrier()
        table.add(np.ones((1, 16)), row_ids=[999])  # the last stripe is a part of one; one's own adds count
        if mode == "sync":
            table.get()
        ids, values = table.get(changed=True)
        session.barrier()
        return first, second, third, ids[-1], values[-1, 0] >= 1

    for found in together(work, 2, **MODES[mode]):
        assert found == (True, True, True, 999, True)


def test_what_changes_while_bounded_staleness_is_waited_for_is_read() -> None:
    may_add = threading.Event()

    def work(session: Session) -> Any:
        table = mv.MatrixTableHandler(1000, 16, session=session)
        table.get(changed=True)
        session.barrier()
        if session.worker_id == 0:
            table.get()
            threading.Timer(0.3, may_add.set).start()
            ids, values = table.get(changed=True)  # waits for the other one, who is a read behind
            return ids[values[:, 0] == 1].tolist()
        may_add.wait(60)
        table.add(np.ones((1, 16)), row_ids=[700])
        table.get()
        return [700]

    assert together(work, 2, staleness=0) == [[700]] * 2


def test_a_choice_of_rows_beside_those_that_changed_is_refused(alone: Session) -> None:
    table = mv.MatrixTableHandler(4, 2, session=alone)
    for options in ({"row_ids": [1]}, {"out": np.empty((4, 2), "f4")}, {"dtype": "float16"}):
        with pytest.raises(ValueError, match="chooses the rows by itself"):
            table.get(changed=True, **options)


def test_what_changes_while_it_is_read_is_read_the_next_time() -> None:
    """One worker mirrors the table by what changed while the others add: nothing is missed."""

    def work(session: Session) -> Any:
        table = mv.MatrixTableHandler(3000, 16, session=session)
        mirror = np.zeros((3000, 16), "f4")
        random = np.random.default_rng(session.worker_id)
        if session.worker_id == 0:
            while table.version < 2 * 200:
                ids, values = table.get(changed=True)
                mirror[ids] = values
            session.barrier()
            ids, values = table.get(changed=True)
            mirror[ids] = values
            return np.array_equal(mirror, table.get())
        for turn in range(200):
            rows = random.integers(0, 3000, 5)
            (table.exchange if turn % 2 else table.add)(
                *((np.ones((5, 16), "f4"), np.zeros((5, 16), "f4")) if turn % 2 else (np.ones((5, 16), "f4"),)),
                row_ids=rows,
            )
        session.barrier()
        return True

    assert together(work, 3) == [True] * 3


def test_rows_of_any_kind_of_ids_and_repeated_ones_are_exchanged(alone: Session) -> None:
    """Of a row that is named twice both differences count, and both get the sum."""
    for kind in ("i1", "u1", "i4", "u8"):
        table = mv.MatrixTableHandler(6, 3, session=alone)
        local, last = np.full((3, 3), 2.0, "f4"), np.zeros((3, 3), "f4")
        table.exchange(local, last, row_ids=np.array([5, 0, 5], kind))
        assert local[:, 0].tolist() == last[:, 0].tolist() == [4, 2, 4]
        assert table.get([5, 5, 0])[:, 0].tolist() == [4, 4, 2]
