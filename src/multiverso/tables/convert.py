"""What users hand in, as flat arrays that a kernel can read; refused with a clear message before anything changes."""

from __future__ import annotations

import math
import sys
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from multiverso.errors import DtypeMismatchError, RowIdError, ShapeMismatchError
from multiverso.spec.table import TableSpec

Array = npt.NDArray[Any]
INT64 = np.dtype(np.int64)
Out = TypeVar("Out")  # what a caller gives to be written to, and gets back


def is_tensor(value: Any) -> bool:
    """Returns whether it is a torch tensor, asked without importing torch."""
    return type(value).__module__.partition(".")[0] == "torch" or (
        hasattr(value, "detach") and hasattr(value, "data_ptr")
    )


def as_numpy(value: Any, what: str) -> Array:
    """Returns anything array-like as an array, without a copy where that is possible.

    Torch tensors are detached and fetched from their device; 16-bit floats NumPy does not know become float32.

    Raises:
        ShapeMismatchError: a ragged sequence.
        DtypeMismatchError: no numbers.
    """
    if type(value) is np.ndarray and value.dtype.isbuiltin == 1:  # the most frequent first, and quickly
        return value
    masked = sys.modules.get("numpy.ma")  # to ask np.ma imports it: 15 ms of each start, for what few have
    kind = getattr(masked, "MaskedArray", None)  # none yet while another thread imports it
    if masked is not None and kind is not None and isinstance(value, kind) and masked.is_masked(value):
        raise DtypeMismatchError(
            f"{what} has masked elements, which no table can hold: give {what}.filled(0), or another value for them"
        )
    if isinstance(value, np.ndarray):
        array = np.asarray(value)  # of a np.matrix, whose shapes are always two-dimensional, the array itself
    elif is_tensor(value):
        tensor = value.detach().cpu()
        array = (tensor.float() if str(tensor.dtype) == "torch.bfloat16" else tensor).numpy()
    elif hasattr(value, "__dlpack__") and not hasattr(value, "__array__"):
        array = np.from_dlpack(value)
    else:
        try:
            array = np.asarray(value)
        except (ValueError, TypeError, Warning) as error:
            raise ShapeMismatchError(f"{what} cannot become an array of numbers: {error}") from error
        if array.dtype.kind == "O" and any(isinstance(row, list | tuple | np.ndarray) for row in array.flat):
            # what NumPy before 1.24 makes of it
            raise ShapeMismatchError(f"{what} cannot become an array of numbers: its rows differ in length")
    if array.dtype.isbuiltin == 1:  # NumPy's own: to ask for a dtype's name takes a microsecond
        return array
    return array.astype(np.float32) if array.dtype.name == "bfloat16" else array


def as_data(value: Any, dtype: np.dtype[Any], what: str) -> Array:
    """Returns data as a flat C-contiguous array of a table's dtype; a copy only where it has to be.

    Raises:
        DtypeMismatchError: not of the same kind (float for an integer table, complex, text), or finite values
            that the table's dtype cannot hold.
    """
    array = as_numpy(value, what)
    if array.dtype != dtype:
        array = _cast(array, dtype, what)
    if not array.flags.c_contiguous or not array.flags.aligned:
        array = np.array(array, order="C")
    return readable(array if array.ndim == 1 else array.reshape(-1))


def readable(array: Array) -> Array:
    """Returns the array itself, or a writable alias of it: kernels are compiled for writable arrays.

    The caller keeps the array alive and does not write to the alias.
    """
    if array.flags.writeable:
        return array
    if array.size == 0:
        return np.empty(0, array.dtype)
    alias = _Memory(array)
    return np.asarray(alias)


class _Memory:
    """The memory of a read-only array, as a writable one that keeps it alive."""

    def __init__(self, array: Array) -> None:
        interface = array.__array_interface__
        self._kept = array
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}


def _cast(array: Array, dtype: np.dtype[Any], what: str) -> Array:
    """Rounds to the table's dtype. A float16 becomes float32 or float64 here; a bfloat16 has become float32 before."""
    kind = array.dtype.kind
    if kind not in "biuf" or (kind == "f" and dtype.kind != "f"):
        raise DtypeMismatchError(
            f"{what} is {array.dtype}, the table is {dtype}: "
            + ("round it yourself, or create a float table" if kind == "f" else "only real numbers can go in")
        )
    if dtype.kind == "i" and array.size:
        limits = np.iinfo(dtype)
        low, high = int(array.min()), int(array.max())
        if low < limits.min or high > limits.max:
            raise DtypeMismatchError(
                f"{what} holds {low if low < limits.min else high}, too large for a table of {dtype}"
            )
    if dtype.kind == "f" and kind == "f" and array.dtype.itemsize > dtype.itemsize:
        with np.errstate(over="ignore"):
            result = array.astype(dtype)
        bad = np.isinf(result) & np.isfinite(array)
        if bad.any():
            worst = array[bad].flat[0]
            raise DtypeMismatchError(f"{what} holds {worst!r}, too large for a table of {dtype}")
        return result
    return array.astype(dtype)


