"""Gradient descent: ``values -= delta``, where a worker adds its learning rate times its gradient.

The meaning of ``-updater_type=sgd`` of Microsoft Multiverso.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from multiverso.updaters.updater import Updater


def _apply(values, delta, state, stride, hyper, count):
    for i in range(count):
        values[i] -= delta[i]


def sgd() -> Updater:
    """Returns the updater that subtracts what is added."""
    return Updater("sgd", _apply)
