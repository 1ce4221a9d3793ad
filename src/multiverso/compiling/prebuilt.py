"""Kernels that came compiled with the package: shared libraries, one for each level of processor. No LLVM, no Numba.

A wheel has them, a clone has none (``build_kernels.py`` beside pyproject.toml makes them). A group whose sources are no
longer those that its library was made of is not taken from there.
"""

from __future__ import annotations

import ctypes
import functools
import json
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from multiverso.compiling.functions import PYTHON_FACTS_HERE, PythonFacts
from multiverso.compiling.object_code import PYTHON_FACTS, group_of
from multiverso.compiling.sources import digest_of

FOLDER = Path(__file__).parent / "libraries"
MANIFEST = "manifest.json"
# The best first, with what each needs, in the words of /proc/cpuinfo: the x86-64 psABI's levels; and Armv8.1, which
# changes a word atomically in one instruction.
_V2 = {"cx16", "lahf_lm", "popcnt", "pni", "sse4_1", "sse4_2", "ssse3"}
_V3 = {*_V2, "abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "xsave"}
_V4 = {*_V3, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
LEVELS: dict[str, dict[str, set[str]]] = {
    "x86_64": {"x86-64-v4": _V4, "x86-64-v3": _V3, "x86-64-v2": _V2},
    "aarch64": {"armv8.1a": {"atomics"}, "armv8a": set()},
}


def addresses_of(name: str, dtype: str | None, sources: Sequence[Path]) -> dict[str, int] | None:
    """Returns the address of each kernel or loop of a module, or None where they have to be compiled.

    Args:
        name: the module.
        dtype: for tables of this dtype, or None for what needs none.
        sources: what they are made of, see ``on_demand.sources_behind``.
    """
    library, groups = open_library()
    group = group_of(name, dtype)
    made = groups.get(group)
    if library is None or made is None or made["digest"] != digest_of(sources):
        return None
    return {short: _address(library, f"{group}.{short}") for short in made["names"]}


def level() -> str | None:
    """Returns the level of the library that this process takes kernels from, or None where it takes none."""
    library, _ = open_library()
    return None if library is None else Path(library._name).stem


@functools.cache
def open_library() -> tuple[ctypes.CDLL | None, dict[str, Any]]:
    """Opens the best library that this processor can run, and reads what is in it."""
    try:
        manifest = json.loads((FOLDER / MANIFEST).read_text())
        if manifest["machine"] != platform.machine():
            return None, {}
        flags = processor_flags()
        best = next(name for name, needed in LEVELS[manifest["machine"]].items() if needed <= flags)
        library = ctypes.CDLL(str(FOLDER / f"{best}.so"))
        PythonFacts.in_dll(library, PYTHON_FACTS)[:] = list(PYTHON_FACTS_HERE)
    except (OSError, ValueError, KeyError, StopIteration):  # none here, or none for this machine or its libc
        return None, {}
    return library, manifest["groups"]


def processor_flags() -> set[str]:
    """Returns what this processor can do, in the kernel's words."""
    with open("/proc/cpuinfo", encoding="latin-1") as file:  # a line for each core, of which the first tells
        return next((set(line.split()) for line in file if line.startswith(("flags", "Features"))), set())


def _address(library: ctypes.CDLL, symbol: str) -> int:
    return ctypes.cast(library[symbol], ctypes.c_void_p).value or 0
