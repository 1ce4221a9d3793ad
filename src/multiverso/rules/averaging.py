"""Model averaging: McDonald et al. 2010, "Distributed Training Strategies for the Structured Perceptron"."""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from multiverso.rules.rule import Rule
from multiverso.updaters.mean import mean


def difference_to_centre(centre, local, state, stride, hyper, delta, count):
    """``delta = local - centre``."""
    for i in range(count):
        delta[i] = local[i] - centre[i]


def share_of_difference(centre, local, state, stride, hyper, delta, count):
    """``delta = hyper[0] (local - centre)``."""
    for i in range(count):
        delta[i] = hyper[0] * (local[i] - centre[i])


def take_centre(centre, local, state, stride, hyper, count):
    """``local = centre``."""
    for i in range(count):
        local[i] = centre[i]


def model_averaging() -> Rule:
    """Returns averaging: every worker goes on from the mean of all workers' parameters.

    The mean is over the workers of the round, so it stays one when a worker has left. Defined for synchronous
    mode alone: without rounds there is no moment at which all parameters could be averaged.
    """
    return Rule("model averaging", difference_to_centre, take_centre, updater=mean(), modes=("sync",))
