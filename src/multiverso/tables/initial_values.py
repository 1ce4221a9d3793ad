"""What a table begins with: the master's value, or the sum or mean of all workers'."""

from __future__ import annotations

from typing import Any

from multiverso.shards.shard import Shard
from multiverso.spec.table import INITIAL, TableSpec
from multiverso.tables.convert import Array, as_whole, readable


def checked_value(init_value: Any, spec: TableSpec) -> Array | None:
    """Returns this worker's initial value as the table takes it, or None for zeros.

    Raises:
        ValueError: the table's spec says otherwise how the workers' values become one.
        ShapeMismatchError, DtypeMismatchError: the value does not fit.
    """
    if spec.initial not in INITIAL:
        raise ValueError(f"initial is one of {', '.join(INITIAL)}; got {spec.initial!r}")
    return None if init_value is None else as_whole(init_value, spec, "init_value")


def fill(value: Array | None, shard: Shard, last: bool, number: int) -> None:
    """Writes one worker's part of the initial value; the node lets one worker in after another, in their order.

    Args:
        value: what `checked_value` returned.
        shard: the table's memory.
        last: whether this worker is the last one.
        number: how many workers contribute.

    Raises:
        OverflowError: their mean cannot be taken, as their sum does not fit the dtype.
    """
    values, initial = shard.values(), shard.spec.initial
    if value is not None:
        if initial == "master":
            values[:] = readable(value)
        else:
            before = values.copy() if initial == "mean" and values.dtype.kind == "i" else values
            values += value
            if before is not values and (((before ^ values) & (value ^ values)) < 0).any():
                raise OverflowError(
                    f"initial='mean': the sum of the workers' values does not fit {values.dtype}; give the values from "
                    "one worker (initial='master'), or take a wider dtype"
                )
    if initial == "mean" and last:
        if values.dtype.kind == "f":
            values /= number
        else:
            values //= number
