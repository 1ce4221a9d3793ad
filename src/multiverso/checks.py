"""Whether what came from a user is a number of the kind that is wanted."""

from __future__ import annotations

import math
from collections.abc import Callable
from operator import index
from typing import Any


def whole(value: Any, what: str, least: int, most: int | None = None) -> int:
    """Returns a whole number as an int.

    Raises:
        ValueError: it is none, or not from ``least`` to ``most``.
    """
    try:
        found = least - 1 if isinstance(value, bool) else index(value)
    except TypeError:
        found = least - 1
    if found < least or (most is not None and found > most):
        allowed = f"{least} or more" if most is None else f"from {least} to {most:,}"
        raise ValueError(f"{what} is a whole number, {allowed}; got {value!r:.80}")
    return found


def positive(value: Any, what: str) -> float:
    """Returns a number above 0 as a float."""
    return _checked(value, lambda x: x > 0, f"a {what} is above 0")


def fraction(value: Any, what: str) -> float:
    """Returns a number from 0 to less than 1 as a float."""
    return _checked(value, lambda x: 0 <= x < 1, f"a {what} is from 0 to less than 1")


def not_negative(value: Any, what: str) -> float:
    """Returns a number of at least 0 as a float."""
    return _checked(value, lambda x: x >= 0, f"a {what} is 0 or more")


def number(value: Any) -> float:
    """Returns a finite number as a float, and NaN for everything else."""
    try:
        found = math.nan if isinstance(value, (bool, str)) else float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan
    return found if math.isfinite(found) else math.nan


def _checked(value: Any, fits: Callable[[float], bool], said: str) -> float:
    found = number(value)
    if not fits(found):
        raise ValueError(f"{said}; got {value!r:.80}")
    return found
