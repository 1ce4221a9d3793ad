"""Addition that averages a round: ``values += mean of the workers' deltas``."""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from multiverso.updaters.updater import Updater


def _apply(values, delta, state, stride, hyper, count):
    for i in range(count):
        values[i] += delta[i]


def mean() -> Updater:
    """Returns addition of the mean over the workers that contributed to a synchronous round.

    Where there are no rounds each delta is added as it comes.
    """
    return Updater("mean", _apply, mean=True)
