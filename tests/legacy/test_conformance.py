"""The conformance suite, with Lasagne 0.1 and with Keras 1.2.2 over the real Theano."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from multiverso.testing import bindings


class Network:
    """Parameters and statistics of one Lasagne layer."""

    def __init__(self, values: Sequence[Any], statistics: Sequence[Any]) -> None:
        import lasagne

        from multiverso.theano_ext.lasagne_ext.param_manager import LasagneParamManager

        layer = lasagne.layers.DropoutLayer((None, 3))
        self._summed = [layer.add_param(np.array(v), v.shape) for v in values]
        self._averaged = [layer.add_param(np.array(v), v.shape, trainable=False) for v in statistics]
        self._manager = LasagneParamManager(layer)

    def values(self) -> list[Any]:
        return [variable.get_value() for variable in self._summed]

    def statistics(self) -> list[Any]:
        return [variable.get_value() for variable in self._averaged]

    def add(self, deltas: Sequence[Any]) -> None:
        for variable, delta in zip(self._summed, deltas, strict=True):
            variable.set_value(variable.get_value() + delta)

    def set_statistics(self, values: Sequence[Any]) -> None:
        for variable, value in zip(self._averaged, values, strict=True):
            variable.set_value(np.array(value))

    def sync(self) -> None:
        self._manager.sync_all_param()

    def kinds(self) -> list[str]:
        return [f"{v.type} {v.get_value().dtype} {v.get_value().shape}" for v in self._summed + self._averaged]


class Weights(Network):
    """Weights of one Keras layer, trainable or not."""

    def __init__(self, values: Sequence[Any], statistics: Sequence[Any]) -> None:
        from keras import backend
        from keras.layers import Activation
        from keras.models import Sequential

        from multiverso.theano_ext.keras_ext.param_manager import KerasParamManager

        layer = Activation("linear", input_shape=(3,))
        model = Sequential([layer])
        self._summed = [backend.variable(np.array(v), dtype=v.dtype.name) for v in values]
        self._averaged = [backend.variable(np.array(v), dtype=v.dtype.name) for v in statistics]
        layer.trainable_weights, layer.non_trainable_weights = self._summed, self._averaged
        self._manager = KerasParamManager(model)


def import_old_frameworks() -> None:
    """Before the processes fork; without their warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in ("keras", "lasagne"):
            importlib.import_module(name)


TestLasagne = bindings.suite(
    Network, dtypes=("float32", "float64"), workers=(2,), deaths=False, preload=(import_old_frameworks,)
)
TestKeras1 = bindings.suite(Weights, workers=(1, 2, 4), preload=(import_old_frameworks,))
