"""Downpour SGD: pushes and fetches at intervals of their own.

Dean et al. 2012, "Large Scale Distributed Deep Networks", section 4.1 and algorithm 1.1 of its appendix.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from multiverso.rules.rule import Rule


# own: what local was at the last push or fetch, and what was changed before the last fetch and not yet pushed
def _push(centre, local, own, stride, hyper, delta, count):
    for i in range(count):
        value = local[i]
        delta[i] = own[stride + i] + (value - own[i])
        own[stride + i] = 0
        own[i] = value


def _pull(centre, local, own, stride, hyper, count):
    for i in range(count):
        value = centre[i]
        own[stride + i] += local[i] - own[i]
        local[i] = value
        own[i] = value


def downpour(*, fetch: int = 1, push: int = 1) -> Rule:
    """Returns ASGD with separate intervals: changes add up until they are pushed, and nothing is lost.

    In synchronous mode a round ends with each fetch.

    Args:
        fetch: fetch the parameters at every so many exchanges.
        push: push the changes at every so many exchanges.
    """
    return Rule("downpour", _push, _pull, per_worker=("centre", "zeros"), push_every=push, pull_every=fetch)
