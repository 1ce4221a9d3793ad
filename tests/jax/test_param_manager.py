"""Pytrees in, pytrees out; and exchanges from inside jitted steps."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import multiverso as mv
from multiverso.errors import DtypeMismatchError, ShapeMismatchError, WorkerLostError
from multiverso.jax import ParamManager
from multiverso.testing.laws import Job, call, unless_raised, when_asked

SECONDS = 280
JITTED = [(2, True, 3, 20, 1000), (3, False, 1, 30, 300_000)]


@pytest.fixture
def alone() -> Iterator[None]:
    mv.init()
    yield
    mv.shutdown()


def tree() -> dict[str, Any]:
    return {
        "a": [jnp.ones((2, 3)), jnp.zeros(4, jnp.bfloat16)],
        "b": (jnp.float32(2.0), None),
        "key": jax.random.key(3),
        "count": jnp.arange(3),
        "numpy": np.ones(2, "float64"),
    }


def test_leaves_keep_what_they_are(alone: None) -> None:
    given = tree()
    manager = ParamManager(given)
    for params in (manager.params, manager.sync_all_param(manager.params)):
        assert jax.tree.structure(params) == jax.tree.structure(given)
        for new, old in zip(jax.tree.leaves(params), jax.tree.leaves(given), strict=True):
            assert type(new) is type(old)
            assert (new.dtype, new.shape) == (old.dtype, old.shape)
            assert getattr(new, "sharding", None) == getattr(old, "sharding", None)
            assert getattr(new, "committed", None) == getattr(old, "committed", None)


def test_other_trees_and_dtypes_are_refused(alone: None) -> None:
    manager = ParamManager({"a": jnp.ones(3)}, statistics={"m": jnp.ones(2)})
    for params, statistics in [
        ({"b": jnp.ones(3)}, {"m": jnp.ones(2)}),
        ({"a": jnp.ones(4)}, {"m": jnp.ones(2)}),
        ({"a": jnp.ones(3)}, None),
    ]:
        with pytest.raises(ShapeMismatchError):
            manager.sync_all_param(params, statistics)
    with pytest.raises(DtypeMismatchError, match="float8"):
        ParamManager([jnp.ones(2, jnp.float8_e4m3fn)])
    with pytest.raises(ValueError, match="nothing to share"):
        ParamManager({"count": 3, "ids": jnp.arange(2)})
    with pytest.raises(ValueError, match="statistics"):
        manager.transformation()
    with pytest.raises(ValueError, match="number of steps"):
        ParamManager([jnp.ones(2)], every=timedelta(seconds=1)).transformation()
    with pytest.raises(ValueError, match="all fragments at once"):
        ParamManager([jnp.ones(2)], every=2, fragments=2).transformation()
    with pytest.raises(ValueError, match="pass the parameters"):
        ParamManager([jnp.ones(2)]).transformation().update([jnp.ones(2)], None)


def test_every_so_many_steps(alone: None) -> None:
    for options, expected in (({"every": 3}, [2]), ({"every": 4, "fragments": 2}, [2, 1])):
        manager = ParamManager([jnp.zeros(2)], **options)
        before = len(mv.stats()["tables"]) - len(expected)
        params = manager.params
        for _ in range(7):
            params = manager.step(params)
        assert [table["exchanges"] for table in mv.stats()["tables"].values()][before:] == expected


def jitted(sync: bool, every: int, steps: int, size: int) -> Any:
    mv.init(sync=sync)
    params = {"w": jnp.full(size, float(mv.worker_id())), "b": jnp.zeros(3, jnp.bfloat16)}
    manager = ParamManager(params, every=every)
    optimizer = optax.chain(optax.sgd(1.0), manager.transformation())
    params = manager.params
    state = jax.jit(optimizer.init)(params)

    @jax.jit
    def step(params: Any, state: Any) -> Any:
        gradients = jax.tree.map(lambda leaf: -jnp.ones_like(leaf), params)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    for _ in range(steps):
        params, state = step(params, state)
    jax.block_until_ready(params)
    exchanges = max(table["exchanges"] for table in mv.stats()["tables"].values())
    params = manager.finish(params)  # what the last steps have changed
    return jax.tree.map(np.asarray, params), exchanges


@pytest.mark.parametrize(("workers", "sync", "every", "steps", "size"), JITTED)
def test_a_jitted_step_exchanges(workers: int, sync: bool, every: int, steps: int, size: int) -> None:
    results = unless_raised(ended(JITTED.index((workers, sync, every, steps, size))))
    for params, exchanges in results:
        assert exchanges == steps // every
        np.testing.assert_array_equal(params["w"], workers * steps)
        np.testing.assert_array_equal(params["b"].astype(np.float32), workers * steps)


def learn() -> Any:
    """Least squares, each worker with data of its own, through Adam."""
    mv.init()
    truth = jnp.array([1.0, -2.0, 3.0])
    manager = ParamManager(jnp.zeros(3), every=2)
    optimizer = optax.chain(optax.adam(0.05), manager.transformation())
    params, state = manager.params, optimizer.init(manager.params)

    @jax.jit
    def step(params: Any, state: Any, x: Any) -> Any:
        gradient = jax.grad(lambda p: jnp.mean((x @ (p - truth)) ** 2))(params)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    for number in range(200):
        x = jax.random.normal(jax.random.key(1000 * mv.worker_id() + number), (16, 3))
        params, state = step(params, state, x)
    params = manager.sync_all_param(params)
    mv.barrier()
    return np.asarray(manager.sync_all_param(params) - truth)


def test_workers_learn_together() -> None:
    for error in unless_raised(ended(len(JITTED))):
        assert np.abs(error).max() < 0.2


def killed() -> Any:
    from multiverso.testing import faults

    mv.init(sync=True, on_lost="stop", timeout_seconds=SECONDS / 2)
    manager = ParamManager(jnp.zeros(3))
    optimizer = optax.chain(optax.sgd(1.0), manager.transformation())
    params, state = manager.params, optimizer.init(manager.params)
    step = jax.jit(lambda p, s: optimizer.update(jnp.ones(3), s, p))
    mv.barrier()
    if mv.worker_id() == 1:
        faults.die_at(manager._shared, "sync", 2)
    with pytest.raises(Exception, match="WorkerLostError"):
        for _ in range(3):
            _, state = step(params, state)
            jax.block_until_ready(state)
            jax.effects_barrier()
    return "told"


def test_a_death_reaches_a_jitted_step() -> None:
    results = ended(len(JITTED) + 1)
    assert results[0] == "told"
    assert isinstance(results[1], WorkerLostError)


# In the same processes, but for one: a killed worker brings nothing.
JOBS = [Job(tuple(range(run[0])), (jitted, *run[1:])) for run in JITTED] + [
    Job((0, 1), (learn,)),
    Job((0, 3), (killed,)),
]
ended = when_asked(JOBS, call, on_failure="continue", preload=("optax", "multiverso.jax"))


def test_the_missing_framework_is_named() -> None:
    program = "import sys; sys.modules['optax'] = None; import multiverso.jax"
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert 'pip install "multiverso[jax]"' in result.stderr
    assert "ImportError" in result.stderr
