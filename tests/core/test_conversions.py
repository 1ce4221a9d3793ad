"""What goes in and what comes out: anything with numbers, unmodified; fresh arrays, or ``out=``."""

from __future__ import annotations

import array
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import multiverso as mv
from multiverso.runtime import Session
from multiverso.tables.convert import as_numpy


def test_arrays_are_taken_while_another_thread_imports_masked_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """NumPy does so on its own in `unique` and `isin`: its module is there then, and nothing in it."""
    monkeypatch.setitem(sys.modules, "numpy.ma", types.ModuleType("numpy.ma"))
    assert as_numpy(np.ones(2), "delta").tolist() == [1, 1]


class DlpackOnly:
    """What a framework's array looks like that NumPy knows through DLPack alone."""

    def __init__(self, values: Any) -> None:
        self._values = np.asarray(values)

    def __dlpack__(self, **options: Any) -> Any:
        return self._values.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self._values.__dlpack_device__()


def frozen(values: Any) -> Any:
    values = np.array(values)
    values.flags.writeable = False
    return values


INPUTS: dict[str, Callable[[], Any]] = {
    "list": lambda: [1, 2, 3, 4, 5, 6],
    "tuple": lambda: (1.0, 2.0, 3.0, 4.0, 5.0, 6.0),
    "range": lambda: range(1, 7),
    "nested": lambda: [[1, 2, 3], [4, 5, 6]],
    "booleans and integers": lambda: [True, 2, 3, 4, 5, 6],
    "float32": lambda: np.arange(1, 7, dtype="f4"),
    "float64": lambda: np.arange(1, 7, dtype="f8"),
    "float16": lambda: np.arange(1, 7, dtype="f2"),
    "longdouble": lambda: np.arange(1, 7, dtype=np.longdouble),
    "big-endian": lambda: np.arange(1, 7, dtype=">f4"),
    "int8": lambda: np.arange(1, 7, dtype="i1"),
    "uint64": lambda: np.arange(1, 7, dtype="u8"),
    "strided": lambda: np.arange(1, 13, dtype="f4")[::2] // 2 + 1,
    "every second": lambda: np.repeat(np.arange(1, 7, dtype="f4"), 2)[::2],
    "reversed": lambda: np.arange(6, 0, -1, dtype="f4")[::-1],
    "transposed": lambda: np.array([[1, 4], [2, 5], [3, 6]], "f4").T,
    "Fortran": lambda: np.asfortranarray(np.arange(1, 7, dtype="f4").reshape(2, 3)),
    "not aligned": lambda: np.frombuffer(b"x" + np.arange(1, 7, dtype="f4").tobytes(), "f4", offset=1),
    "read-only": lambda: frozen(np.arange(1, 7, dtype="f4")),
    "read-only matrix": lambda: frozen(np.arange(1, 7, dtype="f4").reshape(3, 2)),
    "broadcast": lambda: np.broadcast_to(np.arange(1, 7, dtype="f4"), (1, 6)),
    "array.array": lambda: array.array("d", [1, 2, 3, 4, 5, 6]),
    "bytearray": lambda: bytearray([1, 2, 3, 4, 5, 6]),
    "memoryview": lambda: memoryview(array.array("f", [1, 2, 3, 4, 5, 6])),
    "DLPack": lambda: DlpackOnly(np.arange(1, 7, dtype="f4")),
    "subclass": lambda: np.arange(1, 7, dtype="f4").view(np.recarray).view(np.ndarray),
}


@pytest.mark.parametrize("case", INPUTS)
def test_anything_with_numbers_goes_in_and_is_not_modified(alone: Session, case: str) -> None:
    given_ = INPUTS[case]()
    kept = INPUTS[case]()
    table = mv.ArrayTableHandler(6, given_, session=alone)
    table.add(given_)
    table.add_async(given_).wait(30)
    np.testing.assert_array_equal(table.get(), np.array([1, 2, 3, 4, 5, 6], "f4") * 3)
    if not isinstance(given_, DlpackOnly):
        assert type(given_) is type(kept)
        np.testing.assert_array_equal(np.asarray(given_), np.asarray(kept))


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "int64"])
def test_same_kinds_round_to_the_dtype_of_the_table(alone: Session, dtype: str) -> None:
    table = mv.ArrayTableHandler(3, session=alone, dtype=dtype)
    table.add(np.array([1, 2, 3], "i2"))
    if dtype.startswith("float"):
        table.add(np.array([0.1, 0.2, 0.3]))
        expected = np.array([1, 2, 3], dtype) + np.array([0.1, 0.2, 0.3]).astype(dtype)
        np.testing.assert_array_equal(table.get(), expected)
    assert table.get().dtype == table.dtype == np.dtype(dtype)


@pytest.mark.parametrize("row_ids", [[2, 0, 2], (2, 0, 2), np.array([2, 0, 2], "u1"), array.array("i", [2, 0, 2])])
def test_row_ids_in_any_order_and_repeated(alone: Session, row_ids: Any) -> None:
    table = mv.MatrixTableHandler(3, 2, session=alone)
    table.add([[1, 1], [10, 10], [100, 100]], row_ids=row_ids)
    np.testing.assert_array_equal(table.get(), [[10, 10], [0, 0], [101, 101]])
    np.testing.assert_array_equal(table.get(row_ids=row_ids), [[101, 101], [10, 10], [101, 101]])


