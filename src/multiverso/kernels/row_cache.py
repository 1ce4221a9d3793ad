"""A worker's copy of a matrix, of which it reads and changes a few rows between exchanges.

Rows lie all over memory, so each is sent for some rows before it is needed. What a kernel has found or done it notes
in ``counts`` in one step with it: no exception comes between.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,no-any-return"

from __future__ import annotations

from multiverso.compiling.atomics import prefetch
from multiverso.compiling.declaring import Data, Int, Words, inner, kernel

STALE, TOUCHED, PUSHING = 0, 1, 2  # words of ``counts``
_AHEAD = 16


@inner
def _send_for(matrix, row, columns):
    size = columns * matrix.itemsize
    start = matrix.ctypes.data + row * size
    for line in range(0, size, 64):
        prefetch(start + line)


@inner
def _each_row(local, last, columns, rows, beside, do):
    for k in range(rows.size):
        if k + _AHEAD < rows.size:
            _send_for(local, rows[k + _AHEAD], columns)
            _send_for(last, rows[k + _AHEAD], columns)
        lo = rows[k] * columns
        do(local[lo : lo + columns], last[lo : lo + columns], beside[k * columns : (k + 1) * columns])


@inner
def _differ(local, last, delta):
    for i in range(delta.size):
        value = local[i]
        delta[i] = value - last[i]
        last[i] = value


@inner
def _join(local, last, values):
    for i in range(values.size):
        value = values[i]
        local[i] = value + (local[i] - last[i])
        last[i] = value


@kernel
def note(
    ids: Words,
    fresh: Words,
    epoch: Int,
    dirty: Words,
    round: Int,
    touch: Int,
    stale: Words,
    touched: Words,
    counts: Words,
) -> None:
    """Lists each row of ``ids`` once.

    In ``stale`` those read for the first time in this epoch, in ``touched`` (with ``touch``) those for the first time
    in this round.
    """
    stale_rows, touched_rows = counts[STALE], counts[TOUCHED]
    for i in range(ids.size):
        row = ids[i]
        if fresh[row] != epoch:
            fresh[row] = epoch
            stale[stale_rows] = row
            stale_rows += 1
        if touch != 0 and dirty[row] != round:
            dirty[row] = round
            touched[touched_rows] = row
            touched_rows += 1
    counts[STALE], counts[TOUCHED] = stale_rows, touched_rows


@kernel
def take_differences(local: Data, last: Data, columns: Int, rows: Words, delta: Data, counts: Words) -> None:
    """``delta = local - last; last = local`` of some rows: what is to be pushed."""
    _each_row(local, last, columns, rows, delta, _differ)
    counts[PUSHING] = rows.size


@kernel
def take_values(local: Data, last: Data, columns: Int, rows: Words, values: Data, counts: Words) -> None:
    """Pulled rows: ``local = values + (local - last); last = values``."""
    _each_row(local, last, columns, rows, values, _join)
    counts[STALE] = 0
