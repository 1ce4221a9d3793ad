"""Copies of a model's tensors into a slot, on several processors, with their checksums."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

from multiverso.kernels import publications as kernels
from multiverso.publications.tensors import Leaf, Tensor

_CHUNK_WORDS = 1 << 19  # 4 MiB: what one thread copies at a time
_WORTH_THREADS = 8 * _CHUNK_WORDS  # bytes
_MOST_THREADS = 4


class Copier:
    """Owner: a publication, one call at a time. Its threads live from the first large model to `close`."""

    def __init__(self) -> None:
        self._threads = min(_MOST_THREADS, len(os.sched_getaffinity(0)))
        self._pool: ThreadPoolExecutor | None = None
        self._copying: list[Future[None]] = []

    def settle(self) -> None:
        """Waits for what a call that was interrupted has left under way."""
        wait(self._copying)

    def copy(self, base: int, pairs: Sequence[tuple[Tensor, Leaf]]) -> list[int]:
        """Copies tensors into the slot at an address, and returns their checksums, as int64."""
        if self._threads == 1 or sum(tensor.nbytes for tensor, _ in pairs) < _WORTH_THREADS:
            return [_wrapped(_copy_part(base, tensor, leaf, 0, tensor.words)) for tensor, leaf in pairs]
        parts = [
            (number, tensor, leaf, first, min(_CHUNK_WORDS, tensor.words - first))
            for number, (tensor, leaf) in enumerate(pairs)
            for first in range(0, tensor.words, _CHUNK_WORDS)
        ]
        parts.reverse()
        totals = [0] * len(pairs)
        adding = threading.Lock()

        def work() -> None:
            with contextlib.suppress(IndexError):
                while True:
                    number, tensor, leaf, first, count = parts.pop()
                    total = _copy_part(base, tensor, leaf, first, count)
                    with adding:
                        totals[number] += total

        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._threads - 1, "multiverso-publish")
        try:
            self._copying = [self._pool.submit(work) for _ in range(self._threads - 1)]
            work()
        except BaseException:
            parts.clear()  # the others stop after the part in hand; the next call waits for them
            raise
        for copied in self._copying:
            copied.result()
        return [_wrapped(total) for total in totals]

    def close(self) -> None:
        """Ends the threads."""
        self.settle()
        if self._pool is not None:
            self._pool.shutdown()


def _copy_part(base: int, tensor: Tensor, leaf: Leaf, first: int, count: int) -> int:
    """Copies words of a tensor into a slot, and returns their part of its checksum."""
    to, source = base + tensor.offset + 8 * first, leaf.address + 8 * first
    whole = min(count, tensor.nbytes // 8 - first)
    total = kernels.copy_summed.compiled()(to, source, whole, first) if whole > 0 else 0
    if whole < count:  # the end of a tensor that is no multiple of 8 bytes; what fills it up is zero
        left = tensor.nbytes % 8
        ctypes.memmove(to + 8 * whole, source + 8 * whole, left)
        total += kernels.summed.compiled()(to + 8 * whole, 1, first + whole)
    return total


def _wrapped(total: int) -> int:
    """Returns a sum as the int64 that it is modulo 2**64."""
    return (total + 2**63) % 2**64 - 2**63
