"""Values that all workers have to begin with alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from multiverso.runtime import Session
from multiverso.runtime.session.current import current
from multiverso.tables import ArrayTableHandler

Array = NDArray[Any]

_BROADCAST = 1 << 20


def broadcast(arrays: Sequence[Array], session: Session | None = None) -> None:
    """Gives all workers the first live worker's values, bit for bit and in place: collective.

    For what is not trained but has to be equal. They pass through one table of at most 4 MiB.

    Args:
        arrays: writable C-contiguous arrays of any dtype; of the same sizes in every worker.
        session: the session to use instead of the current one.
    """
    session = session or current()
    raw = [array.reshape(-1).view(np.uint8) for array in arrays if array.nbytes]
    total = sum(part.size for part in raw)
    if not total:
        return
    size = min(_BROADCAST, -(-total // 4))
    table = ArrayTableHandler(size, dtype="int32", session=session)
    buffer = np.zeros(size, np.int32)
    window = buffer.view(np.uint8)
    giver = session.worker_id == min(session.live_workers())
    for start in range(0, total, window.size):
        if giver:
            _pass(raw, start, window, out=True)
            table.set(buffer)
        session.barrier()
        if not giver:
            table.snapshot(out=buffer)
            _pass(raw, start, window, out=False)
        session.barrier()


def _pass(raw: list[Array], start: int, window: Array, out: bool) -> None:
    """Copies what lies at ``start`` of all arrays, laid end to end, to or from the window."""
    position = 0
    for part in raw:
        low, high = max(start, position), min(start + window.size, position + part.size)
        if low < high:
            mine, shared = part[low - position : high - position], window[low - start : high - start]
            np.copyto(*((shared, mine) if out else (mine, shared)))
        position += part.size
