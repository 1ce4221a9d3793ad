"""Updaters with a learning rate for each number or row, by the squares of its gradients.

AdaGrad: Duchi, Hazan and Singer, JMLR 12 (2011), the diagonal form, as PyTorch writes it. With one number for each row,
for embeddings: Mudigere et al., Software-hardware co-design for fast and scalable training of deep learning
recommendation models (arXiv 2104.05158), section 4.1.4. RMSprop: Tieleman and Hinton, lecture 6.5 of Neural Networks
for Machine Learning (2012), as PyTorch writes it. FTRL-Proximal: McMahan et al., Ad click prediction: a view from the
trenches, KDD 2013, algorithm 1.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import math

from multiverso.checks import fraction, not_negative, positive
from multiverso.spec.states import State
from multiverso.updaters.updater import Updater


def _adagrad(values, delta, state, stride, hyper, count):
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
    return Updater("adagrad", _adagrad, states=(state,), hyper=hyper, rate_index=0)


def _rowwise_adagrad(values, delta, state, stride, hyper, count):
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
    return Updater("rowwise_adagrad", _rowwise_adagrad, states=(state,), hyper=hyper)


def _rmsprop(values, delta, state, stride, hyper, count):
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
    return Updater("rmsprop", _rmsprop, states=(State("mean_square"),), hyper=hyper, rate_index=0)


def _ftrl(values, delta, state, stride, hyper, count):
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
    return Updater("ftrl", _ftrl, states=(State("n"), State("z")), hyper=hyper, rate_index=0, decays=True)
