"""Downpour SGD: pushes and fetches at intervals of their own.

Dean et al. 2012, "Large Scale Distributed Deep Networks", section 4.1 and algorithm 1.1 of its appendix.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from multiverso.rules.rule import Rule


# state: what local was at the last push or fetch, and what was changed before the last fetch and not yet pushed
def _push(centre, local, state, stride, hyper, delta, count):
    for i in range(count):
        value = local[i]
        delta[i] = state[stride + i] + (value - state[i])
        state[stride + i] = 0
        state[i] = value


def _pull(centre, local, state, stride, hyper, count):
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
    return Rule("downpour", _push, _pull, per_worker=("centre", "zeros"), push_every=push, pull_every=fetch)
