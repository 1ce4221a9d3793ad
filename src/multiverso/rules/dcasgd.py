"""Delay-compensated ASGD: Zheng et al., ICML 2017, arXiv 1609.08326, with a constant and the adaptive one.

Between a worker's read and its push others have moved the centre. The gradient at the new place is estimated from the
one at the old: ``g + lambda g g (w - w_read)``, with ``g g`` in the place of the Hessian.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import math

from multiverso.checks import fraction, not_negative, positive
from multiverso.rules.asgd import asgd
from multiverso.rules.rule import Rule

_pull = asgd().pull


# a change is minus the learning rate times a gradient, so its square is divided by the rate once: that is in hyper
def _push(centre, local, state, stride, hyper, delta, count):
    weight = hyper[0]
    for i in range(count):
        change = local[i] - state[i]
        delta[i] = change - weight * change * change * (centre[i] - state[i])


def _push_adaptive(centre, local, state, stride, hyper, delta, count):
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
    return Rule("dcasgd", _push, _pull, per_worker=("centre",), hyper=(weight,))


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
    return Rule("dcasgd adaptive", _push_adaptive, _pull, per_worker=("centre", "zeros"), hyper=hyper)
