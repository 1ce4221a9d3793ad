"""How a kernel is called from Python: what the function is made of that `compiler` generates for each.

The fields of an array object have the same places in NumPy 1 and 2, after the head of any object.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import carray, int32, int64, njit, types, uintp
from numba.core import cgutils

from multiverso.compiling.functions import PYTHON_FACTS
from multiverso.compiling.native import external, global_at, instruction, loaded, object_head, pointer_at

__all__ = ["carray", "int32", "object_head", "pointer_at", "uintp"]  # that what is generated names, too

_CONTIGUOUS_AND_ALIGNED = 0x101
_SWAPPED = ord(">")
_inline = njit(nogil=True, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)

PyLong_AsLongLong = external("PyLong_AsLongLong", int64, int64)
PyLong_FromLongLong = external("PyLong_FromLongLong", int64, int64)
Py_BuildValue = external("Py_BuildValue", int64, int64)
PyErr_Occurred = external("PyErr_Occurred", int64)
PyEval_SaveThread = external("PyEval_SaveThread", int64)
PyEval_RestoreThread = external("PyEval_RestoreThread", types.void, int64)
_PyErr_SetString = external("PyErr_SetString", types.void, int64, int64)
_PyType_IsSubtype = external("PyType_IsSubtype", int32, int64, int64)
_type_error, _array_type = global_at("PyExc_TypeError"), global_at(PYTHON_FACTS)

word, _half = loaded(ir.IntType(64), int64), loaded(ir.IntType(32), int32)
_byte = loaded(ir.IntType(8), types.uint8)


def text(content: str) -> Any:
    """Returns what kernels call for the address of a text."""
    data = bytearray(content.encode() + b"\0")

    def emit(builder):
        constant = ir.Constant(ir.ArrayType(ir.IntType(8), len(data)), data)
        return builder.ptrtoint(cgutils.global_constant(builder, "text", constant), ir.IntType(64))

    return instruction(int64(), emit)


@_inline
def refuse(message):
    """Raises TypeError."""
    _PyErr_SetString(word(_type_error()), message)
    return 0


@_inline
def size_of(array, number, other, most_dimensions):
    """Returns how many numbers an array has, and -1 of what a kernel cannot take.

    Args:
        array: the address of any object.
        number, other: what NumPy calls the dtype that it has to have; it may have two names.
        most_dimensions: of at least 1.
    """
    fields = array + object_head()
    kind = word(fields - 8)
    if kind != word(_array_type()) and _PyType_IsSubtype(kind, word(_array_type())) == 0:
        return -1
    dimensions, description = _half(fields + 8), word(fields + 40) + object_head()
    if dimensions < 1 or dimensions > most_dimensions:
        return -1
    if _half(fields + 48) & _CONTIGUOUS_AND_ALIGNED != _CONTIGUOUS_AND_ALIGNED or _byte(description + 10) == _SWAPPED:
        return -1
    if _half(description + 12) != number and _half(description + 12) != other:
        return -1
    shape = word(fields + 16)
    return word(shape) if dimensions == 1 else word(shape) * word(shape + 8)
