"""The conformance suite, with PyTorch itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from multiverso.testing import bindings


class TorchModel:
    """Parameters and running statistics in a module, shared by a ParamManager."""

    def __init__(self, values: Sequence[Any], statistics: Sequence[Any]) -> None:
        import torch

        from multiverso.torch import ParamManager

        class Holder(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weights = torch.nn.ParameterList(torch.tensor(value) for value in values)
                for index, value in enumerate(statistics):
                    self.register_buffer(f"running_{index}", torch.tensor(value))

        torch.set_num_threads(1)
        self._torch = torch
        self._module = Holder()
        self._manager = ParamManager(self._module)

    def values(self) -> list[Any]:
        return [p.detach().numpy().copy() for p in self._module.parameters()]

    def statistics(self) -> list[Any]:
        return [b.numpy().copy() for b in self._module.buffers()]

    def add(self, deltas: Sequence[Any]) -> None:
        with self._torch.no_grad():
            for parameter, delta in zip(self._module.parameters(), deltas, strict=True):
                parameter += self._torch.from_numpy(np.array(delta))

    def set_statistics(self, values: Sequence[Any]) -> None:
        for buffer, value in zip(self._module.buffers(), values, strict=True):
            buffer.copy_(self._torch.from_numpy(np.array(value)))

    def sync(self) -> None:
        self._manager.sync_all_param()

    def kinds(self) -> list[str]:
        tensors = [*self._module.parameters(), *self._module.buffers()]
        return [f"{t.dtype} {tuple(t.shape)} {t.device} {t.requires_grad}" for t in tensors]


TestTorch = bindings.suite(TorchModel, dtypes=("float32", "float64", "float16"), preload=("torch",), hosts=[(1, 1)])
