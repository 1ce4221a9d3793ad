"""What workers say of their training, in memory that `multiverso top` sees: the last values of each."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from multiverso import layout as at
from multiverso.memory.shared import SharedMemory
from multiverso.memory.words import load64, store64

MEMORY = "multiverso-notes"
_STRIDE = 1024
BYTES = _STRIDE * at.MAX_WORKERS
_SEQUENCE, _LENGTH, _TEXT = 0, 8, 16
_TRIES = 100


class Notes:
    """One worker's line. Owner: one thread at a time."""

    def __init__(self, memory: SharedMemory, worker_id: int) -> None:
        self._memory = memory
        self._line = memory.address + _STRIDE * worker_id
        self._values: dict[str, float] = {}

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Publish values, beside those of other names before; the oldest names go when there is no more room."""
        for name, value in values.items():
            self._values.pop(name, None)
            self._values[name] = value
        text = _encoded(step, self._values)
        while len(text) > _STRIDE - _TEXT and self._values:
            del self._values[next(iter(self._values))]
            text = _encoded(step, self._values)
        start = self._line + _TEXT - self._memory.address
        sequence = load64(self._line + _SEQUENCE) | 1  # odd meanwhile; also after a writer that was killed
        store64(self._line + _SEQUENCE, sequence)
        store64(self._line + _LENGTH, len(text))
        self._memory.array[start : start + len(text)] = np.frombuffer(text, np.uint8)
        store64(self._line + _SEQUENCE, sequence + 1)


def read(memory: np.ndarray[Any, np.dtype[np.uint8]], worker_id: int) -> dict[str, Any] | None:
    """Return a worker's `step` and `values`, or None where it has said nothing, or was killed while it did."""
    line = memory[_STRIDE * worker_id :][:_STRIDE]
    words = line[:_TEXT].view(np.int64)
    for _ in range(_TRIES):
        sequence, length = map(int, words)
        text = line[_TEXT : _TEXT + length].tobytes()
        if sequence and not sequence & 1 and sequence == words[0]:
            found: dict[str, Any] = json.loads(text)
            return found
    return None


def _encoded(step: int, values: Mapping[str, float]) -> bytes:
    return json.dumps({"step": step, "values": values}).encode()
