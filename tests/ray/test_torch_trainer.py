"""What a `TorchTrainer` asks of its configuration when it is made, with no cluster."""

from __future__ import annotations

import pytest

pytest.importorskip("ray.train", reason="Ray Train is not installed here; `make ray` installs it", exc_type=ImportError)
from ray.train.torch import TorchConfig, TorchTrainer

from multiverso.errors import StartupError
from multiverso.ray.train import MultiversoConfig


@pytest.mark.parametrize("backend", [None, "gloo"])
def test_a_torch_trainer_finds_and_says_how_pytorch_talks(backend: str | None) -> None:
    inner = TorchConfig(backend=backend)
    config = MultiversoConfig(inner, every=0.5)
    TorchTrainer(print, torch_config=config)
    assert config.backend == inner.backend == "gloo"


def test_a_torch_trainer_without_pytorchs_configuration_is_told_so() -> None:
    with pytest.raises(StartupError, match=r"MultiversoConfig\(TorchConfig\(\)\)"):
        TorchTrainer(print, torch_config=MultiversoConfig())
