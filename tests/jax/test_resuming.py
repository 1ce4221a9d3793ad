"""A JAX run that was saved and resumed goes on bit by bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import multiverso as mv
from multiverso.errors import SnapshotError
from multiverso.testing.laws import in_each

STEPS, SAVED = 8, 3


def train(folder: str, resumed: bool) -> Any:
    import jax
    import jax.numpy as jnp
    import optax

    from multiverso.jax import ParamManager

    mv.init(sync=True)
    me = mv.worker_id()
    begun = {"w": jnp.full((3, 2), 1.0 + me), "b": jnp.zeros(2, jnp.bfloat16)}
    manager = ParamManager(begun, statistics={"mean": jnp.zeros(2)}, every=2, rule=mv.rules.easgd(0.3))
    optimizer = optax.adam(0.05)
    state = {
        "params": manager.params,
        "statistics": manager.statistics,
        "optimizer": optimizer.init(manager.params),
        "key": jax.random.key(me + 5 * resumed),
        "step": 0,
    }
    if resumed:
        with pytest.raises(SnapshotError, match="own was saved as"):
            manager.load(folder, like={"params": manager.params})
        state = manager.load(folder, like=state)
        assert state["step"] == SAVED
        assert type(state["step"]) is int
    else:
        assert manager.load(folder, like=state, missing_ok=True) is None

    def loss(params: Any, x: Any) -> Any:
        return ((x @ params["w"] + params["b"].astype("float32")) ** 2).mean()

    while state["step"] < STEPS:
        key, draw = jax.random.split(state["key"])
        x = jax.random.normal(draw, (4, 3))
        gradients = jax.grad(loss)(state["params"], x)
        updates, moments = optimizer.update(gradients, state["optimizer"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        statistics = {"mean": 0.9 * state["statistics"]["mean"] + 0.1 * x.mean(0)[:2]}
        params, statistics = manager.step(params, statistics)
        step = state["step"] + 1
        state = {
            "params": params,
            "statistics": statistics,
            "optimizer": moments,
            "key": key,
            "step": step,
        }
        if step == SAVED and not resumed:
            manager.save(folder, state)
    state["key"] = jax.random.key_data(state["key"])
    return [np.asarray(leaf, dtype="float64") for leaf in jax.tree.leaves(state)]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_resumed_run_ends_with_the_bits_of_one_that_went_on(tmp_path: Path, workers: int) -> None:
    runs = [(workers, str(tmp_path), resumed) for resumed in (False, True)]
    ended = in_each(runs, train)
    for went_on, resumed in zip(ended(*runs[0]), ended(*runs[1]), strict=True):
        for one, other in zip(went_on, resumed, strict=True):
            np.testing.assert_array_equal(one, other)
