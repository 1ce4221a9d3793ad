"""The conformance suite, with JAX itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from multiverso.testing import bindings


class JaxModel:
    """A pytree, shared by a ParamManager."""

    def __init__(self, values: Sequence[Any], statistics: Sequence[Any]) -> None:
        import jax.numpy as jnp

        from multiverso.jax import ParamManager

        params = {"weights": [jnp.array(value) for value in values], "step": np.int32(7)}
        self._manager = ParamManager(params, statistics=[jnp.array(value) for value in statistics])
        self._params, self._statistics = self._manager.params, self._manager.statistics

    def values(self) -> list[Any]:
        return [np.array(leaf) for leaf in self._params["weights"]]

    def statistics(self) -> list[Any]:
        return [np.array(leaf) for leaf in self._statistics]

    def add(self, deltas: Sequence[Any]) -> None:
        weights = [leaf + np.array(delta) for leaf, delta in zip(self._params["weights"], deltas, strict=True)]
        self._params = {**self._params, "weights": weights}

    def set_statistics(self, values: Sequence[Any]) -> None:
        import jax.numpy as jnp

        self._statistics = [jnp.array(value) for value in values]

    def sync(self) -> None:
        self._params, self._statistics = self._manager.sync_all_param(self._params, self._statistics)

    def kinds(self) -> list[str]:
        leaves = [*self._params["weights"], *self._statistics]
        return [f"{leaf.dtype} {leaf.shape} {leaf.devices()}" for leaf in leaves]


TestJax = bindings.suite(JaxModel, dtypes=("float32", "float16"), preload=("jax",), hosts=[(1, 1)])