def test_other_row_ids(alone: Session) -> None:
    table = mv.MatrixTableHandler(4, 2, np.arange(8), session=alone)
    np.testing.assert_array_equal(table.get(range(1, 3)), [[2, 3], [4, 5]])
    np.testing.assert_array_equal(table.get(frozen([3, 3])), [[6, 7], [6, 7]])
    np.testing.assert_array_equal(table.get(np.arange(8)[::2] // 2), np.arange(8).reshape(4, 2))
    assert table.get([]).shape == (0, 2)
    table.add(np.zeros((0, 2)), row_ids=[])
    table.add([], row_ids=[])


def test_a_matrix_takes_flat_data_too(alone: Session) -> None:
    table = mv.MatrixTableHandler(2, 3, [1, 2, 3, 4, 5, 6], session=alone)
    table.add([1] * 6)
    table.add([1, 1, 1], row_ids=[1])
    np.testing.assert_array_equal(table.get(), [[2, 3, 4], [6, 7, 8]])


@pytest.mark.parametrize("shape", [(1, 1), (3, 2)])
def test_one_number_fills_a_table(alone: Session, shape: tuple[int, int]) -> None:
    assert (mv.ArrayTableHandler(4, 2.5, session=alone).get() == 2.5).all()
    assert (mv.MatrixTableHandler(*shape, 7, session=alone).get() == 7).all()


def test_results_are_fresh_arrays(alone: Session) -> None:
    table = mv.ArrayTableHandler(3, [1, 2, 3], session=alone)
    first = table.get()
    first[:] = 0
    table.add([1, 1, 1])
    np.testing.assert_array_equal(table.get(), [2, 3, 4])
    assert not np.may_share_memory(table.get(), table.view())
    assert table.get().flags.writeable


@pytest.mark.parametrize("shape", [(6,), (2, 3), (3, 2), (1, 6, 1)])
def test_out_is_filled_and_returned(alone: Session, shape: tuple[int, ...]) -> None:
    table = mv.ArrayTableHandler(6, range(6), session=alone)
    out = np.empty(shape, "f4")
    assert table.get(out=out) is out
    np.testing.assert_array_equal(out.reshape(-1), range(6))
    assert table.get_async(out=out).wait(30) is out
    assert table.snapshot(out=out) is out


def test_out_of_a_matrix(alone: Session) -> None:
    table = mv.MatrixTableHandler(3, 2, range(6), session=alone)
    flat, rows = np.empty(6, "f4"), np.empty((2, 2), "f4")
    assert table.get(out=flat) is flat
    np.testing.assert_array_equal(flat, range(6))
    assert table.get([2, 0], out=rows) is rows
    np.testing.assert_array_equal(rows, [[4, 5], [0, 1]])
    assert table.get(None, flat) is flat


def test_16_bits_come_out_where_asked_for(alone: Session) -> None:
    table = mv.ArrayTableHandler(3, [1, 2, 1 / 3], session=alone)
    half = table.get(dtype="float16")
    assert half.dtype == np.float16
    np.testing.assert_array_equal(half, np.array([1, 2, 1 / 3], "f4").astype("f2"))
    out = np.empty(3, "f2")
    assert table.get(out=out) is out
    np.testing.assert_array_equal(out, half)


def test_small_16_bit_adds_do_not_vanish(alone: Session) -> None:
    table = mv.ArrayTableHandler(1, [2048], session=alone)
    for _ in range(100):
        table.add(np.array([0.5], "f2"))
    assert table.get()[0] == 2098


def test_views_are_read_only_windows(alone: Session) -> None:
    table = mv.MatrixTableHandler(2, 2, session=alone)
    view = table.view()
    table.add([1, 2, 3, 4])
    np.testing.assert_array_equal(view, [[1, 2], [3, 4]])
    assert not view.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        view[0, 0] = 5
    with pytest.raises(ValueError, match="WRITEABLE"):
        view.flags.writeable = True


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    data=hnp.arrays(
        st.sampled_from(["f2", "f4", "f8", ">f8", "i1", "u2", "i8", "?"]),
        st.just((2, 3)),
        elements={"allow_nan": False, "allow_infinity": False, "min_value": 0, "max_value": 1},
    ),
    change=st.sampled_from(["as it is", "Fortran", "every second", "read-only", "list"]),
)
def test_conversion_is_that_of_numpy(alone: Session, data: Any, change: str) -> None:
    expected = data.astype("f4").reshape(-1)
    if change == "Fortran":
        data = np.asfortranarray(data)
    elif change == "every second":
        data = np.repeat(data, 2, axis=0)[::2]
    elif change == "read-only":
        data = frozen(data)
    elif change == "list":
        data = data.tolist()
    table = mv.ArrayTableHandler(6, data, session=alone)
    np.testing.assert_array_equal(table.get(), expected)
