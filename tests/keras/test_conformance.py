"""The conformance suite, with Keras itself, on PyTorch and on JAX."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pytest

from multiverso.testing import bindings


@pytest.fixture(scope="class", autouse=True)
def on_its_backend(
    request: pytest.FixtureRequest, forked_from: Callable[[str], AbstractContextManager[None]]
) -> Iterator[None]:
    """What the class's workers are forked from."""
    with forked_from("keras on torch" if request.cls is TestKerasOnTorch else "keras on jax"):
        yield


class KerasModel:
    """Weights in a layer, shared by a ParamManager."""

    def __init__(self, values: Sequence[Any], statistics: Sequence[Any]) -> None:
        import keras

        from multiverso.keras import ParamManager

        class Holder(keras.layers.Layer):
            def build(self, _: Any) -> None:
                for array, trainable in [(v, True) for v in values] + [(s, False) for s in statistics]:
                    start = keras.initializers.Constant(np.array(array))
                    self.add_weight(shape=array.shape, dtype=str(array.dtype), initializer=start, trainable=trainable)

            def call(self, inputs: Any) -> Any:
                return inputs

        self._model = keras.Sequential([keras.Input((1,)), Holder()])
        self._manager = ParamManager(self._model)

    def values(self) -> list[Any]:
        return [np.array(weight.numpy()) for weight in self._model.trainable_weights]

    def statistics(self) -> list[Any]:
        return [np.array(weight.numpy()) for weight in self._model.non_trainable_weights]

    def add(self, deltas: Sequence[Any]) -> None:
        for weight, delta in zip(self._model.trainable_weights, deltas, strict=True):
            weight.assign(weight.numpy() + delta)

    def set_statistics(self, values: Sequence[Any]) -> None:
        for weight, value in zip(self._model.non_trainable_weights, values, strict=True):
            weight.assign(value)

    def sync(self) -> None:
        self._manager.sync_all_param()

    def kinds(self) -> list[str]:
        return [f"{w.dtype} {w.shape} {getattr(w.value, 'device', '')} {w.trainable}" for w in self._model.weights]


DTYPES = ("float32", "float16")
TestKerasOnTorch, TestKerasOnJax = (
    bindings.suite(KerasModel, dtypes=DTYPES, env={"KERAS_BACKEND": backend}, preload=("keras",), hosts=[hosts])
    for backend, hosts in (("torch", (1, 1)), ("jax", (1, 1, 1)))
)
