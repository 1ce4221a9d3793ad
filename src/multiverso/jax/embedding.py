"""Embeddings over shared tables, for jitted steps: rows go in as an argument, and their gradients come out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from multiverso.errors import ShapeMismatchError
from multiverso.params.embedded import Table, check_trainable, push
from multiverso.tables.convert import Array, as_numpy

_LEAST = 64


@dataclass(frozen=True)
class Rows:
    """The different rows of a batch. Made by `pull_rows`.

    Attributes:
        values: (rows, dim): the different rows, and zeros up to a power of two, so that a jitted step meets a few
            shapes only. What to differentiate by.
        places: int32, of the ids' shape: ``values[places]`` are the batch's rows.
        ids: the different ids, as NumPy's int64.
        table: where they come from.
    """

    values: Any
    places: Any
    ids: Array
    table: Table


def pull_rows(table: Table, ids: Any, *, least: int = _LEAST) -> Rows:
    """Pulls the different rows of a batch: before a jitted step, not inside.

    Args:
        table: a `KeyedTable` (any 64-bit ids) or a `MatrixTableHandler` (ids in 0 .. num_row - 1), of floats, whose
            updater descends: ``"sgd"`` and the like.
        ids: integers of any shape. Give NumPy's: JAX makes 32 bits of 64.
        least: as many rows at least, a batch of fewer has zeros.

    Raises:
        TypeError, ValueError: no such table.
        RowIdError: ids that are not integers, or no rows of the table.

    Examples:
        >>> import jax, multiverso as mv, numpy as np
        >>> from multiverso.jax import pull_rows, push_rows
        >>> session = mv.init()
        >>> words = mv.KeyedTable(2, updater="sgd")
        >>> batch = pull_rows(words, np.array([[7, 9], [7, 2**40]]))
        >>> step = jax.jit(jax.grad(lambda values, places: values[places].sum()))
        >>> push_rows(batch, step(batch.values, batch.places), learning_rate=0.5)
        >>> words.get([7, 9])
        array([[-1. , -1. ],
               [-0.5, -0.5]], dtype=float32)
        >>> mv.shutdown()
    """
    dim = check_trainable(table, 1)
    array = as_numpy(ids, "ids")
    different, places = np.unique(array, return_inverse=True)
    padded = np.zeros((max(least, 1 << max(different.size - 1, 0).bit_length()), dim), table.dtype)
    if different.size:
        table.get(different, out=padded[: different.size])
    return Rows(jnp.asarray(padded), jnp.asarray(places.reshape(array.shape), jnp.int32), different, table)


def push_rows(rows: Rows, gradient: Any, *, learning_rate: float = 1.0) -> None:
    """Gives the gradients of a batch's rows to their table's updater: after a jitted step, not inside.

    Args:
        rows: what `pull_rows` returned.
        gradient: by ``rows.values``, of its shape; waits until it is there.
        learning_rate: a factor of the gradients; leave it at 1 for updaters with a learning rate of their own.

    Raises:
        ShapeMismatchError: it has another shape; nothing was pushed.
    """
    check_trainable(rows.table, learning_rate)
    if np.shape(gradient) != rows.values.shape:
        raise ShapeMismatchError(
            f"the gradient by rows.values has their shape, {rows.values.shape}; got {np.shape(gradient)}: take the "
            "rows in the loss, rows.values[rows.places], and differentiate by rows.values"
        )
    if rows.ids.size:
        values = np.asarray(jax.device_get(gradient), rows.table.dtype)[: rows.ids.size]
        push(rows.table, rows.ids, values, learning_rate)
