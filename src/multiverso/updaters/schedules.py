"""Learning rates by the number of steps: for ``schedule``, and for setting ``table.learning_rate``."""

from __future__ import annotations

import math
from collections.abc import Callable

from multiverso.checks import positive, whole


def cosine(rate: float, steps: int, *, warmup: int = 0, least: float = 0.01) -> Callable[[int], float]:
    """Returns a rate that rises linearly for ``warmup`` steps, then falls along half a cosine, and stays there.

    Loshchilov and Hutter, SGDR (arXiv 1608.03983), equation 5, without restarts.

    Args:
        rate: the highest, above 0.
        steps: until it has fallen, those of the rise included; more than ``warmup``.
        warmup: 0 or more.
        least: what it falls to, as a part of ``rate``, above 0.
    """
    highest, lowest = positive(rate, "learning rate"), positive(least, "least part")
    rise = whole(warmup, "warmup", 0)
    fall = whole(steps, "steps", rise + 1) - rise

    def at(step: int) -> float:
        if step < rise:
            return highest * (step + 1) / rise
        done = min((step - rise) / fall, 1.0)
        return highest * (lowest + (1 - lowest) * (1 + math.cos(math.pi * done)) / 2)

    return at


def inverse_square_root(rate: float, warmup: int = 1) -> Callable[[int], float]:
    """Returns a rate that rises linearly for ``warmup`` steps, then falls as one over the square root of the step.

    Vaswani et al., Attention is all you need (arXiv 1706.03762), equation 3.

    Args:
        rate: the highest, above 0.
        warmup: 1 or more.
    """
    highest, rise = positive(rate, "learning rate"), whole(warmup, "warmup", 1)
    return lambda step: highest * min((step + 1) / rise, math.sqrt(rise / (step + 1)))
