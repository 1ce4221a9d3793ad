"""Values on their way between a table and a GPU."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from multiverso.saying import say

Array = np.ndarray[Any, Any]


class Staging:
    """Pinned memory that is kept from one call to the next: fresh memory costs more than both copies. Any thread.

    It grows to the largest call's size and goes with this object. Where none can be pinned, ordinary memory is taken.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._memory: torch.Tensor | None = None

    def bring(self, read: Callable[[Array], Any], count: int, dtype: np.dtype[Any], device: torch.device) -> Any:
        """Returns a flat tensor on the device with what ``read`` writes into an array of so many numbers."""
        with self._lock:
            host = self._array(count, dtype)
            read(host)
            return torch.from_numpy(host).to(device)

    def send(self, tensor: Any, dtype: np.dtype[Any], write: Callable[[Array], Any]) -> None:
        """Gives ``write`` a flat array with a tensor's numbers; it must not keep it."""
        with self._lock:
            host = self._array(tensor.numel(), dtype)
            torch.from_numpy(host).copy_(tensor.detach().reshape(-1))
            write(host)

    def _array(self, count: int, dtype: np.dtype[Any]) -> Array:
        nbytes = count * dtype.itemsize
        if self._memory is None or self._memory.numel() < nbytes:
            self._memory = None  # two would not fit where one does
            self._memory = _pinned(nbytes)
        array: Array = self._memory[:nbytes].numpy().view(dtype)
        return array


def _pinned(nbytes: int) -> torch.Tensor:
    try:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        say(f"no {nbytes:,} bytes could be pinned for the way to the GPU, so it is slower: {error}")
        return torch.empty(nbytes, dtype=torch.uint8)
