"""The suites pass what is right, and find what is wrong."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import multiverso as mv
from multiverso.errors import WorkerLostError
from multiverso.params import SharedParams, broadcast
from multiverso.testing import bindings, faults, tables, updaters
from multiverso.testing.laws import Law, judge

SECONDS = 100


def array_table(size: int, value: Any, dtype: str) -> Any:
    return mv.ArrayTableHandler(size, value, dtype=dtype)


class MatrixTable:
    """A matrix of one column: each number is a row."""

    def __init__(self, size: int, value: Any, dtype: str) -> None:
        self.size = size
        begun = None if value is None else np.reshape(value, (size, 1))
        self._table = mv.MatrixTableHandler(size, 1, begun, dtype=dtype)

    def get(self) -> Any:
        return self._table.get(np.arange(self.size)).reshape(-1)

    def add(self, data: Any) -> None:
        self._table.add(np.reshape(data, -1), row_ids=np.arange(self.size))


def subtract(values: Any, delta: Any, states: Any) -> None:
    values -= delta


def add(values: Any, delta: Any, states: Any) -> None:
    values += delta


class NumpyModel:
    """The least that a binding is: arrays in a SharedParams."""

    def __init__(self, values: Any, statistics: Any) -> None:
        self._shared = SharedParams(values, statistics)

    def values(self) -> list[Any]:
        return [array.copy() for array in self._shared.arrays]

    def statistics(self) -> list[Any]:
        return [array.copy() for array in self._shared.statistics]

    def add(self, deltas: Any) -> None:
        for array, delta in zip(self._shared.arrays, deltas, strict=True):
            array += delta

    def set_statistics(self, values: Any) -> None:
        for array, value in zip(self._shared.statistics, values, strict=True):
            array[...] = value

    def sync(self) -> None:
        self._shared.exchange()

    def kinds(self) -> list[str]:
        return [f"{array.dtype} {array.shape}" for array in self._shared.arrays]


TestNumpy = bindings.suite(NumpyModel, dtypes=("float32", "float64"), hosts=[(2, 1, 1)], preload=("multiverso",))
TestArrayTable = tables.suite(array_table, hosts=[(1, 1), (2, 1, 1)], preload=("multiverso",))
TestMatrixTable = tables.suite(MatrixTable, workers=(2,), hosts=[(1, 1)], preload=("multiverso",))
TestAdd = updaters.suite(mv.updaters.add(), add)
TestSgd = updaters.suite(mv.updaters.sgd(), subtract)


class Summing(NumpyModel):
    """Sums its statistics, the classic mistake."""

    def __init__(self, values: Any, statistics: Any) -> None:
        self._shared = SharedParams([*values, *statistics])
        self._number = len(values)

    def values(self) -> list[Any]:
        return super().values()[: self._number]

    def statistics(self) -> list[Any]:
        return [array.copy() for array in self._shared.arrays[self._number :]]

    def add(self, deltas: Any) -> None:
        for array, delta in zip(self._shared.arrays[: self._number], deltas, strict=True):
            array += delta

    def set_statistics(self, values: Any) -> None:
        for array, value in zip(self._shared.arrays[self._number :], values, strict=True):
            array[...] = value


class Alone(NumpyModel):
    """Never exchanges."""

    def sync(self) -> None:
        pass


class Wider(NumpyModel):
    """Changes the dtype of what it was given."""

    def sync(self) -> None:
        super().sync()
        self._shared.arrays = [array.astype("float64") for array in self._shared.arrays]


class Careless(NumpyModel):
    """Writes to the deltas that it is handed."""

    def add(self, deltas: Any) -> None:
        super().add(deltas)
        for delta in deltas:
            delta.flags.writeable = True
            delta += 1


@pytest.mark.parametrize(
    ("factory", "law"),
    [
        (Summing, "statistics are averaged"),
        (Alone, "deltas add up exactly"),
        (Alone, "all are equal after a barrier and a sync"),
        (Wider, "dtype, shape and device are kept"),
        (Careless, "nothing handed in is changed"),
    ],
)
def test_a_wrong_binding_is_found_out(factory: Any, law: str) -> None:
    suite = bindings.suite(factory, workers=(2,), deaths=False, preload=("multiverso",))
    with pytest.raises(AssertionError):
        suite().test_law(2, law)


def test_a_law_that_raised_in_a_worker_fails_with_its_traceback() -> None:
    from multiverso.testing.laws import Raised

    broken = [{"law": Raised("ZeroDivisionError: here")}, {"law": 1}]
    with pytest.raises(AssertionError, match="ZeroDivisionError: here"):
        judge(Law(lambda *_: None, lambda _: None), "law", False, broken)


def wrong(values: Any, delta: Any, states: Any) -> None:
    values += 2 * delta


def test_a_wrong_updater_is_found_out() -> None:
    with pytest.raises(AssertionError, match="off by"):
        updaters.check(mv.updaters.add(), wrong, dtype="float32", size=5, sync=False)


def killed(after: bool) -> Any:
    mv.init(on_lost="stop")
    table = mv.ArrayTableHandler(4)
    mv.barrier()
    if mv.worker_id() == 1:
        faults.die_at(table, "add", 5, after=after)
        for _ in range(10):
            table.add(np.ones(4))
    with pytest.raises(WorkerLostError):
        mv.barrier()
    return table.get()[0]


@pytest.mark.parametrize("after", [False, True])
def test_a_worker_is_killed_at_its_fifth_add(after: bool) -> None:
    results = mv.run(killed, workers=2, args=(after,), on_failure="continue", timeout_seconds=SECONDS)
    assert results[0] == (5 if after else 4)
    assert isinstance(results[1], WorkerLostError)


def killed_with_lock() -> Any:
    mv.init(on_lost="continue")
    table = mv.ArrayTableHandler(4)
    mv.barrier()
    if mv.worker_id() == 1:
        faults.die_with_lock(table)
    mv.barrier()
    table.add(np.ones(4))
    return table.get()[0], mv.stats()["tables"][1]["locks_recovered"]


def test_a_lock_whose_holder_was_killed_is_taken_over() -> None:
    results = mv.run(killed_with_lock, workers=2, on_failure="continue", timeout_seconds=SECONDS)
    assert results[0] == (1, 1)


def test_a_process_dies_at_once() -> None:
    program = "import atexit; atexit.register(print, 'end'); from multiverso.testing import faults; faults.die()"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=250, check=False)
    assert result.returncode == -signal.SIGKILL
    assert result.stdout == ""
    with pytest.raises(ValueError, match="from 1"):
        faults.die_at(os, "getpid", 0)


def handed_on(sync: bool) -> Any:
    mv.init(sync=sync)
    me = mv.worker_id()
    arrays = [
        np.full(3, me, "uint8"),
        np.full((700, 800), me + 0.5, "float64"),  # more than passes at once
        np.zeros(0),
        np.array(float("-inf") if me == 0 else 1.0),
        np.full(5, me == 0),
    ]
    broadcast(arrays)
    return [array.sum() for array in arrays]


@pytest.mark.parametrize("sync", [False, True])
def test_broadcast_hands_on_every_bit(sync: bool) -> None:
    for sums in mv.run(handed_on, workers=2, args=(sync,), timeout_seconds=SECONDS):
        assert sums == [0, 700 * 800 * 0.5, 0, float("-inf"), 5]
