"""Adam: Kingma and Ba, ICLR 2015 (arXiv 1412.6980), algorithm 1, with a step count for each number or for the table.

With a count for each number, one that gets no gradient, as a row that no batch names, keeps its moments and its count:
the lazy form. One count for the whole table, as in the paper, is for tables that are added to as a whole, and takes
half the memory.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import math
from typing import Literal

import numpy as np

from multiverso.checks import fraction, positive
from multiverso.spec.states import State
from multiverso.updaters.updater import Updater


def _adam(values, delta, state, stride, hyper, count):
    rate = hyper[0]
    beta_1 = hyper[1]
    beta_2 = hyper[2]
    epsilon = hyper[3]
    rest_1 = hyper[4]
    rest_2 = hyper[5]
    one = rest_1 + beta_1
    zero = one - one
    for i in range(count):
        first = beta_1 * state[i] + rest_1 * delta[i]
        second = beta_2 * state[stride + i] + rest_2 * delta[i] * delta[i]
        # what the paper writes as beta to the power of the step
        power_1 = state[2 * stride + i] * beta_1
        power_2 = state[3 * stride + i] * beta_2
        left_1 = one - power_1
        left_2 = one - power_2
        state[i] = first
        state[stride + i] = second
        # powers too small to count are 0: they would end as subnormal numbers, and stay so, at half the speed
        state[2 * stride + i] = power_1 if left_1 < one else zero
        state[3 * stride + i] = power_2 if left_2 < one else zero
        values[i] -= rate * (first / left_1) / (math.sqrt(second / left_2) + epsilon)


def _adam_counted(values, delta, state, stride, hyper, count):
    rate = hyper[0]
    beta_1 = hyper[1]
    beta_2 = hyper[2]
    epsilon = hyper[3]
    rest_1 = hyper[4]
    rest_2 = hyper[5]
    one = rest_1 + beta_1
    # the betas to the power of the step, by squaring: the same bits everywhere, and no library is called
    steps = int(hyper[6])
    power_1 = one
    power_2 = one
    factor_1 = beta_1
    factor_2 = beta_2
    while steps > 0:
        if steps & 1:
            power_1 *= factor_1
            power_2 *= factor_2
        factor_1 *= factor_1
        factor_2 *= factor_2
        steps >>= 1
    for i in range(count):
        first = beta_1 * state[i] + rest_1 * delta[i]
        second = beta_2 * state[stride + i] + rest_2 * delta[i] * delta[i]
        state[i] = first
        state[stride + i] = second
        values[i] -= rate * (first / (one - power_1)) / (math.sqrt(second / (one - power_2)) + epsilon)


def adam(
    learning_rate: float = 0.001,
    beta_1: float = 0.9,
    beta_2: float = 0.999,
    epsilon: float = 1e-8,
    *,
    count_per: Literal["element", "table"] = "element",
) -> Updater:
    """Returns Adam's step; deltas are gradients.

    Args:
        learning_rate: above 0.
        beta_1, beta_2: decay of the first and the second moment, from 0, less than 1.
        epsilon: above 0.
        count_per: what counts its steps: each ``"element"``, for rows that are not in every batch; or the ``"table"``,
            where each add (in synchronous mode, each round) is one step, with two arrays of the table's size instead of
            four. Not for rows by key, which have steps of their own.
    """
    if count_per not in ("element", "table"):
        raise ValueError(f"count_per is 'element' or 'table'; got {count_per!r}")
    one, two = fraction(beta_1, "beta_1"), fraction(beta_2, "beta_2")
    if max(np.float32(one), np.float32(two)) == 1:  # the step divides by 1 - beta
        raise ValueError(f"beta_1 and beta_2 are below 1 in float32, too; got {beta_1!r} and {beta_2!r}")
    rate, small = positive(learning_rate, "learning rate"), positive(epsilon, "epsilon")
    hyper = (rate, one, two, small, 1 - one, 1 - two)
    if count_per == "table":
        return Updater(
            "adam",
            _adam_counted,
            states=(State("mu"), State("nu"), State("count", per="table")),
            hyper=hyper,
            rate_index=0,
        )
    states = (State("mu"), State("nu"), State("beta_1_power", 1.0), State("beta_2_power", 1.0))
    return Updater("adam", _adam, states=states, hyper=hyper, rate_index=0)
