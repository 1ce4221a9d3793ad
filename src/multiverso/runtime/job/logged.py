"""Keeps the last values that each worker has logged of its training, in memory that `multiverso top` reads."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from multiverso.layout import words as at
from multiverso.layout.records import Record
from multiverso.memory.segment import SharedMemory
from multiverso.memory.words import load64, store64

MEMORY = "multiverso-logged"
_TEXT_BYTES = 1008
LINE = Record(1024)
SEQUENCE = LINE.int64("sequence")  # odd while the words below change
LENGTH = LINE.int64("length")
TEXT = LINE.bytes("text", _TEXT_BYTES)  # JSON
BYTES = LINE.size * at.MAX_WORKERS
_TRIES = 100


class Logged:
    """One worker's line. Owner: one thread at a time."""

    def __init__(self, memory: SharedMemory, index: int) -> None:
        self._memory = memory  # which stays mapped for as long as it is held here
        self._line = memory.address + LINE.size * index
        self._values: dict[str, float] = {}

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Publishes values, beside those of other names before; the oldest names go when there is no more room."""
        for name, value in values.items():
            self._values.pop(name, None)
            self._values[name] = value
        text = _encoded(step, self._values)
        while len(text) > _TEXT_BYTES and self._values:
            del self._values[next(iter(self._values))]
            text = _encoded(step, self._values)
        sequence = load64(self._line + SEQUENCE) | 1  # also after a writer that was killed
        store64(self._line + SEQUENCE, sequence)
        store64(self._line + LENGTH, len(text))
        ctypes.memmove(self._line + TEXT, text, len(text))
        store64(self._line + SEQUENCE, sequence + 1)


def read(memory: np.ndarray[Any, np.dtype[np.uint8]], index: int) -> dict[str, Any] | None:
    """Returns a worker's `step` and `values`, or None where it has said nothing, or nothing that can be read.

    It may have been killed while it did, or have written nonsense: a status request must not fail for that.
    """
    line = memory[LINE.size * index :][: LINE.size].view(LINE.dtype)[0]
    for _ in range(_TRIES):
        sequence, text = int(line["sequence"]), line["text"].tobytes()[: int(line["length"])]
        if sequence and not sequence & 1 and sequence == line["sequence"]:
            try:
                found: dict[str, Any] = json.loads(text)
            except ValueError:
                return None
            return found
    return None


def _encoded(step: int, values: Mapping[str, float]) -> bytes:
    return json.dumps({"step": step, "values": values}).encode()
