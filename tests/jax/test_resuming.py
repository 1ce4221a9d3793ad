"""A JAX run that was saved and resumed goes on bit by bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import multiverso as mv
from multiverso.errors import SnapshotError
from multiverso.testing.laws import Job, Raised, run_jobs

STEPS, SAVED = 8, 3


def join(manager: Any, state: Any, folder: str) -> Any:
    """Goes on with more workers than have saved."""
    import jax

    copied = {**state, "params": {key: leaf + 0 for key, leaf in manager.params.items()}}
    with pytest.raises(SnapshotError, match="the very arrays of"):
        manager.load(folder, like=copied)
    state = manager.load(folder, like=state)
    centre = [np.asarray(leaf, "float64") for leaf in manager._shared.centre()]
    now = jax.tree.leaves((state["params"], state["statistics"]))
    for _ in range(3):
        manager.step(state["params"], state["statistics"])
    mv.shutdown()
    keys = jax.random.key_data(state["key"]).tolist()
    return manager.newcomer, centre, [np.asarray(leaf, "float64") for leaf in now], keys, state["step"]


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
    if resumed and mv.workers_num() > len(
        json.loads(Path(folder, "manifest.json").read_text())["generations"][-1]["common"]
    ):
        return join(manager, state, folder)
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
        state = {"params": params, "statistics": statistics, "optimizer": moments, "key": key, "step": step}
        if step == SAVED and not resumed:
            manager.save(folder, state)
    mv.shutdown()
    state["key"] = jax.random.key_data(state["key"])
    return [np.asarray(leaf, dtype="float64") for leaf in jax.tree.leaves(state)]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Any:
    one, two, grown = (str(tmp_path_factory.mktemp("saved")) for _ in range(3))
    jobs = [Job((0,), (one, False)), Job((0,), (one, True)), Job((0, 1), (two, False)), Job((0, 1), (two, True))]
    return run_jobs(
        [*jobs, Job((0,), (grown, False)), Job((0, 1), (grown, True))], train, preload=("optax", "multiverso.jax")
    )


@pytest.mark.parametrize("workers", [1, 2])
def test_a_resumed_run_ends_with_the_bits_of_one_that_went_on(ended: Any, workers: int) -> None:
    whole, again = ended[2 * workers - 2 : 2 * workers]
    for went_on, resumed in zip(whole, again, strict=True):
        assert not isinstance(resumed, Raised), resumed.text
        for one, other in zip(went_on, resumed, strict=True):
            np.testing.assert_array_equal(one, other)


def test_a_newcomer_begins_with_the_shared_parameters(ended: Any) -> None:
    joined = ended[-1]
    for result in joined:
        assert not isinstance(result, Raised), result.text
    assert [newcomer for newcomer, *_ in joined] == [False, True]
    _, centre, now, key, step = joined[1]
    for value in centre:
        assert any(value.size == leaf.size and np.allclose(value, leaf, rtol=1e-2) for leaf in now)
    assert step == SAVED
    assert key == joined[0][3]
    assert any(not np.array_equal(one, other) for one, other in zip(joined[0][2], now, strict=True))
