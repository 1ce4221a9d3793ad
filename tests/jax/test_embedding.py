"""Rows of shared tables in jitted steps, against an array of JAX's own."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import multiverso as mv
from multiverso.errors import RowIdError, ShapeMismatchError
from multiverso.jax import pull_rows, push_rows

ROWS, DIM = 40, 4


@pytest.fixture
def alone() -> Iterator[None]:
    mv.init()
    yield
    mv.shutdown()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("kind", ["matrix", "keyed"])
def test_a_jitted_step_trains_rows_as_it_trains_an_array(kind: str) -> None:
    """Batches of every size, ids named many times; the step is compiled for few sizes."""
    start = np.zeros((ROWS, DIM), "f4")
    shift = 0 if kind == "matrix" else 2**40  # keys that JAX could not hold
    table = mv.MatrixTableHandler(ROWS, DIM, updater="sgd") if kind == "matrix" else mv.KeyedTable(DIM, updater="sgd")

    @jax.jit
    def step(values, weight, places, y):  # type: ignore[no-untyped-def]
        def loss(values, weight):  # type: ignore[no-untyped-def]
            return jnp.mean((jnp.sin(values[places]).sum((1, 2)) * weight - y) ** 2)

        return jax.value_and_grad(loss, argnums=(0, 1))(values, weight)

    random = np.random.default_rng(0)
    expected, weight = jnp.asarray(start), jnp.float32(0.7)
    sizes = set()
    for _ in range(20):
        ids = random.integers(0, ROWS, (8, random.integers(1, 30)))[:, :3]
        y = random.normal(size=8).astype("f4")
        rows = pull_rows(table, ids + shift, least=8)
        sizes.add(rows.values.shape[0])
        (got, (gradient, by_weight)) = step(rows.values, weight, rows.places, y)
        (wanted, (whole, _)) = step(expected, weight, jnp.asarray(ids), y)
        np.testing.assert_allclose(got, wanted, rtol=1e-5)
        push_rows(rows, gradient, learning_rate=0.1)
        expected, weight = expected - 0.1 * whole, weight - 0.1 * by_weight
    assert sizes <= {8, 16, 32, 64}
    np.testing.assert_allclose(table.get(np.arange(ROWS) + shift), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("alone")
def test_what_cannot_be_pulled_or_pushed() -> None:
    with pytest.raises(ValueError, match="uphill"):
        pull_rows(mv.KeyedTable(2), [1])
    table = mv.MatrixTableHandler(4, 2, updater="sgd")
    with pytest.raises(RowIdError):
        pull_rows(table, [4])
    empty = pull_rows(table, np.empty((0, 3), "i8"))
    assert empty.places.shape == (0, 3)
    push_rows(empty, jnp.zeros_like(empty.values))
    with pytest.raises(ValueError, match="learning rate"):
        push_rows(empty, empty.values, learning_rate=0)
    rows = pull_rows(table, [3, 3, 1])
    with pytest.raises(ShapeMismatchError, match=r"their shape, \(\d+, 2\); got \(3, 2\)"):
        push_rows(rows, jnp.ones((3, 2)))  # by the batch's rows
    assert not table.get().any()
