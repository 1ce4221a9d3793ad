"""Whether kernels can take a caller's arrays as they are: most calls can, and many are small.

To ask NumPy for an array's dtype, shape and flags takes a third of a microsecond, as long as to add to 20 rows, so the
fields of the array objects themselves are looked at. They have the same places in NumPy 1 and 2.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,no-any-return"

from __future__ import annotations

from multiverso.compiling.atomics import load32, load64, object_head
from multiverso.compiling.declaring import Address, Int, Thing, inner, kernel

_PLAIN = 0x1 | 0x100 | 0x400  # C-contiguous, aligned, writable


@inner
def _is_plain(array, array_type, dtype, dimensions):
    """Whether an object is an array, and no subclass's, of a dtype, and plain memory."""
    fields = array + object_head()
    return (
        load64(fields - 8) == array_type
        and load64(fields + 40) == dtype
        and load32(fields + 8) == dimensions
        and load32(fields + 48) & _PLAIN == _PLAIN
    )


@kernel
def is_plain(array_type: Address, dtype: Address, size: Int, array: Thing) -> Int:
    """Returns whether an object is a flat array of ``size`` numbers that a kernel can take.

    Args:
        array_type: of NumPy's arrays: its address, ``id(numpy.ndarray)``.
        dtype: the object itself; another one that is equal to it has to be converted.
        size: how many numbers.
        array: anything.
    """
    return int(_is_plain(array, array_type, dtype, 1) and load64(load64(array + object_head() + 16)) == size)


@kernel
def are_plain_rows(
    array_type: Address, dtype: Address, int64: Address, columns: Int, row_ids: Thing, rows: Thing
) -> Int:
    """Returns whether two objects are ids of rows, and a matrix with a row for each, that a kernel can take.

    Args:
        array_type, dtype: see `is_plain`.
        int64: the dtype of ids, as ``dtype``.
        columns: of the matrix.
        row_ids, rows: anything.
    """
    if not (_is_plain(rows, array_type, dtype, 2) and _is_plain(row_ids, array_type, int64, 1)):
        return 0
    shape, ids_shape = load64(rows + object_head() + 16), load64(row_ids + object_head() + 16)
    return int(load64(shape) == load64(ids_shape) and load64(shape + 8) == columns)
