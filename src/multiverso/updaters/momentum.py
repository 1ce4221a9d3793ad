"""Updaters with a velocity.

Heavy-ball momentum: Polyak 1964, in the form that PyTorch uses. Nesterov's momentum: Sutskever et al. 2013, in the form
that PyTorch and DiLoCo use. Delayed Nesterov momentum: Liu et al., Asynchronous local-SGD training for language
modeling, arXiv 2401.09135.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from multiverso.checks import fraction, not_negative, positive, whole
from multiverso.spec.states import State
from multiverso.updaters.updater import Updater


def _momentum(values, delta, state, stride, hyper, count):
    rate = hyper[0]
    momentum = hyper[1]
    for i in range(count):
        velocity = momentum * state[i] + delta[i]
        state[i] = velocity
        values[i] -= rate * velocity


def momentum(learning_rate: float = 0.01, momentum: float = 0.9) -> Updater:
    """Returns ``v = momentum v + delta; values -= rate v``; deltas are gradients.

    Args:
        learning_rate: above 0.
        momentum: from 0, less than 1.
    """
    hyper = (positive(learning_rate, "learning rate"), fraction(momentum, "momentum"))
    return Updater("momentum", _momentum, states=(State("momentum"),), hyper=hyper, rate_index=0)


def _nesterov(values, delta, state, stride, hyper, count):
    rate = hyper[0]
    momentum = hyper[1]
    for i in range(count):
        velocity = momentum * state[i] + delta[i]
        state[i] = velocity
        values[i] += rate * (delta[i] + momentum * velocity)


def nesterov(learning_rate: float = 0.7, momentum: float = 0.9) -> Updater:
    """Returns ``v = momentum v + delta; values += rate (delta + momentum v)``; deltas point downhill.

    Args:
        learning_rate: above 0.
        momentum: from 0, less than 1.
    """
    hyper = (positive(learning_rate, "learning rate"), fraction(momentum, "momentum"))
    return Updater("nesterov", _nesterov, states=(State("momentum"),), hyper=hyper, rate_index=0)


# When workers push one after another instead of together, Nesterov's momentum is applied to each push as if it were a
# whole round, and the velocity follows single workers. Here it changes only after as many pushes as there are workers,
# by their mean; each push by itself is applied at once, as a plain step.
def _delayed_nesterov(values, delta, state, stride, hyper, count):
    rate = hyper[0]
    beta = hyper[1]
    pushes = hyper[2]
    share = hyper[3]
    last_share = hyper[4]
    one = hyper[5]
    for i in range(count):
        velocity = state[i]
        total = state[stride + i] + delta[i]
        pushed = state[2 * stride + i] + one
        part = share
        if pushed >= pushes:
            velocity = beta * velocity + total / pushes
            total = 0
            pushed = 0
            part = last_share
        state[i] = velocity
        state[stride + i] = total
        state[2 * stride + i] = pushed
        values[i] += rate * (part * beta * velocity + delta[i] / pushes)


def delayed_nesterov(
    workers: int, learning_rate: float = 0.7, momentum: float = 0.9, activation: float = 0.0
) -> Updater:
    """Returns Nesterov's momentum that changes once in as many pushes as there are workers; deltas point downhill.

    With the sum D of the last N = ``workers`` deltas, after the N-th: ``v = momentum v + D / N``. Each push:
    ``values += rate (c momentum v + delta / N)`` with c = ``activation``, but ``1 - c N + c`` at the N-th. So N equal
    pushes together are one step of `nesterov`. For asynchronous jobs; of a round's sum it would take N for one.

    Args:
        workers: pushes between two changes of the velocity, 1 or more.
        learning_rate: above 0.
        momentum: from 0, less than 1.
        activation: how much of the velocity each push applies before the N-th, from 0 to 1 / workers.
    """
    workers = whole(workers, "workers", 1)
    if not_negative(activation, "activation") > 1 / workers:
        raise ValueError(f"the activation is from 0 to 1 / workers; got {activation!r} for {workers} workers")
    rate, beta, share = (positive(learning_rate, "learning rate"), fraction(momentum, "momentum"), float(activation))
    return Updater(
        "delayed_nesterov",
        _delayed_nesterov,
        states=(State("momentum"), State("sum_of_deltas"), State("pushes")),
        hyper=(rate, beta, float(workers), share, 1 - share * workers + share, 1.0),
        rate_index=0,
    )
