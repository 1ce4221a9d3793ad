"""What an updater is: how a delta reaches a table's values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Updater:
    """A rule by which a table takes in what workers add.

    Attributes:
        name: its name in ``updater=``, in saved tables and in error messages.
        apply: ``apply(values, delta, state, stride, hyper, count)``, a plain loop over ``count`` elements
            that changes ``values`` (and ``state``) in place. The arguments are pointers of the table's
            dtype: element i of the updater's k-th array is ``state[k * stride + i]``, hyperparameter j is
            ``hyper[j]``. It is compiled by Numba and runs under the lock of a stripe; in synchronous mode it
            gets the sum of all workers' deltas of a round, once.
        states: arrays of the table's size that it keeps, zero at first.
        hyper: its hyperparameters; at most 8.
        mean: in synchronous mode, gets the mean over the workers that contributed instead of their sum.
    """

    name: str
    apply: Callable[..., None] = field(compare=False)
    states: int = 0
    hyper: tuple[float, ...] = ()
    mean: bool = False
