"""Makes functions of Python of compiled code, wherever that comes from: no LLVM, no Numba."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np

PYTHON_FACTS = "multiverso.python"
"""The name of two numbers that compiled code asks for: the address of the type of NumPy's arrays, and the size of the
head of an object, which is larger in a Python without the GIL."""
PythonFacts = ctypes.c_int64 * 2
PYTHON_FACTS_HERE = PythonFacts(id(np.ndarray), object.__basicsize__)

_METH_FASTCALL = 0x80
_kept: list[object] = []  # descriptions of functions live as long as the process


class _MethodDef(ctypes.Structure):
    """CPython's ``PyMethodDef``."""

    _fields_ = [
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    ]


_new_function = ctypes.pythonapi.PyCFunction_NewEx
_new_function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
_new_function.restype = ctypes.py_object


def callable_at(name: str, address: int) -> Callable[..., Any]:
    """Makes a function of Python of compiled code that takes its arguments as CPython passes them."""
    definition = _MethodDef(name.encode(), address, _METH_FASTCALL, None)
    _kept.append(definition)
    function: Callable[..., Any] = _new_function(ctypes.addressof(definition), None, None)
    return function