def as_shaped(
    value: Any, shape: tuple[int, ...], dtype: np.dtype[Any], what: str, kind: str, any_shape: bool = False
) -> Array:
    """Returns data as `as_data` does; one number stands for all.

    Args:
        value: the data: of this shape, or flat, so that a transposed matrix is found out.
        shape, dtype: the table's, or those of some rows.
        what: the data, in words.
        kind: the kind of table, in words.
        any_shape: whether any other shape of the same size is as good.

    Raises:
        ShapeMismatchError, DtypeMismatchError: they do not fit.
    """
    array = as_numpy(value, what)
    if array.ndim == 0:
        array = np.full(shape, array)
    if array.shape != shape and (array.size != math.prod(shape) or not (any_shape or array.ndim == 1)):
        expected = f"shape {shape}" + ("" if any_shape else f", or {math.prod(shape)} numbers flat")
        raise ShapeMismatchError(f"{what} has shape {array.shape}; this {kind} table expects {expected}")
    return as_data(array, dtype, what)


def as_whole(value: Any, spec: TableSpec, what: str) -> Array:
    """Returns data for a whole table, flat, of its dtype: of any shape for an array; one number stands for all.

    Raises:
        ShapeMismatchError, DtypeMismatchError: they do not fit.
    """
    return as_shaped(value, spec.shape, np.dtype(spec.dtype), what, spec.kind, not spec.is_matrix)


def as_row_ids(row_ids: Any, rows: int) -> npt.NDArray[np.int64]:
    """Returns row ids as int64. Duplicates and any order are fine; their range is checked by the kernel.

    Raises:
        RowIdError: not one-dimensional, not integers.
    """
    if (
        type(row_ids) is np.ndarray
        and row_ids.dtype is INT64  # another object that is equal to it is converted below
        and row_ids.ndim == 1
        and row_ids.flags.carray
    ):
        return row_ids
    try:
        array = as_numpy(row_ids, "row_ids")
    except ValueError as error:
        raise RowIdError(f"row_ids must be a one-dimensional sequence of integers: {error}") from error
    if array.size == 0 and array.ndim == 1:
        return np.empty(0, np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        hint = "; an array to be filled is given by name, out=" if array.ndim > 1 and array.dtype.kind == "f" else ""
        raise RowIdError(
            f"row_ids must be a one-dimensional sequence of integers; got {array.dtype} of shape {array.shape}{hint}"
        )
    if array.dtype == np.uint64 and array.max() >= 2**63:
        raise RowIdError(f"row id {array.max()} is not in 0 .. {rows - 1}")
    return as_int64(array)


def as_int64(integers: Array) -> npt.NDArray[np.int64]:
    """Returns integers in their shape, as a kernel can read them; a copy only where it has to be."""
    numbers = np.ascontiguousarray(integers, dtype=np.int64)
    return readable(numbers if numbers.flags.aligned else numbers.copy()).reshape(integers.shape)


def writable(array: Any, size: int, dtype: np.dtype[Any], what: str) -> Array:
    """Returns an argument that is written to, flat and without a copy.

    Raises:
        ShapeMismatchError: another size, or not C-contiguous.
        DtypeMismatchError: another dtype, read-only, or not an array in this process's memory.
    """
    if is_tensor(array) and array.device.type == "cpu" and str(array.dtype) != "torch.bfloat16":
        array = array.detach().numpy()
    if not isinstance(array, np.ndarray):
        raise DtypeMismatchError(
            f"{what} is written to, so it must be a NumPy array or a torch CPU tensor; got {type(array)}"
        )
    if array.dtype != dtype:
        raise DtypeMismatchError(f"{what} is written to, so it must have the table's dtype {dtype}; got {array.dtype}")
    if array.size != size:
        raise ShapeMismatchError(f"{what} has {array.size} numbers; the table has {size}")
    if not array.flags.writeable:
        raise DtypeMismatchError(f"{what} is written to, but it is read-only; pass a copy")
    if not array.flags.c_contiguous or not array.flags.aligned:
        raise ShapeMismatchError(f"{what} is written to in place, so it must be C-contiguous and aligned")
    return array if array.ndim == 1 else array.reshape(-1)


def refuse_overlap(local: Array, last: Array) -> tuple[Array, Array]:
    """Returns the two arrays of an exchange; raises ShapeMismatchError where they share memory."""
    # two arrays that own their memory cannot share it, and asking takes as long as the check of both
    if local is last or ((local.base is not None or last.base is not None) and np.may_share_memory(local, last)):
        raise ShapeMismatchError("local and last share memory; they must be two arrays (last = local.copy())")
    return local, last
