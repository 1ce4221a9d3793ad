"""Modules on a GPU: pinned staging, a stream of their own, exchanges beside the training."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

import multiverso as mv
from multiverso.errors import RowIdError, ShapeMismatchError
from multiverso.testing import bindings
from multiverso.torch import ArrayTableHandler, Embedding, MatrixTableHandler, ParamManager, SharedOptimizer
from multiverso.torch.groups import Staged

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
SECONDS = 110


class CudaModel:
    """Parameters and running statistics on the GPU."""

    def __init__(self, values: Any, statistics: Any) -> None:
        from torch import nn

        from multiverso.torch import ParamManager

        self._torch = torch
        self._module = nn.Module()
        self._module.weights = nn.ParameterList(torch.tensor(value, device="cuda") for value in values)
        for index, value in enumerate(statistics):
            self._module.register_buffer(f"running_{index}", torch.tensor(value, device="cuda"))
        self._manager = ParamManager(self._module)

    def values(self) -> list[Any]:
        return [p.detach().cpu().numpy().copy() for p in self._module.parameters()]

    def statistics(self) -> list[Any]:
        return [b.cpu().numpy().copy() for b in self._module.buffers()]

    def add(self, deltas: Any) -> None:
        with self._torch.no_grad():
            for parameter, delta in zip(self._module.parameters(), deltas, strict=True):
                parameter += self._torch.tensor(np.array(delta), device="cuda")

    def set_statistics(self, values: Any) -> None:
        for buffer, value in zip(self._module.buffers(), values, strict=True):
            buffer.copy_(self._torch.tensor(np.array(value)))

    def sync(self) -> None:
        self._manager.sync_all_param()

    def kinds(self) -> list[str]:
        return [f"{t.dtype} {tuple(t.shape)} {t.device}" for t in [*self._module.parameters(), *self._module.buffers()]]


TestCuda = bindings.suite(CudaModel, dtypes=("float32", "float64", "float16"))


def overlapped(sync: bool, size: int, steps: int) -> Any:
    mv.init(sync=sync)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(size, size, bias=False) for _ in range(4))).cuda()
    for p in model.parameters():
        torch.nn.init.constant_(p, mv.worker_id())
    manager = ParamManager(model, overlap=True)
    assert all(isinstance(group, Staged) and group._host.is_pinned() for group in manager._groups)
    x = torch.ones(size, size, device="cuda")
    for _ in range(steps):
        (x @ model[0].weight).sum()  # the compute stream has work
        with torch.no_grad():
            for p in model.parameters():
                p += mv.worker_id() + 1
        manager.step()
    manager.flush()
    mv.barrier()
    manager.sync_all_param()
    return [(float(p.min()), float(p.max()), str(p.device)) for p in model.parameters()]


@pytest.mark.parametrize("sync", [False, True])
def test_overlapped_exchanges_lose_nothing(sync: bool) -> None:
    for rows in mv.run(overlapped, workers=2, args=(sync, 512, 20), timeout_seconds=SECONDS):
        assert rows == [(60.0, 60.0, "cuda:0")] * 4


@pytest.fixture
def alone() -> Any:
    mv.init()
    yield
    mv.shutdown()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_worker_trains_as_if_nothing_were_shared(alone: None, overlap: bool, dtype: Any) -> None:
    def trained(shared: bool) -> Any:
        torch.manual_seed(0)
        # no bias before the normalisation: its gradient is rounding alone, which Adam makes as large as any
        model = torch.nn.Sequential(
            torch.nn.Linear(32, 64, bias=False), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 8)
        ).to("cuda", dtype)
        optimizer: Any = torch.optim.Adam(model.parameters(), lr=0.01)
        if shared:
            optimizer = SharedOptimizer(optimizer, model, overlap=overlap)
        for step in range(10):
            x = torch.randn(16, 32, generator=torch.Generator().manual_seed(step)).to("cuda", dtype)
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        if shared:
            optimizer.manager.flush()
        return list(model.parameters())

    for plain, shared in zip(trained(False), trained(True), strict=True):
        torch.testing.assert_close(plain, shared, rtol=2e-2 if dtype == torch.bfloat16 else 1e-4, atol=1e-3)


def test_modules_on_several_devices(alone: None) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4).cuda(), torch.nn.Linear(4, 2))
    manager = ParamManager(model)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(7)
    manager.sync_all_param()
    assert [p.device.type for p in model.parameters()] == ["cuda", "cuda", "cpu", "cpu"]
    np.testing.assert_allclose(next(iter(manager.saved_tables().values())).get(), 7)
    model.cpu()
    with pytest.raises(RuntimeError, match="move or convert the module first"):
        manager.sync_all_param()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
def test_tables_give_and_take_tensors_of_a_gpu(alone: None, dtype: Any) -> None:
    """Larger and smaller ones in turns, and by several threads: they go through memory that is kept."""
    table = MatrixTableHandler(500, 40, dtype=dtype, device="cuda")
    ones = torch.ones(500, 40, device="cuda", dtype=dtype)
    table.add(ones)
    table.add(ones[:3].t().contiguous().t() * 2, row_ids=torch.tensor([7, 8, 7]))
    got = table.get()
    assert (got.device.type, got.dtype, got.shape) == ("cuda", dtype, (500, 40))
    assert got[6:10, 0].tolist() == [1, 5, 3, 1]
    assert table.get([8, 499])[:, 5].tolist() == [3, 1]
    with pytest.raises(ShapeMismatchError):
        table.add(ones[:4])
    with pytest.raises(RowIdError):
        table.add(ones[:1], row_ids=[500])

    def add(_: int) -> None:
        for _ in range(50):
            table.add(ones)
            assert (table.get() >= 1).all()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(add, range(4)))
    assert table.get()[6:10, 0].tolist() == [201, 205, 203, 201]


@pytest.mark.parametrize("keyed", [False, True])
def test_an_embedding_is_trained_on_a_gpu(alone: None, keyed: bool) -> None:
    table: Any = mv.KeyedTable(8, updater="sgd") if keyed else mv.MatrixTableHandler(100, 8, updater="sgd")
    words = Embedding(table, learning_rate=0.5)
    ids = torch.tensor([[3, 5], [3, 9]], device="cuda")
    words.prefetch(ids)
    rows = words(ids)
    assert rows.device.type == "cuda"
    rows.sum().backward()
    assert table.get([3, 5, 9, 10])[:, 0].tolist() == [-1.0, -0.5, -0.5, 0.0]


def test_tensors_of_a_table_stay_on_their_device(alone: None) -> None:
    given = torch.arange(4.0, device="cuda", dtype=torch.bfloat16)
    table = ArrayTableHandler(4, given)
    table.add(given)
    got = table.get()
    assert (got.device, got.dtype) == (given.device, given.dtype)
    assert got.tolist() == [0, 2, 4, 6]
