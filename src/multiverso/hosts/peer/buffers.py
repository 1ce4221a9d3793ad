"""Memory for frames, used again and again: a fresh megabyte costs more than what is done to it."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
_SMALLEST = 64


class Buffers:
    """Arrays of uint8 whose sizes are powers of two. Any thread may call it.

    Args:
        kept: how many of a size are kept when nobody has them.
    """

    def __init__(self, kept: int) -> None:
        self._most = kept
        # of each size; a list's append and pop are one step each, so that no lock is needed
        self._free: defaultdict[int, list[Array]] = defaultdict(list)

    def take(self, nbytes: int) -> Array:
        """Returns memory of at least so many bytes, with anything in it."""
        size = 1 << (nbytes - 1).bit_length() if nbytes > _SMALLEST else _SMALLEST
        try:
            return self._free[size].pop()
        except IndexError:
            return np.empty(size, np.uint8)

    def give(self, buffer: Array) -> None:
        """Takes memory back, whose holder has forgotten it."""
        kept = self._free[buffer.nbytes]
        if len(kept) < self._most:
            kept.append(buffer)


def view(buffer: Array, length: int) -> memoryview:
    """Returns the first bytes of a buffer as sockets take them."""
    return memoryview(buffer)[:length]  # type: ignore[arg-type]


def owner(body: memoryview) -> Array:
    """Returns the buffer that :func:`view` has shown."""
    base = body.obj
    assert isinstance(base, np.ndarray)
    return base
