"""Limits the cost of frames: memory is reused, and a node takes little processor time from its workers.

A fresh megabyte costs more than what is done to it.
"""

from __future__ import annotations

import math
import threading
import time
from collections import defaultdict
from typing import Any

import numpy as np
import numpy.typing as npt

from multiverso.errors import StartupError

Array = npt.NDArray[Any]
_SMALLEST = 64


class Buffers:
    """Arrays of uint8 whose sizes are powers of two. Any thread may call it.

    Args:
        kept: how many of a size are kept while unused.
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
    """Returns the buffer that `view` has shown."""
    base = body.obj
    assert isinstance(base, np.ndarray)
    return base


SHARE = 0.2
_BURST_SECONDS = 0.02
# what is owed after one large step; more is forgotten, or a stall would look like work
_DEEPEST_SECONDS = 0.2


class Pace:
    """A node's budget of processor time, for all its links together. Any thread may call it.

    Args:
        share: of one core, lately; 0 for no limit.
    """

    def __init__(self, share: float = SHARE) -> None:
        if not (isinstance(share, (int, float)) and 0 <= share <= 64):
            raise StartupError(f"share is a part of a core, 0 for no limit; got {share!r}")
        self.share = float(share)
        self._credit = _BURST_SECONDS
        self._at = -math.inf
        self._lock = threading.Lock()

    def wait(self, now: float) -> float:
        """Returns the seconds until the next frame may begin: 0 for at once."""
        if not self.share:
            return 0.0
        with self._lock:
            self._refill(now)
            return 0.0 if self._credit > 0 else -self._credit / self.share + 1e-4

    def spent(self, now: float, seconds: float) -> None:
        """Counts what was just used."""
        with self._lock:
            if self.share:
                self._refill(now)
                self._credit = max(self._credit - seconds, -_DEEPEST_SECONDS)

    def count(self, before: float) -> float:
        """Counts what this thread has used since its `time.thread_time` was ``before``; returns what that is now."""
        used = time.thread_time()
        self.spent(time.monotonic(), used - before)
        return used

    def _refill(self, now: float) -> None:
        if now > self._at:
            self._credit = min(_BURST_SECONDS, self._credit + (now - self._at) * self.share)
            self._at = now
