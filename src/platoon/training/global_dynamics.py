"""Synchronous training: what all workers do together after each has trained on its own part.

Each rule is made for the parameters once (`make_rule`) and called at every synchronisation. Parameters are
Theano or PyTensor shared variables, torch tensors, NumPy arrays, or Keras variables; one of them or a list.
All workers call the same rules in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from platoon.channel.worker import Worker
from platoon.ops import current_worker
from platoon.params import adapt
from platoon.util import PlatoonError

__all__ = ["SGD", "AverageSGD", "Downpour", "EASGD", "GlobalDynamics", "SumSGD"]


class GlobalDynamics:
    """A rule of your own: give `register_fn` a function, or override `make_rule`.

    Args:
        worker: this process's worker; by default the current one, when it is first needed.
    """

    def __init__(self, worker: Worker | None = None) -> None:
        self._worker = None if worker is None else current_worker(worker)
        self._fn: Callable[[], Any] | None = None

    def __call__(self) -> None:
        """Does what the rule says, together with all workers."""
        if self._fn is None:
            raise NotImplementedError(f"{type(self).__name__} has nothing to do yet: call make_rule() first")
        self._fn()

    @property
    def worker(self) -> Worker:
        """The worker through which the rule reaches the others."""
        if self._worker is None:
            self._worker = current_worker(None)
        return self._worker

    @worker.setter
    def worker(self, worker: Worker) -> None:
        self._worker = current_worker(worker)

    def register_fn(self, fun: Callable[[], Any]) -> None:
        """Sets what a call does: a function without arguments, which changes the parameters in place."""
        if not callable(fun):
            raise TypeError(f"a function without arguments was expected; got {type(fun).__name__}")
        self._fn = fun

    def make_rule(self, *args: Any) -> None:
        """Makes the rule for some parameters; override it."""
        raise NotImplementedError(f"{type(self).__name__} does not override make_rule()")


class _Made(GlobalDynamics):
    """A rule that is made by `make_rule` alone."""

    def register_fn(self, fun: Callable[[], Any]) -> None:
        raise AttributeError(f"{type(self).__name__} has its own function: use make_rule()")

    def _sum(self, value: Any, average: bool = False) -> None:
        self.worker.all_reduce(value, "average" if average else "sum", value)


class SGD(_Made):
    """Synchronous SGD: the updates that the workers found are summed or averaged.

    Args:
        average: whether to average them.
        worker: this process's worker.
    """

    def __init__(self, average: bool = False, worker: Worker | None = None) -> None:
        super().__init__(worker)
        self.average = average

    def make_rule(self, local_updates: Any) -> None:
        """Makes the rule.

        Args:
            local_updates: the updates (or gradients) of this worker, which become those of all. Few large
                arrays are quicker than many small ones.
        """
        updates = _values(local_updates)

        def together() -> None:
            for update in updates:
                with update as value:
                    self._sum(value, self.average)

        self._fn = together


def SumSGD(worker: Worker | None = None) -> SGD:
    """Returns `SGD` that sums."""
    return SGD(average=False, worker=worker)


def AverageSGD(worker: Worker | None = None) -> SGD:
    """Returns `SGD` that averages."""
    return SGD(average=True, worker=worker)


class EASGD(_Made):
    """Synchronous elastic averaging: workers and centre are drawn to each other.

    ``f = alpha (local - central); local -= f; central += sum of all workers' f``. Zhang, Choromanska, LeCun,
    "Deep learning with Elastic Averaging SGD", arXiv 1412.6651, equations 2 and 3.
    """

    def make_rule(self, local_particle: Any, central_particle: Any, alpha: Any) -> None:
        """Makes the rule.

        Args:
            local_particle: this worker's parameters.
            central_particle: the centre, a copy in each worker; equal at the beginning, it stays equal.
            alpha: the strength, a number or a shared variable that holds one; the paper takes 0.9 divided by
                the number of workers.

        Raises:
            PlatoonError: the two differ in number or shape, or hold integers.
        """
        pairs = _side_by_side(local_particle, central_particle)
        for pair in pairs:
            for value in pair:
                if not value.floating:
                    raise PlatoonError(f"EASGD moves parameters by fractions, which {value.dtype} cannot hold")
        self.alpha = alpha

        def together() -> None:
            strength = float(alpha.get_value()) if hasattr(alpha, "get_value") else float(alpha)
            for local, central in pairs:
                with local as mine, central as centre:
                    force = (mine - centre) * strength
                    mine -= force
                    self._sum(force)
                    centre += force

        self._fn = together


class Downpour(_Made):
    """Synchronous Downpour: what the workers accumulated goes into the global parameters, which all take.

    Dean et al., "Large scale distributed deep networks", 2012, there asynchronous.

    Args:
        average: whether to average the accumulated updates, instead of summing them.
        worker: this process's worker.
    """

    def __init__(self, average: bool = False, worker: Worker | None = None) -> None:
        super().__init__(worker)
        self.average = average

    def make_rule(self, local_particle: Any, local_acc_updates: Any, global_particle: Any) -> None:
        """Makes the rule.

        Args:
            local_particle: this worker's parameters.
            local_acc_updates: what they changed since the last call; becomes zero.
            global_particle: the global parameters, a copy in each worker; equal at the beginning.

        Raises:
            PlatoonError: the three differ in number or shape.
        """
        triples = _side_by_side(local_particle, local_acc_updates, global_particle)

        def together() -> None:
            for local, accumulated, everyone in triples:
                with local as mine, accumulated as updates, everyone as ours:
                    self._sum(updates, self.average)
                    ours += updates
                    mine[...] = ours
                    updates[...] = 0

        self._fn = together


class _Value:
    """A parameter as a tensor or an array that can be changed in place, within a ``with`` block."""

    def __init__(self, parameter: Any) -> None:
        self._tensor = parameter.detach() if hasattr(parameter, "detach") else None
        self._adapted = None if self._tensor is not None else adapt([parameter])[0]
        known: Any = self._adapted if self._tensor is None else self._tensor
        self.shape, self.dtype = tuple(known.shape), known.dtype
        self.floating = "float" in str(self.dtype)

    def __enter__(self) -> Any:
        if self._adapted is None:
            return self._tensor
        self._value = self._adapted.load()
        return self._value

    def __exit__(self, *error: object) -> None:
        if self._adapted is not None and error[0] is None:
            self._adapted.write(self._value)


def _values(parameters: Any) -> list[_Value]:
    several = isinstance(parameters, list | tuple)
    return [_Value(parameter) for parameter in (parameters if several else [parameters])]


def _side_by_side(*lists: Any) -> list[tuple[_Value, ...]]:
    """Returns the first parameters of all lists, then the second, ..., which have to be of one shape."""
    first, *others = values = [_values(parameters) for parameters in lists]
    for other in others:
        if len(other) != len(first):
            raise PlatoonError(f"the lists have to be of one length; got {len(first)} and {len(other)} parameters")
        for i, (one, two) in enumerate(zip(first, other, strict=True)):
            if one.shape != two.shape:
                raise PlatoonError(
                    f"parameter {i} has to be of one shape in all lists; got {one.shape} and {two.shape}"
                )
    return list(zip(*values, strict=True))
