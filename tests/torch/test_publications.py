"""PyTorch models as publications: any dtype, tied weights once, parameters that are the shared memory."""

from __future__ import annotations

import os

import pytest
import torch
from torch import distributed, nn
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import multiverso as mv
from multiverso.errors import DtypeMismatchError, ShapeMismatchError


class Tied(nn.Module):
    """A language model's two ends, which are one tensor, and statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.norm = nn.BatchNorm1d(4)
        self.out = nn.Linear(4, 10, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.out(self.norm(self.embedding(ids)))
        return logits


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """What it is, NaN and -0 told apart."""
    return tensor.reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_a_model_is_read_as_it_was_published(dtype: torch.dtype) -> None:
    name = f"of-test-{os.urandom(8).hex()}"
    model = Tied()
    weights = {
        key: value.to(dtype) if value.is_floating_point() else value for key, value in model.state_dict().items()
    }
    weights["out.weight"] = weights["embedding.weight"]
    with mv.Publication(name, like=weights) as publication, mv.subscribe(name) as subscription:
        publication.publish(weights)
        with subscription.latest() as snapshot:
            snapshot.verify()
            tensors = snapshot.torch()
            assert tensors["embedding.weight"].data_ptr() == tensors["out.weight"].data_ptr()
            for key, value in weights.items():
                assert tensors[key].dtype == value.dtype
                assert torch.equal(bits(tensors[key]), bits(value)), key
        mine = {key: torch.zeros_like(value) for key, value in weights.items()}
        subscription.load_into(mine)
        for key, value in weights.items():
            assert torch.equal(bits(mine[key]), bits(value)), key


def test_parameters_can_be_the_shared_memory_and_keep_their_version() -> None:
    name = f"of-test-{os.urandom(8).hex()}"
    trained, ids = Tied().eval(), torch.arange(10)
    with mv.Publication(name, like=trained, slots=2) as publication, mv.subscribe(name) as subscription:
        publication.publish(trained)
        expected = trained(ids)
        served = Tied().eval()
        with subscription.latest() as snapshot:
            tensors = snapshot.torch()
            served.load_state_dict(tensors, assign=True)
        assert served.embedding.weight.data_ptr() == tensors["embedding.weight"].data_ptr()
        del tensors, snapshot
        with torch.no_grad():
            trained.embedding.weight.add_(1.0)
        assert publication.publish(trained) == 2
        assert publication.publish(trained) is None, "the served model keeps version 1"
        assert torch.equal(served(ids), expected)
        other = Tied()
        assert subscription.load_into(other) == 2
        assert torch.equal(other.embedding.weight, trained.embedding.weight)
        with pytest.raises(ShapeMismatchError, match=r"it has 'extra.weight'"):
            other.add_module("extra", nn.Linear(1, 1, bias=False))
            publication.publish(other)
        del served
        assert publication.publish(trained) == 3
        with subscription.latest() as snapshot:
            served = Tied()
            served.load_state_dict(snapshot.torch(), assign=True)
        with pytest.raises(DtypeMismatchError, match=r"memory of a publication itself"):
            subscription.load_into(served)


def test_tensors_that_lie_otherwise_than_in_a_slot_are_read_as_they_are() -> None:
    name = f"of-test-{os.urandom(8).hex()}"
    turned = torch.arange(6.0).reshape(2, 3).T
    numbers = torch.tensor([1 + 2j, 3 - 1j])
    model = {
        "turned": turned,
        "same": turned,
        "conjugate": numbers.conj(),
        "negative": numbers.conj().imag,
        "one number": torch.ones(1).expand(4),
    }
    with mv.Publication(name, like=model) as publication, mv.subscribe(name) as subscription:
        publication.publish(model)
        with subscription.latest() as snapshot:
            snapshot.verify()
            tensors = snapshot.torch()
            for key, value in model.items():
                assert torch.equal(tensors[key], value), key
            assert tensors["turned"].data_ptr() == tensors["same"].data_ptr()


def test_tensors_without_memory_of_their_own_are_refused() -> None:
    name = f"of-test-{os.urandom(8).hex()}"
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        part = distribute_tensor(torch.zeros(4), init_device_mesh("cpu", (1,)), [Shard(0)])
    finally:
        distributed.destroy_process_group()
    for tensor in (part, torch.zeros(4, device="meta")):
        with pytest.raises(TypeError, match=r"'w' is a (DTensor|Tensor) on .* of a DTensor, what full_tensor\(\)"):
            mv.Publication(name, like={"w": tensor})
    with mv.Publication(name, like={"v": torch.zeros(1), "w": torch.zeros(4)}) as publication:
        publication.publish({"v": torch.ones(1), "w": torch.ones(4)})
        for tensor in (part, torch.zeros(4, device="meta")):
            mine = torch.zeros(1)
            with mv.subscribe(name) as subscription, pytest.raises(TypeError, match="full_tensor"):
                subscription.load_into({"v": mine, "w": tensor})
            assert mine.item() == 0, "nothing was changed"
