"""Whose a block of a host's control segment is, or a line of its tables."""

from __future__ import annotations

import functools
from collections.abc import Iterable

from msgspec import Struct

from multiverso.layout.words import MOST_WORKERS


class WorkerIndex(Struct, frozen=True, dict=True):
    """Where the words of each worker of a job lie in one host's memory.

    Kernels know a worker by its *index*, everything else by its number. On one host they are the same. In a job on
    several this host's workers come first, so that who takes part in a round is a bit each of one word, however many
    workers the job has; then the node, which changes tables for other hosts; then those of the other hosts.

    Attributes:
        workers: how many the job has, on all hosts together.
        local: this host's, in ascending order, in a job on several hosts; None: all are here.
    """

    workers: int
    local: tuple[int, ...] | None = None

    @property
    def here(self) -> int:
        """How many workers this host has; the node's index."""
        return self.workers if self.local is None else len(self.local)

    @property
    def count(self) -> int:
        """How many indexes there are of workers; the node's is among them where it stands between workers."""
        return self.workers if self.local is None else self.workers + 1

    @property
    def slots(self) -> int:
        """How many there are that may contribute to a round: on several hosts the node's has what others' have."""
        return min(self.here + 1, self.count)

    @functools.cached_property
    def _numbers(self) -> tuple[int, ...]:
        local = self.local or ()
        return (*local, self.workers, *(i for i in range(self.workers) if i not in local))

    @functools.cached_property
    def _of(self) -> dict[int, int]:
        return {number: index for index, number in enumerate(self._numbers)}

    def of(self, number: int) -> int:
        """Returns a worker's index; the node's where the number is that of workers."""
        return number if self.local is None else self._of[number]

    def number_of(self, index: int) -> int:
        """The inverse of `of`; -1 for what is no index."""
        if self.local is None:
            return index
        return self._numbers[index] if 0 <= index <= self.workers else -1


ALONE = WorkerIndex(1)


def bits_of(workers: Iterable[int]) -> tuple[int, int]:
    """Returns some workers as waits publish for whom they are: as bits of 64 with a sign, and which 64 those are.

    Of workers farther apart it is those near the first one.
    """
    masks = masks_of(workers, MOST_WORKERS)
    return next(((mask, which) for which, mask in enumerate(masks) if mask), (0, 0))


def masks_of(workers: Iterable[int], most: int) -> list[int]:
    """Returns some of so many workers as bits, 64 in each number with a sign."""
    masks = [0] * (-(-most // 64))
    for worker in workers:
        masks[worker // 64] |= 1 << worker % 64
    return [mask - (1 << 64) if mask >> 63 else mask for mask in masks]


def workers_in(masks: Iterable[int]) -> set[int]:
    """The inverse of `masks_of`."""
    found = set()
    for which, mask in enumerate(masks):
        left = mask & (1 << 64) - 1
        while left:
            found.add(64 * which + (left & -left).bit_length() - 1)
            left &= left - 1
    return found


def has_bit(mask: int, which: int, worker: int) -> bool:
    """Returns whether a worker is among those that `bits_of` has returned."""
    return worker // 64 == which and bool(mask >> worker % 64 & 1)
