"""What an epoch deals: plain data, and its order of samples."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

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
