"""Links object code into this process, without Numba."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import llvmlite.binding as llvm

from multiverso.compiling.functions import PYTHON_FACTS_HERE
from multiverso.compiling.object_code import PYTHON_FACTS
from multiverso.turns import uninterrupted

_kept: list[object] = []  # code lives as long as the process


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
        raise RuntimeError(f"no functions {[name for name in names if not addresses[name]]} in the object code")
    return addresses


def _provide(needed: Sequence[str]) -> None:
    """Tells LLVM where the functions of libc and of Python are that the code names."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    libc = ctypes.CDLL(None)
    for name in needed:
        if name == PYTHON_FACTS:
            address: int | None = ctypes.addressof(PYTHON_FACTS_HERE)
        else:
            home: Any = ctypes.pythonapi if name.startswith("Py") else libc
            address = ctypes.cast(getattr(home, name), ctypes.c_void_p).value
        assert address is not None
        llvm.add_symbol(name, address)
