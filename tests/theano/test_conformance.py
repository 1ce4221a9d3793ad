"""The conformance suite, with PyTensor, or the real Theano in the environment that has it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from multiverso.testing import bindings
from multiverso.theano.framework import framework


class Variables:
    """Parameters and statistics as shared variables."""

    def __init__(self, values: Sequence[Any], statistics: Sequence[Any]) -> None:
        from multiverso.theano.framework import framework

        shared = framework().shared
        self._summed = [shared(np.array(value)) for value in values]
        self._averaged = [shared(np.array(value)) for value in statistics]
        self._share()

    def _share(self) -> None:
        from multiverso.theano import ParamManager

        self.sync = ParamManager(self._summed, statistics=self._averaged).sync_all_param

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
        raise AssertionError("replaced when the variables are shared")

    def kinds(self) -> list[str]:
        both = self._summed + self._averaged
        return [f"{v.type} {v.get_value().dtype} {v.get_value().shape}" for v in both]


class MultiversoShared(Variables):
    """The same, each variable in a table of its own."""

    def __init__(self, values: Sequence[Any], statistics: Sequence[Any]) -> None:
        from multiverso.theano import mv_shared, sync_all_mv_shared_vars

        self._summed = [mv_shared(value, borrow=True) for value in values]
        self._averaged = []
        self.sync = sync_all_mv_shared_vars


TestParamManager = bindings.suite(Variables, dtypes=("float32", "float64", "float16"), preload=(framework,))
TestMVShared = bindings.suite(
    MultiversoShared, dtypes=("float32", "float16"), statistics=False, workers=(2,), deaths=False, preload=(framework,)
)
