"""Links object code into this process, without Numba."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Any

import llvmlite.binding as llvm

from multiverso.compiling.functions import PYTHON_FACTS, PYTHON_FACTS_HERE

PYTHON = {
    *("PyLong_AsLongLong", "PyLong_FromLongLong", "Py_BuildValue", "PyType_IsSubtype", "PyExc_TypeError"),
    *("PyErr_Occurred", "PyErr_SetString", "PyEval_SaveThread", "PyEval_RestoreThread"),
}
LIBC = {
    *("syscall", "__errno_location", "clock_gettime", "sched_yield", "memcpy", "memset", "memmove"),
    *("sqrt", "sqrtf"),  # declared beside the instruction, which is what runs
}
KNOWN = {PYTHON_FACTS, *PYTHON, *LIBC}
"""All that object code may ask for."""

_kept: list[object] = []  # code lives as long as the process


def link(content: bytes, names: Iterable[str]) -> dict[str, int]:
    """Loads object code and returns the address of each of its functions.

    Not where a signal's handler may run: llvmlite frees memory twice if an exception comes between its freeing
    something and its noting that.

    Raises:
        RuntimeError, OSError: it cannot be linked.
    """
    provide()
    machine = llvm.Target.from_default_triple().create_target_machine(jit=True)
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
    engine.add_object_file(llvm.ObjectFileRef.from_data(content))
    engine.finalize_object()
    _kept.append(engine)
    addresses = {name: engine.get_function_address(name) for name in names}
    if not all(addresses.values()):
        raise RuntimeError(f"no functions {[name for name in names if not addresses[name]]} in the object code")
    return addresses


def provide() -> None:
    """Tells LLVM where the functions of libc and of Python are that object code names."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    llvm.add_symbol(PYTHON_FACTS, ctypes.addressof(PYTHON_FACTS_HERE))
    homes: list[tuple[Any, set[str]]] = [(ctypes.pythonapi, PYTHON), (ctypes.CDLL(None), LIBC)]
    for home, names in homes:
        for name in names:
            llvm.add_symbol(name, ctypes.cast(getattr(home, name), ctypes.c_void_p).value)
