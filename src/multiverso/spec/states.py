"""What an updater keeps beside a table's values, and how many hyperparameters it may have."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from multiverso.errors import DtypeMismatchError

MOST_HYPER = 8  # hyperparameters of an updater or a rule: what a table's header has a place for
_ORDER = {"element": 0, "row": 1, "table": 2}


@dataclass(frozen=True)
class State:
    """What an updater keeps beside a table's values, saved under its name.

    Attributes:
        name: what it is in the updater's paper: ``"momentum"``.
        initial: what each of its numbers is at first.
        per: ``"element"``: an array of the table's size. ``"row"``: one number for each row, in tables of rows by key;
            behind those of elements. ``"table"``: one whole number, the count of the table's steps: each add is one, in
            synchronous mode each round. An updater has at most one of these, the last of all.
    """

    name: str
    initial: float = 0.0
    per: str = "element"


def states_of(states: int | Iterable[State]) -> tuple[State, ...]:
    """Returns an updater's states; a number stands for so many that have no names and are zero at first.

    Raises:
        ValueError: a name is missing, or there twice.
    """
    if isinstance(states, int):
        return tuple(State(str(i)) for i in range(states))
    found = tuple(states)
    names = [state.name for state in found]
    if not all(isinstance(name, str) and name for name in names) or len(set(names)) < len(names):
        raise ValueError(f"an updater's states have a name each; got {names}")
    kinds = [state.per for state in found]
    if (
        not set(kinds) <= _ORDER.keys()
        or kinds != sorted(kinds, key=lambda per: _ORDER[per])
        or kinds.count("table") > 1
    ):
        raise ValueError(
            f"a state is per 'element', 'row' or 'table', in this order, and one per table at most; got {kinds}"
        )
    if kinds[-1:] == ["table"] and not float(found[-1].initial).is_integer():
        raise ValueError(f"a count of steps begins with a whole number; got {found[-1].initial!r}")
    return found


def check_numbers(whose: str, numbers: Sequence[float], dtype: str) -> None:
    """Refuses numbers that become others in a table's dtype: a rate of 0 loses every add, an epsilon of 0 gives NaN.

    Args:
        whose: the updater or the rule, in words.
        numbers: its hyperparameters, or what its arrays hold at first.
        dtype: the table's.

    Raises:
        DtypeMismatchError: one of them overflows, becomes 0, or is a fraction in a table of integers.
    """
    with np.errstate(all="ignore"):
        kept = np.array(numbers, np.float64).astype(dtype).astype(np.float64)
    if np.dtype(dtype).kind == "i":
        if not np.array_equal(kept, numbers):
            raise DtypeMismatchError(
                f"{whose} computes with {tuple(numbers)}, which {dtype} cannot hold; use a float32 or float64 table, "
                "or an updater of whole numbers (add, sgd, mean)"
            )
        return
    for number, rounded in zip(numbers, kept.tolist(), strict=True):
        if not np.isfinite(rounded) or (number != 0 and rounded == 0):
            raise DtypeMismatchError(
                f"{whose} computes with {number}, which is {rounded} in {dtype}: "
                f"{'use a float64 table or ' if dtype == 'float32' and np.isfinite(number) else 'use '}another number"
            )
