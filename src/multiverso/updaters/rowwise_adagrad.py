"""AdaGrad with one number for each row: the mean of the row's squared gradients is what is summed.

For embeddings: Mudigere et al., Software-hardware co-design for fast and scalable training of deep learning
recommendation models (arXiv 2104.05158), section 4.1.4.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import math

from multiverso.checks import not_negative, positive
from multiverso.spec.states import State
from multiverso.updaters.updater import Updater


def _apply(values, delta, state, stride, hyper, count):
    rate = hyper[0]
    epsilon = hyper[1]
    squares = hyper[1] - hyper[1]
    for i in range(count):
        squares += delta[i] * delta[i]
    total = state[0] + squares / count
    state[0] = total
    scale = rate / (math.sqrt(total) + epsilon)
    for i in range(count):
        values[i] -= scale * delta[i]


def rowwise_adagrad(learning_rate: float = 0.01, initial: float = 0.0, epsilon: float = 1e-10) -> Updater:
    """Returns ``s += mean(delta^2); values -= rate delta / (sqrt(s) + epsilon)`` for each row; deltas are gradients.

    For keyed tables only: other tables have no place for a number for each row.

    Args:
        learning_rate: above 0.
        initial: what each row's sum begins with, 0 or more.
        epsilon: above 0.
    """
    hyper = (positive(learning_rate, "learning rate"), positive(epsilon, "epsilon"))
    state = State("sum_of_squares", not_negative(initial, "initial sum of squares"), per="row")
    return Updater("rowwise_adagrad", _apply, states=(state,), hyper=hyper)
