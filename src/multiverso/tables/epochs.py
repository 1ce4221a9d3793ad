"""What an epoch deals: plain data, its order of samples, and what goes wrong when workers do not agree on it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from multiverso.errors import TableMismatchError, WorkerLostError
from multiverso.runtime.job.wait_graph import names
from multiverso.runtime.job.worker_state import WorkerState

Words = npt.NDArray[np.int64]
_POSITIVE = (1 << 63) - 1


@dataclass(frozen=True)
class Epoch:
    """What is dealt: `n` samples, shuffled, in batches of at most `size`."""

    n: int
    size: int
    seed: int
    epoch: int

    @property
    def batches(self) -> int:
        """How many batches there are."""
        return -(-self.n // self.size)

    @property
    def words(self) -> tuple[int, int, int, int]:
        """What the workers compare."""
        return self.n, self.size, self.seed & _POSITIVE, self.epoch & _POSITIVE

    def order(self) -> Words:
        """Returns the samples in the order in which they are dealt."""
        shuffled = np.random.default_rng([self.seed, self.epoch]).permutation(self.n)
        return shuffled.astype(np.int64, copy=False)


def other_epoch(number: int, theirs: Iterable[int], mine: Epoch) -> TableMismatchError:
    """Returns the error for a deal of which the others have said something else."""
    return TableMismatchError(
        f"mv.batches, call {number}: the others asked for (n, size, seed, epoch) = {tuple(map(int, theirs))}, this "
        f"worker asks for {mine.words}; all workers have to call it with the same arguments in the same order"
    )


def lost_in_batch(worker: WorkerState) -> WorkerLostError:
    """Returns the error for a worker whose batch must not be taken over."""
    return WorkerLostError(
        f"{names([worker.worker_id])} ({worker.process}) died, or exited without shutdown(), in the middle of a batch. "
        "To hand it out again: init(on_lost='continue'), or `multiverso run --on-failure continue`",
        [worker.worker_id],
    )


def bits_of(workers: Iterable[int]) -> int:
    """Returns workers as a set of bits in 64 with a sign, as a wait publishes whom it is for."""
    mask = sum(1 << worker for worker in workers)
    return mask - (1 << 64) if mask >> 63 else mask
