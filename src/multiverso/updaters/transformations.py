"""What may be done around an updater: clip what comes in, let values decay, let the learning rate follow a schedule.

A transformation is a record; ``chain`` puts some of them before an updater, and returns an updater.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from multiverso.checks import not_negative, positive, whole
from multiverso.spec.states import states_of
from multiverso.updaters.adam import adam
from multiverso.updaters.adaptive import adagrad, rmsprop, rowwise_adagrad
from multiverso.updaters.additions import add, sgd
from multiverso.updaters.momentum import momentum, nesterov
from multiverso.updaters.updater import Clip, Schedule, Transformation, Updater, WeightDecay


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
    """Returns an updater before whose step ``values -= rate decay values``; see `weight_decay`."""
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
_decayed_momentum = _named(momentum())
_decayed_nesterov = _named(nesterov())
_decayed_rmsprop = _named(rmsprop())
_decayed_rowwise_adagrad = _named(rowwise_adagrad())
_decayed_sgd = _named(sgd())


def adamw(
    learning_rate: float = 0.001,
    beta_1: float = 0.9,
    beta_2: float = 0.999,
    epsilon: float = 1e-8,
    weight_decay: float = 0.01,
) -> Updater:
    """Returns Adam's step after ``values -= learning_rate weight_decay values``; deltas are gradients.

    Loshchilov and Hutter, Decoupled weight decay regularization, ICLR 2019 (arXiv 1711.05101), algorithm 2. As PyTorch
    writes it, the decay is multiplied by the learning rate. A number that gets no gradient, as a row that no batch
    names, keeps its moments and its count, and does not decay: the lazy form.

    Args:
        learning_rate: above 0.
        beta_1, beta_2: decay of the first and the second moment, from 0, less than 1.
        epsilon: above 0.
        weight_decay: 0 or more.
    """
    step = adam(learning_rate, beta_1, beta_2, epsilon)
    return replace(decayed(step, not_negative(weight_decay, "weight decay")), name="adamw")


def cosine(rate: float, steps: int, *, warmup: int = 0, least: float = 0.01) -> Callable[[int], float]:
    """Returns a rate that rises linearly for ``warmup`` steps, then falls along half a cosine, and stays there.

    Loshchilov and Hutter, SGDR (arXiv 1608.03983), equation 5, without restarts.

    Args:
        rate: the highest, above 0.
        steps: until it has fallen, those of the rise included; more than ``warmup``.
        warmup: 0 or more.
        least: what it falls to, as a part of ``rate``, above 0.
    """
    highest, lowest = positive(rate, "learning rate"), positive(least, "least part")
    rise = whole(warmup, "warmup", 0)
    fall = whole(steps, "steps", rise + 1) - rise

    def at(step: int) -> float:
        if step < rise:
            return highest * (step + 1) / rise
        done = min((step - rise) / fall, 1.0)
        return highest * (lowest + (1 - lowest) * (1 + math.cos(math.pi * done)) / 2)

    return at


def inverse_square_root(rate: float, warmup: int = 1) -> Callable[[int], float]:
    """Returns a rate that rises linearly for ``warmup`` steps, then falls as one over the square root of the step.

    Vaswani et al., Attention is all you need (arXiv 1706.03762), equation 3.

    Args:
        rate: the highest, above 0.
        warmup: 1 or more.
    """
    highest, rise = positive(rate, "learning rate"), whole(warmup, "warmup", 1)
    return lambda step: highest * min((step + 1) / rise, math.sqrt(rise / (step + 1)))


def clip(value: float | None = None, *, norm: float | None = None) -> Clip:
    """Returns a transformation that bounds what workers add, before it is applied.

    Args:
        value: each number is brought into [-value, value].
        norm: a delta of a larger L2 norm is scaled down to it: of a whole table, or of each row where rows are added.
            After the bound of each number, if both are given.
    """
    if value is None and norm is None:
        raise ValueError("clip takes the largest value, or norm=, the largest norm; got neither")
    bounds = (None if bound is None else positive(bound, "bound") for bound in (value, norm))
    return Clip(*bounds)


def weight_decay(decay: float) -> WeightDecay:
    """Returns a transformation that lets each value that a step changes decay: ``values -= rate decay values`` first.

    The decoupled form (Loshchilov and Hutter, arXiv 1711.05101); with plain gradient descent it is the gradient of
    ``decay / 2`` times the sum of squares. Rows without adds do not decay. Without a learning rate in the
    updater it is ``values -= decay values``.

    Args:
        decay: above 0.
    """
    return WeightDecay(positive(decay, "weight decay"))


def schedule(rate: Callable[[int], float]) -> Schedule:
    """Returns a transformation that sets the learning rate by the table's number of adds.

    The lowest live worker sets it, for all workers, at each of its own adds and exchanges: it has to add, too. In a job
    on several hosts each host has such a worker, which counts that host's adds.

    Args:
        rate: the learning rate, above 0, as a function of the number of adds and exchanges of all workers so far (in
            synchronous mode, of rounds): `cosine`, `inverse_square_root`, or any other.
    """
    if not callable(rate):
        raise TypeError(f"schedule takes a function of the number of steps; got {rate!r}")
    return Schedule(rate)


def chain(*parts: Transformation | Updater) -> Updater:
    """Returns an updater that combines its parts.

    Args:
        parts: transformations in any order, at most one of each kind, and an updater, last.

    Examples:
        >>> from multiverso import updaters as u
        >>> updater = u.chain(u.clip(1.0), u.weight_decay(1e-4), u.schedule(u.cosine(0.1, 1000)), u.adagrad())
        >>> updater.name
        'clip(value=1)+weight_decay+adagrad'

    Raises:
        TypeError: something else, or no updater at the end.
        ValueError: two of a kind; a schedule of an updater without a learning rate.
    """
    *transformations, updater = parts if parts else (None,)
    if not isinstance(updater, Updater):
        raise TypeError(f"the last part of a chain is an updater, such as adagrad(0.1); got {updater!r}")
    kinds = [type(part) for part in transformations]
    if any(not isinstance(part, Transformation) for part in transformations):
        raise TypeError(
            f"before its updater a chain has clip(), weight_decay() and schedule(); got {transformations!r}"
        )
    if len(set(kinds)) < len(kinds) or updater.clip or updater.schedule:
        raise ValueError(f"a chain has at most one transformation of each kind; got {transformations!r}")
    for kind in (Schedule, WeightDecay, Clip):  # so that the name does not depend on the order
        for part in transformations:
            updater = _with(updater, part) if isinstance(part, kind) else updater
    return updater


def _with(updater: Updater, part: Any) -> Updater:
    if isinstance(part, Clip):
        return replace(updater, name=f"{part}+{updater.name}", clip=part)
    if isinstance(part, WeightDecay):
        return decayed(updater, part.decay)
    if updater.rate_index is None:
        raise ValueError(f"the updater {updater.name} has no learning rate that a schedule could set")
    hyper = list(updater.hyper)
    hyper[updater.rate_index] = part(0)
    return replace(updater, hyper=tuple(hyper), schedule=part)
