"""How a difference is coded in a frame. What a format leaves out stays in V - S and goes with the next frame."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from multiverso.errors import StartupError

Array = npt.NDArray[Any]

NATIVE = 0
NAMES = {"native": NATIVE}


def number_of(name: str, dtype: npt.DTypeLike) -> int:
    """Returns the number of a wire format for tables of a dtype; integers always travel as they are.

    Raises:
        StartupError: there is no such format.
    """
    if name not in NAMES:
        raise StartupError(f"wire is one of {', '.join(NAMES)}; got {name!r}")
    return NAMES[name] if np.dtype(dtype).kind == "f" else NATIVE


def longest(wire: int, size: int, itemsize: int) -> int:
    """Returns the most bytes that so many numbers take, or -1 for a format that nobody knows."""
    return size * itemsize if wire == NATIVE else -1


def fits(wire: int, length: int, size: int, itemsize: int) -> bool:
    """Whether a body of so many bytes can be a coded difference of so many numbers."""
    return length in (0, size * itemsize) if wire == NATIVE else False


def encode(wire: int, frame: Array, coded: Array) -> int:
    """Codes a difference and makes it what the other side will read; returns the bytes, 0 if nothing is left.

    Args:
        wire: the format, not NATIVE.
        frame: the difference; afterwards what is sent of it.
        coded: uint8, of at least ``longest`` bytes.
    """
    raise NotImplementedError


def decode(wire: int, coded: Array, frame: Array) -> None:
    """Writes what was coded into ``frame``.

    Raises:
        ValueError: it is no coded difference of so many numbers.
    """
    raise NotImplementedError
