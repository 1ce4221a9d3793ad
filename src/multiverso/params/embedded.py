"""Rows of a table as a layer's numbers: what the embeddings of all bindings do alike."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from multiverso.tables import KeyedTable, MatrixTableHandler

Array = NDArray[Any]
Table = KeyedTable | MatrixTableHandler
_ASCENDS = ("add", "mean")


def check_trainable(table: Any, learning_rate: float) -> int:
    """Returns how many numbers a row has.

    Raises:
        TypeError, ValueError: no table of rows of floats, or one whose updater adds gradients up.
    """
    if not isinstance(table, KeyedTable | MatrixTableHandler):
        raise TypeError(f"table is a KeyedTable or a MatrixTableHandler; got {type(table).__name__}")
    if table.spec.updater in _ASCENDS:
        raise ValueError(
            f"gradients point uphill, and the table's updater {table.spec.updater!r} would add them: make the "
            "table with updater='sgd', or another one that descends"
        )
    if table.dtype.kind != "f":
        raise ValueError(f"an embedding's rows are floats; the table is {table.dtype}")
    if not learning_rate > 0:
        raise ValueError(f"a learning rate is above 0; got {learning_rate!r}")
    return table.dim if isinstance(table, KeyedTable) else table.shape[1]


def push(table: Table, ids: Any, gradient: Any, learning_rate: float = 1.0) -> None:
    """Gives the table's updater the gradients of rows, each named once, times the learning rate."""
    delta = gradient if learning_rate == 1 else gradient * learning_rate
    table.add(delta, ids)


def look_up(table: Table, ids: Any, learning_rate: float, padding_idx: int | None = None) -> tuple[Any, Any]:
    """Returns, as tensors of PyTorch, the rows of the different ids, and for each id which of them is its.

    Their gradients are pushed in the backward. float16 and bfloat16 models get float32 rows: autocast rounds them where
    it is asked to.

    Args:
        table: the table.
        ids: integers of any shape.
        learning_rate: as for `push`.
        padding_idx: an id whose row reads as zeros and is never trained.
    """
    import torch

    different, places = torch.unique(ids.detach().cpu().reshape(-1), return_inverse=True)
    rows = torch.from_numpy(table.get(different.numpy())).to(ids.device)
    trained = different != padding_idx if padding_idx is not None else slice(None)
    if padding_idx is not None:
        rows[(different == padding_idx).to(ids.device)] = 0
    if torch.is_grad_enabled():
        rows.requires_grad_().register_hook(
            lambda gradient: push(table, different[trained], gradient.detach().cpu()[trained], learning_rate)
        )
    return rows, places.to(ids.device).reshape(ids.shape)


def push_all(table: Table, ids: Array, gradient: Array, learning_rate: float) -> None:
    """The same for ids of any shape, also repeated, with a gradient for each: they are summed first."""
    different, places = np.unique(ids, return_inverse=True)
    total = np.zeros((different.size, gradient.shape[-1]), table.dtype)
    np.add.at(total, places.reshape(-1), gradient.reshape(-1, gradient.shape[-1]))
    if different.size:
        push(table, different, total, learning_rate)
