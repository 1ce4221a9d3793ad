"""Asynchronous SGD, the default: each worker adds what it has changed, and continues from the sum.

The rule of Microsoft Multiverso; Dean et al. 2012, "Large Scale Distributed Deep Networks", with both
intervals 1.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from multiverso.rules.rule import Rule


def _push(centre, local, state, stride, hyper, delta, count):
    for i in range(count):
        delta[i] = local[i] - state[i]


def _pull(centre, local, state, stride, hyper, count):
    for i in range(count):
        value = centre[i]
        local[i] = value
        state[i] = value


def asgd() -> Rule:
    """Returns the default: ``centre += local - last; local = last = centre``.

    With several workers each step moves the centre by all their changes: lower the learning rate when the
    loss jumps.
    """
    return Rule("asgd", _push, _pull, per_worker=("centre",))
