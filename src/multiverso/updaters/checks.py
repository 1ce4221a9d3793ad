"""What hyperparameters may be."""

from __future__ import annotations

import math


def positive(value: float, what: str) -> float:
    """Returns a number above 0 as a float."""
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(f"a {what} is above 0; got {value!r}")
    return float(value)


def fraction(value: float, what: str) -> float:
    """Returns a number from 0 to less than 1 as a float."""
    if not 0 <= value < 1:
        raise ValueError(f"a {what} is from 0 to less than 1; got {value!r}")
    return float(value)


def not_negative(value: float, what: str) -> float:
    """Returns a number of at least 0 as a float."""
    if not (value >= 0 and math.isfinite(value)):
        raise ValueError(f"a {what} is 0 or more; got {value!r}")
    return float(value)
