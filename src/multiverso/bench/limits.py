"""The limits of what tables do: the same loops on private memory, with no lock."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"

from __future__ import annotations

import numpy as np

from multiverso.compiling.atomics import prefetch_to_write
from multiverso.compiling.declaring import Data, Int, Words, kernel
from multiverso.kernels.dense import add_into, push_pull

_AHEAD = 16


@kernel
def exchange(table: Data, local: Data, last: Data) -> None:
    """What an exchange computes."""
    push_pull(table, local, last)


@kernel
def scatter_add(matrix: Data, columns: Int, ids: Words, delta: Data) -> None:
    """Adds each row of ``delta`` to the row of ``matrix`` that ``ids`` names."""
    for i in range(ids.size):
        row = ids[i] * columns
        add_into(matrix[row : row + columns], delta[i * columns : (i + 1) * columns])


@kernel
def scatter_add_ahead(matrix: Data, columns: Int, ids: Words, delta: Data) -> None:
    """The same, with rows on their way from memory 16 ahead: what a private table can do at best."""
    start, size = np.int64(matrix.ctypes.data), columns * matrix.itemsize
    for i in range(ids.size):
        if i + _AHEAD < ids.size:
            for line in range(0, size, 64):
                prefetch_to_write(start + ids[i + _AHEAD] * size + line)
        row = ids[i] * columns
        add_into(matrix[row : row + columns], delta[i * columns : (i + 1) * columns])
