"""A user's program as checkers of types see it: what each call returns, and the mistakes that they must find.

`make check` shows it to mypy and basedpyright; it is never run. Both report a ``type: ignore`` that nothing needs, so
each one stands for an error that they have to find.
"""

from __future__ import annotations

from functools import partial
from typing import Any, assert_type

import numpy as np
import numpy.typing as npt

import multiverso as mv
from multiverso.tables import Pending

Float32s = npt.NDArray[np.float32]


def tables_give_their_dtype() -> None:
    table = mv.ArrayTableHandler(3, init_value=[1, 2, 3], updater="adam")
    assert_type(table, mv.ArrayTableHandler[np.float32])
    assert_type(table.get(), Float32s)
    assert_type(table.get(dtype="float16"), npt.NDArray[np.float16])
    assert_type(table.get_async(), Pending[Float32s])
    assert_type(table.get_async().wait(), Float32s)
    assert_type(table.add_async([1.0, 1.0, 1.0]), Pending[None])
    out: Float32s = np.zeros(3, np.float32)
    assert_type(table.get(out), Float32s)
    assert_type(mv.ArrayTableHandler(3, dtype="int64", name="counts").get(), npt.NDArray[np.int64])
    matrix = mv.MatrixTableHandler(4, 2, dtype=np.float64, updater=mv.updaters.adam(0.1))
    assert_type(matrix.get(row_ids=[0, 3]), npt.NDArray[np.float64])
    assert_type(matrix.snapshot(), npt.NDArray[np.float64])
    assert_type(matrix.get_async([0]).wait(), npt.NDArray[np.float64])
    keyed = mv.KeyedTable(2, dtype="float64", initial="uniform", updater="adam")
    assert_type(keyed, mv.KeyedTable[np.float64])
    assert_type(keyed.get([1]), npt.NDArray[np.float64])
    assert_type(keyed.get([1], dtype="float16"), npt.NDArray[np.float16])
    assert_type(next(keyed.items())[1], npt.NDArray[np.float64])
    assert_type(mv.KeyedTable(2).get([1]), Float32s)
    assert_type(mv.KeyedTable(2, dtype="int64").get([1]), npt.NDArray[np.int64])


def any_table(table: mv.TableHandler, dtype: str) -> npt.NDArray[Any]:
    other: mv.TableHandler = mv.ArrayTableHandler(3, dtype=dtype)
    values: npt.NDArray[Any] = table.get() + other.get()
    return values


def a_job_returns_what_its_function_returns() -> None:
    def train(base: int, rate: float = 0.1) -> str:
        return f"{base * rate}"

    def alone() -> float:
        return 1.0

    assert_type(mv.run(alone, workers=2), list[float])
    assert_type(mv.run(train, workers=2, args=(10,)), list[str])
    assert_type(mv.run(train, args=(10, 0.2), hosts=2), list[str])
    assert_type(mv.run(train, kwargs={"base": 10}), list[str])
    assert_type(mv.run(partial(train, base=10, rate=0.2), workers=2), list[str])
    assert_type(mv.run(train, 2, (10,), on_failure="continue"), list[str])
    mv.run(train, workers=2)  # type: ignore[arg-type]
    mv.run(train, workers=2, args=("10",))  # type: ignore[arg-type]
    mv.run(partial(train, base="10"))  # type: ignore[arg-type]
    mv.run(partial(train, 10, rates=0.2))  # type: ignore[call-arg]
    mv.run(train, args=(1,), on_failure="ignore")  # type: ignore[call-overload]
    mv.run(10)  # type: ignore[call-overload]


def names_are_checked() -> None:
    mv.init(sync=True, on_lost="continue")
    mv.init(on_lost="go on")  # type: ignore[arg-type]
    mv.ArrayTableHandler(3, updater="adamm")  # type: ignore[call-overload]
    mv.ArrayTableHandler(3, initial="master", updatr="add")  # type: ignore[call-overload]
    mv.MatrixTableHandler(4, 2, initial="worker")  # type: ignore[call-overload]
    mv.KeyedTable(8, updater="adamm")  # type: ignore[call-overload]
    mv.KeyedTable(8, initail=1)  # type: ignore[call-overload]
    assert_type(mv.all_reduce([1.0], "max"), npt.NDArray[Any])
    mv.all_reduce([1.0], "maximum")  # type: ignore[arg-type]
    with mv.init(exist_ok=True) as session:
        assert_type(session.worker_id, int)
