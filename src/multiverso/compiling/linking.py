"""Links object code into this process and makes functions of it, without Numba."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import llvmlite.binding as llvm
import numpy as np

from multiverso.compiling.object_code import NDARRAY
from multiverso.turns import uninterrupted

_METH_FASTCALL = 0x80
_kept: list[object] = []  # code and descriptions of functions live as long as the process


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


def link(content: bytes, needed: Sequence[str], names: Sequence[str]) -> dict[str, int]:
    """Loads object code and returns the address of each of its functions.

    It is done in a thread, where no signal's handler runs: llvmlite frees memory twice if an exception comes between
    its freeing something and its noting that. The caller may be interrupted meanwhile; the thread ends by itself.

    Raises:
        RuntimeError, OSError: it cannot be linked.
    """
    return uninterrupted(lambda: _link(content, needed, names))


def _link(content: bytes, needed: Sequence[str], names: Sequence[str]) -> dict[str, int]:
    _provide(needed)
    machine = llvm.Target.from_default_triple().create_target_machine(jit=True)
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
    engine.add_object_file(llvm.ObjectFileRef.from_data(content))
    engine.finalize_object()
    _kept.append(engine)
    addresses = {name: engine.get_function_address(name) for name in names}
    if not all(addresses.values()):
        raise RuntimeError(
            f"no functions {[name for name in names if not addresses[name]]} in the object code"
        )
    return addresses


def _provide(needed: Sequence[str]) -> None:
    """Tells LLVM where the functions of libc and of Python are that the code names."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    libc = ctypes.CDLL(None)
    for name in needed:
        if name == NDARRAY:
            address: int | None = id(np.ndarray)
        else:
            home: Any = ctypes.pythonapi if name.startswith("Py") else libc
            address = ctypes.cast(getattr(home, name), ctypes.c_void_p).value
        assert address is not None
        llvm.add_symbol(name, address)


def callable_at(name: str, address: int) -> Callable[..., Any]:
    """Makes a function of Python of compiled code that takes its arguments as CPython passes them."""
    definition = _MethodDef(name.encode(), address, _METH_FASTCALL, None)
    _kept.append(definition)
    function: Callable[..., Any] = _new_function(ctypes.addressof(definition), None, None)
    return function
