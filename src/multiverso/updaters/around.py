"""What may stand around an updater, as records; ``transformations.py`` has the functions that make them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from multiverso.checks import positive

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
    """How much of the values goes at each step; see `weight_decay`."""

    decay: float


@dataclass(frozen=True)
class Schedule:
    """The learning rate by the number of steps; see `schedule`."""

    rate: Callable[[int], float]

    def __call__(self, step: int) -> float:
        """Returns the rate, checked."""
        return positive(float(self.rate(step)), "learning rate of a schedule")


Transformation = Clip | WeightDecay | Schedule
