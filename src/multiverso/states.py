"""What an updater keeps beside a table's values."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class State:
    """One array that an updater keeps beside the values, of the table's size, saved under its name.

    Attributes:
        name: what it is in the updater's paper: ``"momentum"``.
        initial: what each of its elements is at first.
        per: ``"element"`` of the values, or ``"row"``: one number for each row, in tables of rows by key. Those come
            after the others.
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
    if not set(kinds) <= {"element", "row"} or kinds != sorted(kinds):
        raise ValueError(f"a state is per 'element' or per 'row', those per row last; got {kinds}")
    return found
