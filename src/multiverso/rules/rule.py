"""What a rule is: how a worker's parameters and the shared ones move each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from multiverso.checks import whole
from multiverso.spec.modes import MODES
from multiverso.spec.states import MOST_HYPER, states_of
from multiverso.updaters import Updater, add

STARTS = ("centre", "zeros")


@dataclass(frozen=True)
class Rule:
    """One worker-side algorithm: two plain loops over flat arrays, and what they need.

    Both loops are compiled by Numba and get pointers of the table's dtype; they run over one part of the
    parameters after another, ``count`` elements each, so element i depends on the elements i alone. Element i
    of the k-th array of the worker's local state is ``state[k * stride + i]``, hyperparameter j is ``hyper[j]``.

    Asynchronously and with bounded staleness, push, updater and pull of one part are one pass under its lock.
    In synchronous mode the pushes of all workers read the centre of the last round, their deltas are folded
    in worker order, and the pulls read the new centre.

    Attributes:
        name: its name in error messages and tables of results.
        push: ``push(centre, local, state, stride, hyper, delta, count)`` reads the centre and writes what this
            worker contributes to ``delta``; it may change ``local`` and ``state``.
        pull: ``pull(centre, local, state, stride, hyper, count)`` reads the centre after the contribution; it
            may change ``local`` and ``state``. None for a rule whose push has said all.
        per_worker: what each array of the worker's local state, of the table's size, holds at first: ``"centre"`` (a
            copy of the parameters) or ``"zeros"``. They live in the shared segment.
        updater: how deltas reach the centre. The arrays that are shared beside it are this updater's, since
            only it changes what is shared.
        hyper: its hyperparameters; at most 8.
        modes: the consistencies that it is defined for, of ``"async"``, ``"bounded"``, ``"sync"``.
        push_every: pushes at every so many exchanges.
        pull_every: pulls at every so many exchanges.
        convex: the centre goes part of the way to a worker's values and never beyond: between hosts, too, it stays
            between what these have.
    """

    name: str
    push: Callable[..., None] = field(repr=False)
    pull: Callable[..., None] | None = field(default=None, repr=False)
    per_worker: tuple[str, ...] = ()
    updater: Updater = field(default_factory=add)
    hyper: tuple[float, ...] = ()
    modes: tuple[str, ...] = tuple(MODES)
    push_every: int = 1
    pull_every: int = 1
    convex: bool = False

    def __post_init__(self) -> None:
        if not self.modes or any(mode not in MODES for mode in self.modes):
            raise ValueError(f"the modes of rule {self.name} must be some of {tuple(MODES)}; got {self.modes!r}")
        if any(start not in STARTS for start in self.per_worker):
            raise ValueError(f"the local state of rule {self.name} begins as one of {STARTS}; got {self.per_worker!r}")
        if len(self.hyper) > MOST_HYPER:
            raise ValueError(f"a rule has at most {MOST_HYPER} hyperparameters; {self.name} has {len(self.hyper)}")
        for what in ("push_every", "pull_every"):
            whole(getattr(self, what), what, 1)

    @property
    def shared(self) -> int:
        """How many arrays of the table's size are shared beside the centre."""
        return sum(state.per == "element" for state in states_of(self.updater.states))

    def __str__(self) -> str:
        every = (
            f" push={self.push_every} pull={self.pull_every}" if (self.push_every, self.pull_every) != (1, 1) else ""
        )
        values = [f"{value:g}" for value in (*self.hyper, *self.updater.hyper)]
        return f"{self.name}{'(' + ', '.join(values) + ')' if values else ''}{every}"
