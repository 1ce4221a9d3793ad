"""RMSprop: Tieleman and Hinton, lecture 6.5 of Neural Networks for Machine Learning (2012), as PyTorch writes it."""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import math

from multiverso.checks import fraction, positive
from multiverso.spec.states import State
from multiverso.updaters.updater import Updater


def _apply(values, delta, state, stride, hyper, count):
    rate = hyper[0]
    decay = hyper[1]
    epsilon = hyper[2]
    rest = hyper[3]
    for i in range(count):
        mean = decay * state[i] + rest * delta[i] * delta[i]
        state[i] = mean
        values[i] -= rate * delta[i] / (math.sqrt(mean) + epsilon)


def rmsprop(learning_rate: float = 0.01, decay: float = 0.99, epsilon: float = 1e-8) -> Updater:
    """Returns ``s = decay s + (1 - decay) delta^2; values -= rate delta / (sqrt(s) + epsilon)``; deltas are gradients.

    Args:
        learning_rate: above 0.
        decay: from 0, less than 1.
        epsilon: above 0.
    """
    kept = fraction(decay, "decay")
    hyper = (positive(learning_rate, "learning rate"), kept, positive(epsilon, "epsilon"), 1 - kept)
    return Updater("rmsprop", _apply, states=(State("mean_square"),), hyper=hyper, rate_index=0)
