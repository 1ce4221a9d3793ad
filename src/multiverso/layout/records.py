"""A record in shared memory: declared word by word, with the offsets that follow from it and its structured dtype."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

CACHE_LINE = 64


class Record:
    """Lays words out one after another and returns the offset of each, a plain number that kernels take as a constant.

    Args:
        size: its bytes; a declaration that does not fit is refused.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._end = 0
        self._fields: dict[str, tuple[npt.DTypeLike, int]] = {}
        self._dtype: np.dtype[Any] | None = None  # once it has been asked for

    def int32(self, name: str, count: int = 1, *, apart: bool = False) -> int:
        """Declares an int32, or ``count`` of them; ``apart`` begins a cache line (another writer's words)."""
        return self._add(name, "<i4", count, CACHE_LINE if apart else 4)

    def int64(self, name: str, count: int = 1, *, apart: bool = False) -> int:
        """Declares an int64, or ``count`` of them."""
        return self._add(name, "<i8", count, CACHE_LINE if apart else 8)

    def bytes(self, name: str, count: int) -> int:
        """Declares so many bytes of text or the like."""
        return self._add(name, f"V{count}", 1, 1)

    def float64(self, name: str, count: int = 1, *, apart: bool = False) -> int:
        """Declares a float64, or ``count`` of them."""
        return self._add(name, "<f8", count, CACHE_LINE if apart else 8)

    def mutex(self, name: str) -> int:
        """Declares a robust mutex, on a cache line of its own."""
        return self._add(name, "V64", 1, CACHE_LINE)

    def _add(self, name: str, kind: str, count: int, align: int) -> int:
        if name in self._fields:
            raise ValueError(f"{name} is declared twice")
        offset = -(-self._end // align) * align
        dtype = np.dtype((kind, (count,)) if count > 1 else kind)
        self._end = offset + dtype.itemsize
        if self._end > self.size:
            raise ValueError(f"{name} ends at byte {self._end} of a record of {self.size}")
        self._fields[name] = (dtype, offset)
        self._dtype = None
        return offset

    @property
    def offsets(self) -> dict[str, int]:
        """Where each word begins."""
        return {name: offset for name, (_, offset) in self._fields.items()}

    @property
    def dtype(self) -> np.dtype[Any]:
        """The record as a structured dtype."""
        if self._dtype is None:
            self._dtype = np.dtype(
                {
                    "names": list(self._fields),
                    "formats": [dtype for dtype, _ in self._fields.values()],
                    "offsets": [offset for _, offset in self._fields.values()],
                    "itemsize": self.size,
                }
            )
        return self._dtype

    def at(self, address: int) -> Any:
        """Returns the record at an address: ``record["name"]`` reads and writes the memory itself.

        For words that are written once, or that have one writer: nothing here is atomic.
        """
        memory: Any = (ctypes.c_char * self.size).from_address(address)
        return np.frombuffer(memory, self.dtype)[0]
