"""What is done to a row that lives on another host, of which this one has a copy; no updaters for users.

Beside the values of such a row stands what its home has not been sent of this host's adds (``state``). The home runs
the table's updater; for plain addition, and for ``sgd``, the copy shows at once what will come of it.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


def _add_plain(values, delta, state, stride, hyper, count):
    for i in range(count):
        values[i] += delta[i]
        state[i] += delta[i]


def _add_minus(values, delta, state, stride, hyper, count):
    for i in range(count):
        values[i] -= delta[i]
        state[i] += delta[i]


def _add_unseen(values, delta, state, stride, hyper, count):
    for i in range(count):
        state[i] += delta[i]


def _take(values, delta, state, stride, hyper, count):
    for i in range(count):
        delta[i] = state[i]
        state[i] = 0


def _land_plain(values, delta, state, stride, hyper, count):
    for i in range(count):
        values[i] = delta[i] + state[i]


def _land_minus(values, delta, state, stride, hyper, count):
    for i in range(count):
        values[i] = delta[i] - state[i]


def _land_unseen(values, delta, state, stride, hyper, count):
    for i in range(count):
        values[i] = delta[i]


@dataclass(frozen=True)
class CopyLoops:
    """The loops for copies of a table's rows.

    Attributes:
        add: a worker adds ``delta``.
        take: ``delta`` becomes what the home has not been sent, and that is nothing from then on.
        land: the home's values, ``delta``, are here.
    """

    add: Callable[..., None]
    take: Callable[..., None]
    land: Callable[..., None]


_PLAIN = CopyLoops(_add_plain, _take, _land_plain)
_MINUS = CopyLoops(_add_minus, _take, _land_minus)
_UNSEEN = CopyLoops(_add_unseen, _take, _land_unseen)


def copy_loops(updater: str) -> CopyLoops:
    """Returns what is done to copies of the rows of a table, by its updater's name."""
    return {"add": _PLAIN, "sgd": _MINUS}.get(updater, _UNSEEN)
