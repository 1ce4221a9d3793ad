"""Kernels that came compiled with the package: shared libraries, one for each level of processor. No LLVM, no Numba.

A wheel has them, a clone has none (``build_kernels.py`` beside pyproject.toml makes them). A group whose sources are no
longer those that its library was made of is not taken from there.
"""

from __future__ import annotations

import ctypes
import functools
import json
import platform
from collections.abc import Iterable
from pathlib import Path

from multiverso.compiling.functions import PYTHON_FACTS, PYTHON_FACTS_HERE, PythonFacts

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


def has(group: str, digest: str) -> bool:
    """Returns whether a group of kernels or loops is here, made of sources that have this digest."""
    return open_library()[1].get(group) == digest


def addresses_of(symbols: Iterable[str]) -> dict[str, int]:
    """Returns the address of each function of a group that is here."""
    library, _ = open_library()
    return {symbol: ctypes.cast(getattr(library, symbol), ctypes.c_void_p).value or 0 for symbol in symbols}


def level() -> str | None:
    """Returns the level of the library that this process takes kernels from, or None where it takes none."""
    library, _ = open_library()
    return None if library is None else Path(library._name).stem


@functools.cache
def open_library() -> tuple[ctypes.CDLL | None, dict[str, str]]:
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
