"""AdaGrad: Duchi, Hazan and Singer, JMLR 12 (2011), the diagonal form, as PyTorch writes it."""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import math

from multiverso.checks import not_negative, positive
from multiverso.spec.states import State
from multiverso.updaters.updater import Updater


def _apply(values, delta, state, stride, hyper, count):
    rate = hyper[0]
    epsilon = hyper[1]
    for i in range(count):
        total = state[i] + delta[i] * delta[i]
        state[i] = total
        values[i] -= rate * delta[i] / (math.sqrt(total) + epsilon)


def adagrad(learning_rate: float = 0.01, initial: float = 0.0, epsilon: float = 1e-10) -> Updater:
    """Returns ``s += delta^2; values -= rate delta / (sqrt(s) + epsilon)``; deltas are gradients.

    Args:
        learning_rate: above 0.
        initial: what each sum of squares begins with, 0 or more.
        epsilon: above 0.
    """
    hyper = (positive(learning_rate, "learning rate"), positive(epsilon, "epsilon"))
    state = State("sum_of_squares", not_negative(initial, "initial sum of squares"))
    return Updater("adagrad", _apply, states=(state,), hyper=hyper, rate_index=0)
