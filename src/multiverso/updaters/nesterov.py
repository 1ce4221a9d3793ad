"""Nesterov's momentum: Sutskever et al. 2013, in the form that PyTorch and DiLoCo use."""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from multiverso.checks import fraction, positive
from multiverso.spec.states import State
from multiverso.updaters.updater import Updater


def _apply(values, delta, state, stride, hyper, count):
    rate = hyper[0]
    momentum = hyper[1]
    for i in range(count):
        velocity = momentum * state[i] + delta[i]
        state[i] = velocity
        values[i] += rate * (delta[i] + momentum * velocity)


def nesterov(learning_rate: float = 0.7, momentum: float = 0.9) -> Updater:
    """Returns ``v = momentum v + delta; values += rate (delta + momentum v)``; deltas point downhill.

    Args:
        learning_rate: above 0.
        momentum: from 0, less than 1.
    """
    hyper = (positive(learning_rate, "learning rate"), fraction(momentum, "momentum"))
    return Updater("nesterov", _apply, states=(State("momentum"),), hyper=hyper, rate_index=0)
