"""Rules that average: all workers' changes of a round, as they are or through an outer step; a worker and the centre.

Model averaging: McDonald et al. 2010, "Distributed Training Strategies for the Structured Perceptron". Local SGD with
an outer Nesterov step (DiLoCo): Douillard et al. 2023, arXiv 2311.08105, algorithm 1. Elastic averaging SGD: Zhang,
Choromanska and LeCun 2015, arXiv 1412.6651, equations 5 and 6.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from dataclasses import replace

from multiverso.checks import number
from multiverso.rules.rule import Rule
from multiverso.updaters.additions import mean
from multiverso.updaters.momentum import nesterov


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
    """Returns averaging: every worker continues from the mean of all workers' parameters.

    The mean is over the workers of the round, so it stays one when a worker has left. Defined for synchronous
    mode alone: without rounds there is no moment at which all parameters could be averaged.
    """
    return Rule("model averaging", difference_to_centre, take_centre, updater=mean(), modes=("sync",))


def local_sgd(outer_lr: float = 0.7, outer_momentum: float = 0.9) -> Rule:
    """Returns local SGD: train alone for many steps, then one outer step along the mean change of all.

    ``d = mean(local - centre); v = momentum v + d; centre += lr (d + momentum v); local = centre``. The inner
    optimiser is the worker's own and keeps its state (AdamW in the paper). With ``outer_lr=1,
    outer_momentum=0`` it is model averaging. Defined for synchronous mode alone, as in the paper. Exchange
    rarely: every 10 steps or many more.

    Args:
        outer_lr: above 0.
        outer_momentum: from 0, less than 1.
    """
    updater = replace(nesterov(outer_lr, outer_momentum), mean=True)
    return Rule("local sgd", difference_to_centre, take_centre, updater=updater, modes=("sync",))


diloco = local_sgd


def _easgd_push(centre, local, state, stride, hyper, delta, count):
    alpha = hyper[0]
    for i in range(count):
        # one difference for both sides: their sum stays, to the last rounding
        difference = alpha * (local[i] - centre[i])
        local[i] -= difference
        delta[i] = difference


def easgd(alpha: float) -> Rule:
    """Returns elastic averaging: ``d = alpha (local - centre); local -= d; centre += d``.

    Workers explore on their own and are drawn to the centre, which is what to validate and save. Exchange
    every few minibatches (the paper: 10).

    Args:
        alpha: the moving rate, above 0 and at most 1. The paper takes 0.9 divided by the number of workers;
            in synchronous mode workers and centre run away from each other when alpha x (workers + 1) is
            above 2.
    """
    if not 0 < number(alpha) <= 1:
        raise ValueError(f"alpha is a moving rate, above 0 and at most 1; got {alpha!r}")
    return Rule("easgd", _easgd_push, hyper=(float(alpha),))
