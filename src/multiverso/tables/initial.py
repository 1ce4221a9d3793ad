"""What a table holds at first: the master's value, or the mean or the sum of all workers' values."""

from __future__ import annotations

from typing import Any

import numpy as np

from multiverso.shards.shard import Shard
from multiverso.spec.table import INITIAL, TableSpec
from multiverso.tables.convert import Array, as_data, as_numpy, check_size, readable


def initial_value(init_value: Any, spec: TableSpec) -> Array | None:
    """Returns this worker's initial value as the table takes it, or None for zeros.

    Raises:
        ValueError: the table's spec says otherwise how the workers' values become one.
        ShapeMismatchError, DtypeMismatchError: the value does not fit.
    """
    if spec.initial not in INITIAL:
        raise ValueError(f"initial is one of {', '.join(INITIAL)}; got {spec.initial!r}")
    if init_value is None:
        return None
    array = as_numpy(init_value, "init_value")
    if array.ndim == 0:
        array = np.full(spec.elements, array)
    check_size(array, spec.shape, spec, "init_value")
    return as_data(array, np.dtype(spec.dtype), "init_value")


def fill(shard: Shard, value: Array | None, last: bool, number: int) -> None:
    """Writes one worker's part of the initial value; the node lets one worker in after another, in their order.

    Args:
        shard: the table's memory.
        value: what `initial_value` returned.
        last: whether nobody comes after this worker.
        number: how many workers contribute.
    """
    values, initial = shard.values(), shard.spec.initial
    if value is not None:
        if initial == "master":
            values[:] = readable(value)
        else:
            values += value
    if initial == "mean" and last:
        if values.dtype.kind == "f":
            values /= number
        else:
            values //= number
