"""Many arrays of a model as few flat buffers: one for each dtype and kind, one for each matrix exchanged by rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from multiverso.params.flats import Flat
from multiverso.params.rows import RowExchange
from multiverso.params.values import shared_dtype

Array = NDArray[Any]


@dataclass(frozen=True)
class Packed:
    """A model's arrays in the buffers that are exchanged.

    Attributes:
        views: one for each array, of its shape, in float32 or float64: a part of a buffer.
        flats: the buffers beside their tables, in the order in which they are exchanged.
        members: of each, the numbers of the arrays that are in it, in their order.
    """

    views: list[Array]
    flats: list[Flat | RowExchange]
    members: list[list[int]]

    def centre(self) -> list[Array]:
        """Returns copies of the shared arrays as they are now, in the views' order, shapes and dtypes."""
        out = [view.copy() for view in self.views]
        for flat, members in zip(self.flats, self.members, strict=True):
            values, start = flat.table.snapshot().reshape(-1), 0
            for index in members:
                out[index][...] = values[start : start + out[index].size].reshape(out[index].shape)
                start += out[index].size
        return out


def pack(
    given: Sequence[tuple[Array, bool]],
    in_rows: range,
    allocate: Callable[[int, np.dtype[Any]], Array],
    share_flat: Callable[[Array, bool], Flat],
    share_rows: Callable[[int, Array], RowExchange],
) -> Packed:
    """Copies arrays into flat buffers and makes their tables: first by dtype and kind, then the matrices.

    Args:
        given: each array, and whether it is averaged.
        in_rows: the numbers of the matrices that are exchanged by rows.
        allocate: makes a buffer, given its size and dtype.
        share_flat: makes a buffer's table; called with whether it is averaged. The same order in every worker.
        share_rows: makes a matrix's, given its number and the matrix.
    """
    groups: dict[tuple[bool, np.dtype[Any]], list[int]] = {}
    for index, (array, averaged) in enumerate(given):
        if index not in in_rows:
            groups.setdefault((averaged, shared_dtype(array.dtype)), []).append(index)
    packed = Packed([np.empty(0)] * len(given), [], [])
    for (averaged, dtype), members in sorted(groups.items(), key=str):
        flat = allocate(sum(given[index][0].size for index in members), dtype)
        start = 0
        for index in members:
            array = given[index][0]
            packed.views[index] = flat[start : start + array.size].reshape(array.shape)
            packed.views[index][...] = array
            start += array.size
        if flat.size:
            packed.flats.append(share_flat(flat, averaged))
            packed.members.append(members)
    for index in in_rows:
        array = given[index][0]
        packed.views[index] = allocate(array.size, array.dtype).reshape(array.shape)
        packed.views[index][...] = array
        packed.flats.append(share_rows(index, packed.views[index]))
        packed.members.append([index])
    return packed
