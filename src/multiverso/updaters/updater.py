"""What an updater is: how a delta reaches a table's values, and what may stand around that, as records.

``transformations.py`` has the functions that make what stands around.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from multiverso.checks import positive
from multiverso.spec.states import MOST_HYPER, State, states_of

Array = npt.NDArray[Any]
_TINY = 1e-280  # squares below this have lost bits


@dataclass(frozen=True)
class Clip:
    """Bounds of what is added; see ``clip``."""

    value: float | None
    norm: float | None

    def __call__(self, delta: Array, rows: int = 1) -> Array:
        """Returns a delta within the bounds: the same array if it is already.

        Args:
            delta: flat, of whole rows; not modified.
            rows: how many parts have a norm each.
        """
        # "not less": a NaN, which is not larger either, must not keep what stands beside it from being clipped; and not
        # by absolutes, which the smallest integer has none of
        if self.value is not None and not (delta.max(initial=0) <= self.value and delta.min(initial=0) >= -self.value):
            # floats as bounds would round whole numbers beyond 2**53
            bound = self.value if delta.dtype.kind == "f" else min(int(self.value), np.iinfo(delta.dtype).max)
            delta = np.clip(delta, -bound, bound).astype(delta.dtype, copy=False)
        if self.norm is not None and delta.size:
            parts = delta.reshape(rows, -1)
            scale = _scale_to(self.norm, parts)
            if not scale.min() >= 1:
                delta = (parts * scale[:, np.newaxis]).astype(delta.dtype).reshape(-1)
        return delta

    def __str__(self) -> str:
        bounds = (("value", self.value), ("norm", self.norm))
        return f"clip({', '.join(f'{name}={bound:g}' for name, bound in bounds if bound is not None)})"


def _scale_to(norm: float, rows: Array) -> Array:
    """Returns what each row has to be multiplied by so that its L2 norm is at most ``norm``: 1 or less, float64.

    Args:
        norm: above 0.
        rows: (rows, columns). Their squares, and their norms, need not fit into float64.
    """
    wide = rows.astype(np.float64, copy=False)
    with np.errstate(over="ignore", under="ignore"):
        squares = np.einsum("ij,ij->i", wide, wide)
        norms = np.sqrt(squares)
    scale: Array = np.minimum(1, norm / np.maximum(norms, norm))
    beyond = ~((squares > _TINY) & (squares < np.inf))  # overflowed, underflowed, zero, or not finite from the start
    if beyond.any():
        largest = np.abs(wide[beyond]).max(axis=1, initial=0)
        unit = np.where((largest > 0) & np.isfinite(largest), largest, 1.0)
        parts = wide[beyond] / unit[:, np.newaxis]
        norms = np.sqrt(np.einsum("ij,ij->i", parts, parts))  # in units of the largest number: from 1 on, or 0
        with np.errstate(over="ignore"):
            most = norm / unit
        scale[beyond] = np.minimum(1, most / np.maximum(norms, most))
    return scale


@dataclass(frozen=True)
class WeightDecay:
    """The share by which the values decay at each step; see `weight_decay`."""

    decay: float


@dataclass(frozen=True)
class Schedule:
    """The learning rate by the number of steps; see `schedule`."""

    rate: Callable[[int], float]

    def __call__(self, step: int) -> float:
        """Returns the rate, checked."""
        return positive(float(self.rate(step)), "learning rate of a schedule")


Transformation = Clip | WeightDecay | Schedule


@dataclass(frozen=True)
class Updater:
    """How a table applies the workers' adds.

    Attributes:
        name: its name in ``updater=``, in saved tables and in error messages; none of those that multiverso's own have.
        apply: ``apply(values, delta, state, stride, hyper, count)``, a plain loop over ``count`` elements
            that changes ``values`` (and ``state``) in place. The arguments are pointers of the table's
            dtype: element i of the updater's k-th array is ``state[k * stride + i]``, hyperparameter j is
            ``hyper[j]``, and a count of steps is ``hyper[len(hyper)]``: this step's number, from 1. It is compiled by
            Numba and runs under the lock of a stripe; in synchronous mode it gets the sum of all workers' deltas of a
            round, once.
        states: what it keeps: arrays of the table's size, in their order; in tables of rows by key, numbers for each
            row after them (``State(name, per="row")``); in others at most one count of the table's steps, the last
            (``State(name, per="table")``). Each is saved under its name. A number stands for so many arrays without
            names, zero at first.
        hyper: its hyperparameters; at most 8.
        rate_index: place of the learning rate among ``hyper``, which can then be set while a job runs
            (``table.learning_rate``); None where there is none.
            Those with a rate multiply by it in ``apply``; for ``add`` and ``sgd``, which have none, the worker does it
            before it adds.
        mean: in synchronous mode, gets the mean over the workers that contributed instead of their sum.
        decays: lets values decay by itself, so that a chain adds no second decay; see ``weight_decay``.
        clip: bounds of adds, before they reach ``apply``; see ``chain``.
        schedule: sets the learning rate; see ``chain``.
    """

    name: str
    apply: Callable[..., None] = field(compare=False)
    states: int | tuple[State, ...] = ()
    hyper: tuple[float, ...] = ()
    mean: bool = False
    rate_index: int | None = None
    decays: bool = False
    clip: Clip | None = None
    schedule: Schedule | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if len(self.hyper) > MOST_HYPER:
            raise ValueError(f"an updater has at most {MOST_HYPER} hyperparameters; {self.name} has {len(self.hyper)}")
        object.__setattr__(self, "states", states_of(self.states))
