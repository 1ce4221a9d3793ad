"""Adam: Kingma and Ba, ICLR 2015 (arXiv 1412.6980), algorithm 1, with a step count for each number.

A number that gets no gradient, as a row that no batch names, keeps its moments and its count: the lazy form.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import math

from multiverso.states import State
from multiverso.updaters.checks import fraction, positive
from multiverso.updaters.updater import Updater


def _apply(values, delta, state, stride, hyper, count):
    rate = hyper[0]
    beta_1 = hyper[1]
    beta_2 = hyper[2]
    epsilon = hyper[3]
    rest_1 = hyper[4]
    rest_2 = hyper[5]
    for i in range(count):
        first = beta_1 * state[i] + rest_1 * delta[i]
        second = beta_2 * state[stride + i] + rest_2 * delta[i] * delta[i]
        # what the paper writes as beta to the power of the step
        power_1 = state[2 * stride + i] * beta_1
        power_2 = state[3 * stride + i] * beta_2
        state[i] = first
        state[stride + i] = second
        state[2 * stride + i] = power_1
        state[3 * stride + i] = power_2
        one = rest_1 + beta_1
        values[i] -= rate * (first / (one - power_1)) / (math.sqrt(second / (one - power_2)) + epsilon)


def adam(
    learning_rate: float = 0.001, beta_1: float = 0.9, beta_2: float = 0.999, epsilon: float = 1e-8
) -> Updater:
    """Returns Adam's step; deltas are gradients.

    Args:
        learning_rate: above 0.
        beta_1, beta_2: decay of the first and the second moment, from 0, less than 1.
        epsilon: above 0.
    """
    one, two = fraction(beta_1, "beta_1"), fraction(beta_2, "beta_2")
    rate, small = positive(learning_rate, "learning rate"), positive(epsilon, "epsilon")
    states = (State("mu"), State("nu"), State("beta_1_power", 1.0), State("beta_2_power", 1.0))
    return Updater(
        "adam", _apply, states=states, hyper=(rate, one, two, small, 1 - one, 1 - two), rate_index=0
    )
