"""The plain ones: deltas are added as they are, by the mean of a round, or subtracted."""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from multiverso.updaters.updater import Updater


def _add(values, delta, state, stride, hyper, count):
    for i in range(count):
        values[i] += delta[i]


def add() -> Updater:
    """Returns the default updater, ``values += delta``: a table holds the sum of everything added to it."""
    return Updater("add", _add)


def mean() -> Updater:
    """Returns addition of the mean over the workers that contributed to a synchronous round.

    Where there are no rounds each delta is added as it comes.
    """
    return Updater("mean", _add, mean=True)


def _sgd(values, delta, state, stride, hyper, count):
    for i in range(count):
        values[i] -= delta[i]


def sgd() -> Updater:
    """Returns gradient descent: ``values -= delta``, where a worker adds its learning rate times its gradient.

    The meaning of ``-updater_type=sgd`` of Microsoft Multiverso.
    """
    return Updater("sgd", _sgd)
