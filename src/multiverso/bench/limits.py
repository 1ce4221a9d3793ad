"""The limits of what tables do: the same loops on private memory, with no lock."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"

from __future__ import annotations

from multiverso.kernels import dense
from multiverso.kernels.declaring import Data, Int, Words, kernel


@kernel
def exchange(table: Data, local: Data, last: Data) -> None:
    """What an exchange computes."""
    dense.push_pull(table, local, last)


@kernel
def scatter_add(matrix: Data, columns: Int, ids: Words, delta: Data) -> None:
    """Adds each row of ``delta`` to the row of ``matrix`` that ``ids`` names."""
    for i in range(ids.size):
        row = ids[i] * columns
        dense.add_into(matrix[row : row + columns], delta[i * columns : (i + 1) * columns])
