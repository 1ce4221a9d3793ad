"""Elastic averaging SGD: Zhang, Choromanska and LeCun 2015, arXiv 1412.6651, equations 5 and 6."""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from multiverso.checks import number
from multiverso.rules.rule import Rule


def _push(centre, local, state, stride, hyper, delta, count):
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
    return Rule("easgd", _push, hyper=(float(alpha),))
