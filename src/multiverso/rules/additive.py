"""Rules by which each worker adds what it has changed, and continues from the sum.

Asynchronous SGD, the default: the rule of Microsoft Multiverso. Downpour SGD, with intervals of their own for pushes
and fetches: Dean et al. 2012, "Large Scale Distributed Deep Networks", section 4.1 and algorithm 1.1 of its appendix;
with both intervals 1 it is the first. Delay-compensated ASGD: Zheng et al., ICML 2017, arXiv 1609.08326, with a
constant and the adaptive one.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import math

from multiverso.checks import fraction, not_negative, positive
from multiverso.rules.rule import Rule


def _asgd_push(centre, local, state, stride, hyper, delta, count):
    for i in range(count):
        delta[i] = local[i] - state[i]


def _asgd_pull(centre, local, state, stride, hyper, count):
    for i in range(count):
        value = centre[i]
        local[i] = value
        state[i] = value


def asgd() -> Rule:
    """Returns the default: ``centre += local - last; local = last = centre``.

    With several workers each step moves the centre by all their changes: lower the learning rate when the
    loss jumps.
    """
    return Rule("asgd", _asgd_push, _asgd_pull, per_worker=("centre",))


# state: what local was at the last push or fetch, and what was changed before the last fetch and not yet pushed
def _downpour_push(centre, local, state, stride, hyper, delta, count):
    for i in range(count):
        value = local[i]
        delta[i] = state[stride + i] + (value - state[i])
        state[stride + i] = 0
        state[i] = value


def _downpour_pull(centre, local, state, stride, hyper, count):
    for i in range(count):
        value = centre[i]
        state[stride + i] += local[i] - state[i]
        local[i] = value
        state[i] = value


def downpour(*, fetch: int = 1, push: int = 1) -> Rule:
    """Returns ASGD with separate intervals: changes add up until they are pushed, and nothing is lost.

    In synchronous mode a round ends with each fetch.

    Args:
        fetch: fetch the parameters at every so many exchanges.
        push: push the changes at every so many exchanges.
    """
    return Rule(
        "downpour", _downpour_push, _downpour_pull, per_worker=("centre", "zeros"), push_every=push, pull_every=fetch
    )


# Between a worker's read and its push others have moved the centre. The gradient at the new place is estimated from the
# one at the old: g + lambda g g (w - w_read), with g g in the place of the Hessian.
#
# A change is minus the learning rate times a gradient, so its square is divided by the rate once: that is in hyper
def _dcasgd_push(centre, local, state, stride, hyper, delta, count):
    weight = hyper[0]
    for i in range(count):
        change = local[i] - state[i]
        delta[i] = change - weight * change * change * (centre[i] - state[i])


def _dcasgd_push_adaptive(centre, local, state, stride, hyper, delta, count):
    weight = hyper[0]
    decay = hyper[1]
    rest = hyper[2]
    rate = hyper[3]
    epsilon = hyper[4]
    for i in range(count):
        change = local[i] - state[i]
        gradient = change / rate
        mean = decay * state[stride + i] + rest * gradient * gradient
        state[stride + i] = mean
        scale = weight / math.sqrt(mean + epsilon)
        delta[i] = change - scale * change * change * (centre[i] - state[i])


def dcasgd(learning_rate: float, compensation: float = 0.04) -> Rule:
    """Returns ASGD whose pushes are corrected by how far others have moved the centre since this worker's last read.

    With ``d = local - last``, which is minus the learning rate times the gradient:
    ``centre += d - compensation / learning_rate d d (centre - last)``, ``local = last = centre``. With one worker, and
    in rounds, where the centre has not moved, it is `asgd` to the bit.

    Args:
        learning_rate: that the worker's own optimiser takes its step with, above 0.
        compensation: the paper's lambda, 0 or more.
    """
    rate = positive(learning_rate, "learning rate")
    weight = not_negative(compensation, "compensation") / rate
    return Rule("dcasgd", _dcasgd_push, _asgd_pull, per_worker=("centre",), hyper=(weight,))


def dcasgd_adaptive(
    learning_rate: float, compensation: float = 2.0, decay: float = 0.95, epsilon: float = 1e-7
) -> Rule:
    """Returns `dcasgd` with ``compensation / sqrt(s + epsilon)`` in the place of its constant, for each number.

    ``s = decay s + (1 - decay) g^2`` is the mean square of the gradients that this worker has pushed. (The paper's
    server keeps one over all workers' gradients, which are of one distribution.)

    Args:
        learning_rate: that the worker's own optimiser takes its step with, above 0.
        compensation: the paper's lambda_0, 0 or more.
        decay: the paper's m, from 0, less than 1.
        epsilon: above 0.
    """
    rate, kept = positive(learning_rate, "learning rate"), fraction(decay, "decay")
    weight = not_negative(compensation, "compensation") / rate
    hyper = (weight, kept, 1 - kept, rate, positive(epsilon, "epsilon"))
    return Rule("dcasgd adaptive", _dcasgd_push_adaptive, _asgd_pull, per_worker=("centre", "zeros"), hyper=hyper)
