"""Addition, the default: ``values += delta``."""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from multiverso.updaters.updater import Updater


def _apply(values, delta, state, stride, hyper, count):
    for i in range(count):
        values[i] += delta[i]


def add() -> Updater:
    """Returns the default updater: a table holds the sum of everything added to it."""
    return Updater("add", _apply)
