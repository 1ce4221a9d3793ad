"""The array that a read fills and the one its caller gets: often the same, else a copy in another dtype or place."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from multiverso.errors import DtypeMismatchError, ShapeMismatchError
from multiverso.tables.convert import Array, is_tensor, writable

_SIXTEEN_BITS = ("float16", "bfloat16")


class Output(Struct, frozen=True):
    """The destination of a read.

    Attributes:
        flat: what a kernel fills, in the table's dtype.
        give: makes of it what the caller gets; called once it is filled.
    """

    flat: Array
    give: Callable[[], Any]


def fresh(shape: tuple[int, ...], dtype: np.dtype[Any], wanted: npt.DTypeLike | None) -> Output:
    """A new array, in the table's dtype or in a 16-bit one.

    Raises:
        DtypeMismatchError: another dtype is wanted.
    """
    flat = np.empty(math.prod(shape), dtype)
    if wanted is None:
        return Output(flat, lambda: flat.reshape(shape))
    if _name(wanted) not in (*_SIXTEEN_BITS, dtype.name):
        raise DtypeMismatchError(f"get(dtype=) is the table's {dtype}, float16 or bfloat16; got {wanted!r}")
    result = _numpy_dtype(wanted)
    return Output(flat, lambda: flat.reshape(shape).astype(result))


def into(out: Any, shape: tuple[int, ...], dtype: np.dtype[Any], any_shape: bool) -> Output:
    """The caller's array or tensor.

    Args:
        out: a writable NumPy array of the table's dtype or 16-bit floats, or a torch tensor on any device.
        shape: of the result; a flat ``out`` of the same size is as good.
        dtype: the table's.
        any_shape: whether any other shape of the same size is as good, too (array tables).

    Raises:
        ShapeMismatchError, DtypeMismatchError: it does not fit.
    """
    tensor = is_tensor(out)
    if not tensor and not isinstance(out, np.ndarray):
        raise DtypeMismatchError(f"out must be a NumPy array or a torch tensor; got {type(out).__name__}")
    size = math.prod(shape)
    given = tuple(out.shape)
    if given not in (shape, (size,)) and not (any_shape and math.prod(given) == size):
        raise ShapeMismatchError(f"out has shape {given}; expected {shape}, or {size} flat")
    if tensor and (out.device.type != "cpu" or not out.is_contiguous() or str(out.dtype) == "torch.bfloat16"):
        flat = np.empty(size, dtype)
        return Output(flat, lambda: _into_tensor(out, flat))
    if not tensor and out.dtype.name in _SIXTEEN_BITS and dtype.kind == "f":
        if not out.flags.writeable:
            raise DtypeMismatchError("out is written to, but it is read-only")
        flat = np.empty(size, dtype)
        return Output(flat, lambda: _into_array(out, flat))
    return Output(writable(out, size, dtype, "out"), lambda: out)


def _into_tensor(out: Any, flat: Array) -> Any:
    import torch

    out.detach().copy_(torch.from_numpy(flat.reshape(tuple(out.shape))))
    return out


def _into_array(out: Array, flat: Array) -> Array:
    out[...] = flat.reshape(out.shape)
    return out


def _name(dtype: Any) -> str:
    """A dtype's name, bfloat16's too, which NumPy does not know."""
    return "bfloat16" if str(dtype) == "bfloat16" else str(np.dtype(dtype).name)


def _numpy_dtype(dtype: Any) -> np.dtype[Any]:
    if _name(dtype) != "bfloat16":
        plain: np.dtype[Any] = np.dtype(dtype)
        return plain
    try:
        import ml_dtypes
    except ImportError as error:
        raise DtypeMismatchError("bfloat16 arrays need ml-dtypes: pip install ml-dtypes") from error
    brain: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return brain
