"""What may be done around an updater: clip what comes in, let values decay, let the learning rate follow a schedule.

A transformation is a record; ``chain`` puts some of them before an updater, and returns an updater.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from multiverso.checks import positive
from multiverso.updaters.around import Clip, Schedule, Transformation, WeightDecay
from multiverso.updaters.decayed import decayed
from multiverso.updaters.updater import Updater


def clip(value: float | None = None, *, norm: float | None = None) -> Clip:
    """Returns a transformation that bounds what workers add, before it is applied.

    Args:
        value: each number is brought into [-value, value].
        norm: what has a larger L2 norm is scaled down to it: the delta of a whole table, or each row's where rows are
            added. After the bound of each number, if both are given.
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
    """Returns a transformation that sets the learning rate by how many adds the table has had.

    Worker 0 sets it, for all workers, at each of its own adds and exchanges: it has to add, too. Once it has left, or
    died in a job that continues, the lowest worker that is still there does. In a job on several hosts each host has
    such a worker, which goes by that host's adds.

    Args:
        rate: the learning rate, above 0, as a function of the number of adds and exchanges of all workers so far (in
            synchronous mode, of rounds): `cosine`, `inverse_square_root`, or any other.
    """
    if not callable(rate):
        raise TypeError(f"schedule takes a function of the number of steps; got {rate!r}")
    return Schedule(rate)


def chain(*parts: Transformation | Updater) -> Updater:
    """Returns an updater that does what each part says.

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
