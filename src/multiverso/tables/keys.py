"""Keys as users hand them in."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from multiverso.errors import RowIdError
from multiverso.tables.convert import Array, as_numpy, readable

Keys = npt.NDArray[np.int64]


def as_keys(keys: Any) -> Keys:
    """Returns keys as int64, C-contiguous, in their shape.

    Raises:
        RowIdError: no integers, or too large for 64 bits with a sign.
    """
    try:
        array = as_numpy(keys, "keys")
    except ValueError as error:
        raise RowIdError(f"keys must be integers: {error}") from error
    if array.size == 0 and array.dtype.kind in "iuf":
        return np.empty(array.shape, np.int64)
    if array.dtype.kind not in "iu":
        hint = "; KeyedTable.add takes (delta, keys)" if array.ndim > 1 and array.dtype.kind == "f" else ""
        raise RowIdError(
            f"keys must be integers of at most 64 bits; got {array.dtype} of shape {array.shape}{hint}"
        )
    if array.dtype == np.uint64 and array.max() >= 2**63:
        raise RowIdError(f"keys must fit in 64 bits with a sign; got {array.max()}: take view('int64')")
    return readable(np.ascontiguousarray(array, dtype=np.int64)).reshape(array.shape)


def summed(keys: Keys, delta: Array, dim: int) -> tuple[Keys, Array]:
    """Returns each different key once, with the sum of its deltas."""
    different, place = np.unique(keys, return_inverse=True)
    if different.size == keys.size:
        return keys, delta
    order = np.argsort(place, kind="stable")
    starts = np.searchsorted(place[order], np.arange(different.size))
    total = np.add.reduceat(delta.reshape(-1, dim)[order], starts, axis=0)
    return different, np.ascontiguousarray(total, delta.dtype).reshape(-1)
