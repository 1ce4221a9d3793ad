"""The limit of adding rows: the same loop on a private matrix, with no lock."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

from __future__ import annotations

from numba import njit


@njit(nogil=True)
def _add_row(row, part):
    for i in range(row.size):
        row[i] += part[i]


def scatter_add(matrix, ids, delta):
    """Adds each row of ``delta`` to the row of ``matrix`` that ``ids`` names."""
    for i in range(ids.size):
        _add_row(matrix[ids[i]], delta[i])
