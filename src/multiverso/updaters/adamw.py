"""AdamW: Loshchilov and Hutter, Decoupled weight decay regularization, ICLR 2019 (arXiv 1711.05101), algorithm 2.

As PyTorch writes it, the decay is multiplied by the learning rate. A number that gets no gradient, as a row that no
batch names, keeps its moments and its count, and does not decay: the lazy form.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import math

from multiverso.states import State
from multiverso.updaters.checks import fraction, not_negative, positive
from multiverso.updaters.updater import Updater


def _apply(values, delta, state, stride, hyper, count):
    rate = hyper[0]
    beta_1 = hyper[1]
    beta_2 = hyper[2]
    epsilon = hyper[3]
    rest_1 = hyper[4]
    rest_2 = hyper[5]
    decay = hyper[6]
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
        step = (first / (one - power_1)) / (math.sqrt(second / (one - power_2)) + epsilon)
        values[i] -= rate * (step + decay * values[i])


def adamw(
    learning_rate: float = 0.001,
    beta_1: float = 0.9,
    beta_2: float = 0.999,
    epsilon: float = 1e-8,
    weight_decay: float = 0.01,
) -> Updater:
    """Returns Adam's step with ``values -= learning_rate weight_decay values`` beside it; deltas are gradients.

    Args:
        learning_rate: above 0.
        beta_1, beta_2: decay of the first and the second moment, from 0, less than 1.
        epsilon: above 0.
        weight_decay: 0 or more.
    """
    one, two = fraction(beta_1, "beta_1"), fraction(beta_2, "beta_2")
    rate, small = positive(learning_rate, "learning rate"), positive(epsilon, "epsilon")
    decay = not_negative(weight_decay, "weight decay")
    states = (State("mu"), State("nu"), State("beta_1_power", 1.0), State("beta_2_power", 1.0))
    return Updater("adamw", _apply, states=states, hyper=(rate, one, two, small, 1 - one, 1 - two, decay))
