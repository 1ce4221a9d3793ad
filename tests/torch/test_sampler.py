"""A batch sampler for `DataLoader` whose batches are dealt as workers ask."""

from __future__ import annotations

from typing import Any

from multiverso.testing.laws import in_each


def one_epoch(loader_workers: int) -> Any:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    import multiverso as mv
    from multiverso.torch import BatchSampler

    mv.init()
    data = TensorDataset(torch.arange(60))
    sampler = BatchSampler(data, 4, seed=1, ahead=2 * loader_workers)
    loader = DataLoader(data, batch_sampler=sampler, num_workers=loader_workers)
    epochs = [[x.tolist() for (x,) in loader] for _ in range(2)]
    sampler.set_epoch(0)
    again = [x.tolist() for (x,) in loader]
    mv.shutdown()
    return [*epochs, again]


dealt = in_each([(2, 0), (2, 2)], one_epoch, preload=("multiverso.torch",))


def check(results: list[Any]) -> None:
    epochs = [sorted(tuple(batch) for worker in results for batch in worker[epoch]) for epoch in range(3)]
    for epoch in epochs:
        assert sorted(row for batch in epoch for row in batch) == list(range(60))
    assert epochs[0] != epochs[1]
    assert epochs[0] == epochs[2], "the same epoch has the same batches"


def test_each_pass_over_a_loader_deals_the_next_epoch() -> None:
    check(dealt(2, 0))


def test_a_loader_with_processes_takes_batches_ahead() -> None:
    check(dealt(2, 2))
