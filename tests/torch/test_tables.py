"""Tables that take and give tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import multiverso as mv
import multiverso.torch as mvt
from multiverso.errors import DtypeMismatchError, ShapeMismatchError
from multiverso.testing.laws import Job, run_jobs, unless_raised


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    mvt.init()
    yield
    mvt.shutdown()


@pytest.mark.parametrize(
    ("dtype", "stored"),
    [(torch.float32, "float32"), (torch.float64, "float64"), (torch.float16, "float32"), (torch.bfloat16, "float32")],
)
def test_dtype_and_device_are_kept(dtype: Any, stored: str) -> None:
    given = torch.arange(6, dtype=dtype)
    table = mvt.ArrayTableHandler(6, given)
    matrix = mvt.MatrixTableHandler(2, 3, given.reshape(2, 3))
    assert table.table.dtype == matrix.table.dtype == stored
    delta = torch.ones(6, dtype=dtype)
    table.add(delta)
    matrix.add(delta.reshape(2, 3))
    matrix.add(delta[:3], row_ids=torch.tensor([1]))
    for tensor, shape in ((table.get(), (6,)), (matrix.get(), (2, 3)), (matrix.get([1, 0, 1]), (3, 3))):
        assert tensor.dtype == dtype
        assert tensor.shape == shape
        assert tensor.device.type == "cpu"
    assert table.get().tolist() == [1, 2, 3, 4, 5, 6]
    assert matrix.get(torch.tensor([1])).tolist() == [[5, 6, 7]]
    assert given.tolist() == [0, 1, 2, 3, 4, 5]
    assert (delta == 1).all()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8, torch.bool])
def test_integers_make_a_float_table_which_takes_gradients(dtype: Any) -> None:
    given = torch.ones(6, dtype=dtype)
    for table in (mvt.ArrayTableHandler(6, given), mvt.MatrixTableHandler(2, 3, given)):
        assert table.table.dtype == "float32"
        table.add(torch.full((2, 3), 0.5))
        assert table.get().dtype == torch.float32
        assert (table.get() == 1.5).all()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_table_of_integers_is_made_by_dtype(dtype: Any) -> None:
    table = mvt.ArrayTableHandler(3, torch.arange(3), dtype=dtype)
    table.add(torch.ones(3, dtype=dtype))
    assert table.table.dtype == str(dtype).removeprefix("torch.")
    assert table.get().dtype == dtype
    assert table.get().tolist() == [1, 2, 3]


def begin() -> Any:
    mvt.init()
    mine = torch.full((2,), 2.0 + mvt.worker_id())
    array, matrix = mvt.ArrayTableHandler(2, mine), mvt.MatrixTableHandler(1, 2, mine)
    return array.get().tolist(), matrix.get().tolist(), mvt.server_id()


def test_arrays_and_matrices_begin_with_the_masters_value() -> None:
    mvt.shutdown()
    found = run_jobs([Job((0, 1))], begin, preload=("multiverso.torch",))[0]
    assert unless_raised(found) == [([2.0, 2.0], [[2.0, 2.0]], n) for n in range(2)]


def test_what_requires_grad_or_is_not_contiguous_goes_in() -> None:
    table = mvt.MatrixTableHandler(2, 3)
    table.add(torch.nn.Parameter(torch.ones(2, 3)))
    table.add(torch.arange(6.0).reshape(3, 2).t())
    assert table.get().tolist() == [[1, 3, 5], [2, 4, 6]]
    assert not table.get().requires_grad
    with pytest.raises(ShapeMismatchError):
        table.add(torch.ones(3, 2))
    with pytest.raises(TypeError, match="complex"):
        mvt.ArrayTableHandler(2, torch.ones(2, dtype=torch.complex64))


def test_the_names_of_the_torch_binding() -> None:
    assert mvt.num_workers() == 1
    assert mvt.worker_id() == 0
    table = mvt.ArrayTableHandler(3, device="cpu", dtype=torch.float16)
    table.add([1, 2, 3], sync=True)
    mvt.barrier()
    assert table.get().dtype == torch.float16


def test_any_table_may_be_given_a_dtype_of_torchs() -> None:
    assert mv.ArrayTableHandler(3, dtype=torch.int64).get().dtype == np.int64
    assert mv.KeyedTable(3, dtype=torch.float32).dtype == np.float32
    with pytest.raises(DtypeMismatchError, match=r"got torch\.float16 \(16-bit data go into a float32 table"):
        mv.ArrayTableHandler(3, dtype=torch.float16)
