"""FTRL-Proximal: McMahan et al., Ad click prediction: a view from the trenches, KDD 2013, algorithm 1."""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import math

from multiverso.checks import not_negative, positive
from multiverso.spec.states import State
from multiverso.updaters.updater import Updater


def _apply(values, delta, state, stride, hyper, count):
    alpha = hyper[0]
    beta = hyper[1]
    l1 = hyper[2]
    l2 = hyper[3]
    for i in range(count):
        before = state[i]
        after = before + delta[i] * delta[i]
        z = state[stride + i] + delta[i] - (math.sqrt(after) - math.sqrt(before)) / alpha * values[i]
        state[i] = after
        state[stride + i] = z
        scale = (beta + math.sqrt(after)) / alpha + l2
        if z > l1:
            values[i] = (l1 - z) / scale
        elif z < -l1:
            values[i] = (-l1 - z) / scale
        else:
            values[i] = l1 - l1


def ftrl(alpha: float = 0.1, beta: float = 1.0, l1: float = 0.0, l2: float = 0.0) -> Updater:
    """Returns FTRL-Proximal with a learning rate for each number; deltas are gradients.

    A number's value is a function of its state from its first gradient on; initial values other than 0 are
    forgotten then.

    Args:
        alpha: of the learning rate ``alpha / (beta + sqrt(sum of squares))``; above 0.
        beta: above 0.
        l1: weight of the L1 norm, 0 or more: makes values exactly 0.
        l2: weight of the squared L2 norm, 0 or more.
    """
    hyper = (positive(alpha, "alpha"), positive(beta, "beta"), not_negative(l1, "l1"), not_negative(l2, "l2"))
    return Updater("ftrl", _apply, states=(State("n"), State("z")), hyper=hyper, rate_index=0, decays=True)
