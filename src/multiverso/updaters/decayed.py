"""Updaters whose values decay at each step: a loop that shrinks the values, then the updater's own."""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

from multiverso.spec.states import states_of
from multiverso.updaters.adagrad import adagrad
from multiverso.updaters.adam import adam
from multiverso.updaters.add import add
from multiverso.updaters.mean import mean
from multiverso.updaters.momentum import momentum
from multiverso.updaters.nesterov import nesterov
from multiverso.updaters.rmsprop import rmsprop
from multiverso.updaters.rowwise_adagrad import rowwise_adagrad
from multiverso.updaters.sgd import sgd
from multiverso.updaters.updater import Updater


@functools.cache
def _decayed(inner: Callable[..., None], rate_index: int, place: int) -> Callable[..., None]:
    """Returns a loop; ``rate_index`` below 0: the updater has no learning rate.

    The same one again for the same arguments, so that it is compiled once.
    """

    def loop(values, delta, state, stride, hyper, count):
        decay = hyper[place]
        if rate_index >= 0:
            decay = hyper[rate_index] * hyper[place]
        for i in range(count):
            values[i] -= decay * values[i]
        inner(values, delta, state, stride, hyper, count)

    return loop


def decayed(updater: Updater, decay: float) -> Updater:
    """Returns an updater before whose step ``values -= rate decay values``; see ``transformations.weight_decay``."""
    if updater.decays:
        raise ValueError(f"{updater.name} brings a decay of its own: give it that")
    if any(state.per == "table" for state in states_of(updater.states)):
        raise ValueError(
            f"{updater.name} counts the steps of the whole table behind its hyperparameters, where the decay would be: "
            "use the form that keeps a count for each element, or adamw"
        )
    rate_index = -1 if updater.rate_index is None else updater.rate_index
    loop = _decayed(updater.apply, rate_index, len(updater.hyper))
    return replace(
        updater, name=f"weight_decay+{updater.name}", apply=loop, hyper=(*updater.hyper, float(decay)), decays=True
    )


def _named(updater: Updater) -> Callable[..., None]:
    """Returns the loop of one of our own updaters, which calls itself what it is called below."""
    loop = decayed(updater, 1.0).apply
    loop.__name__ = loop.__qualname__ = f"_decayed_{updater.name}"
    return loop


# A loop that stands under its own name in a module is compiled once on a machine; a user's is, in each process.
_decayed_adagrad = _named(adagrad())
_decayed_adam = _named(adam())
_decayed_add = _named(add())
_decayed_mean = _named(mean())
_decayed_momentum = _named(momentum())
_decayed_nesterov = _named(nesterov())
_decayed_rmsprop = _named(rmsprop())
_decayed_rowwise_adagrad = _named(rowwise_adagrad())
_decayed_sgd = _named(sgd())
