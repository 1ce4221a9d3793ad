"""Plain memory that the workers of a job share under a name."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct


class SharedMemory(Struct, frozen=True):
    """Bytes that every worker of a job on this host sees; from ``Session.shared_memory``.

    Nothing guards them: users bring their own order (``multiverso.memory.mutex`` for locks,
    ``multiverso.memory.words`` for single words). The array keeps the memory mapped for as long as it lives, also
    after the session.

    Attributes:
        name: what the workers call it.
        number: its number in the job, below 0: waits name it by that.
        array: the bytes themselves: uint8, of shape (nbytes,), writable, at least on a 64-byte boundary (from one
            page on, on a page's). ``array[:8].view("int64")`` and the like show it in other dtypes.
    """

    name: str
    number: int
    array: npt.NDArray[np.uint8]

    @property
    def address(self) -> int:
        """Where it lies in this process."""
        return int(self.array.__array_interface__["data"][0])

    @property
    def addresses(self) -> range:
        """All addresses of it in this process."""
        return range(self.address, self.address + self.nbytes)

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self.array.nbytes

    def view(self, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Returns the whole of it as numbers of another dtype, flat; ``nbytes`` has to be a multiple of theirs."""
        return self.array.view(dtype)
