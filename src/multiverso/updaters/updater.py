"""What an updater is: how a delta reaches a table's values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from multiverso.spec.states import MOST_HYPER, State, states_of
from multiverso.updaters.around import Clip, Schedule


@dataclass(frozen=True)
class Updater:
    """A rule by which a table takes in what workers add.

    Attributes:
        name: its name in ``updater=``, in saved tables and in error messages; none of those that multiverso's own have.
        apply: ``apply(values, delta, state, stride, hyper, count)``, a plain loop over ``count`` elements
            that changes ``values`` (and ``state``) in place. The arguments are pointers of the table's
            dtype: element i of the updater's k-th array is ``state[k * stride + i]``, hyperparameter j is
            ``hyper[j]``, and a count of steps is ``hyper[len(hyper)]``: this step's number, from 1. It is compiled by
            Numba and runs under the lock of a stripe; in synchronous mode it gets the sum of all workers' deltas of a
            round, once.
        states: what it keeps: arrays of the table's size, in their order; in tables of rows by key, numbers for each
            row after them (``State(name, per="row")``); in others at most one count of the table's steps, the last
            (``State(name, per="table")``). Each is saved under its name. A number stands for so many arrays without
            names, zero at first.
        hyper: its hyperparameters; at most 8.
        rate_index: place of the learning rate among ``hyper``, which can then be set while a job runs
            (``table.learning_rate``); None where there is none.
            Those with a rate multiply by it in ``apply``; for ``add`` and ``sgd``, which have none, the worker does it
            before it adds.
        mean: in synchronous mode, gets the mean over the workers that contributed instead of their sum.
        decays: lets values decay by itself, so that a chain adds no second decay; see ``weight_decay``.
        clip: what adds are bounded by, before they reach ``apply``; see ``chain``.
        schedule: what sets the learning rate; see ``chain``.
    """

    name: str
    apply: Callable[..., None] = field(compare=False)
    states: int | tuple[State, ...] = ()
    hyper: tuple[float, ...] = ()
    mean: bool = False
    rate_index: int | None = None
    decays: bool = False
    clip: Clip | None = None
    schedule: Schedule | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if len(self.hyper) > MOST_HYPER:
            raise ValueError(f"an updater has at most {MOST_HYPER} hyperparameters; {self.name} has {len(self.hyper)}")
        object.__setattr__(self, "states", states_of(self.states))
