"""A manager to be subclassed: any model whose parameters can be read and set as a list of arrays."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from multiverso.checkpoints import Parts
from multiverso.errors import DtypeMismatchError, ShapeMismatchError
from multiverso.params import Array, Model, Resumable, SharedParams, check_unshared
from multiverso.rules import Rule, RuleName
from multiverso.spec.table import Initial


class MVModelParamManager(Resumable, ABC):
    """Shares a model's parameters between all workers: collective.

    A subclass says how the parameters are read and set (`get_all_param_values`, `set_all_param_values`), and,
    where the model has statistics such as a running mean, which ones they are (`statistic_indices`). All
    workers begin with the master worker's values, which the constructor sets in the model.

    Attributes:
        model: what the constructor was given.

    Examples:
        >>> class Manager(MVModelParamManager):
        ...     def get_all_param_values(self):
        ...         return [self.model.weights, self.model.bias]
        ...
        ...     def set_all_param_values(self, params):
        ...         self.model.weights, self.model.bias = params
    """

    def __init__(self, model: Any, *, rule: Rule | RuleName | None = None) -> None:
        """Shares ``model``; returns when every live worker has done so.

        Args:
            model: whatever the subclass's methods read and set.
            rule: how parameters are exchanged (`multiverso.rules`, or a name: ``"easgd"``); changes add up by default.

        Raises:
            DtypeMismatchError: a parameter that is neither a real float nor an integer or boolean.
            ValueError: a model without parameters.
        """
        self.model = model
        self._begin(rule=rule)

    @abstractmethod
    def get_all_param_values(self) -> Sequence[Array]:
        """Returns the model's parameters, a list of arrays that always has the same length and order."""

    @abstractmethod
    def set_all_param_values(self, params: list[Array]) -> None:
        """Sets the model's parameters to ``params``: new arrays, in the order of `get_all_param_values`."""

    def statistic_indices(self) -> Iterable[int]:
        """Returns which of the parameters are averaged instead of summed; none, unless a subclass says so."""
        return ()

    def sync_all_param(self) -> None:
        """Adds what this worker changed since the last call, and sets the model to the values of all.

        Integers and booleans stay as they are in this worker.

        Raises:
            ShapeMismatchError: the model has parameters of other shapes, or another number of them, than when
                this manager was made; nothing has been exchanged.
        """
        values = self._checked()
        self._write(values, self._shared.sync([values[index] for index in self._places]))

    def _checked(self) -> list[Array]:
        values = self._read()
        shapes = [value.shape for value in values]
        if shapes != self._shapes:
            raise ShapeMismatchError(
                f"the model has parameters of the shapes {shapes} now, and had {self._shapes} when its "
                f"{type(self).__name__} was made; make a new one"
            )
        return values

    def _begin(self, initial: Initial = "master", counts: bool = True, rule: Rule | RuleName | None = None) -> None:
        values = self._read()
        summed, averaged = self._parts(values)
        own = [value if counts else np.zeros_like(value) for value in values]
        self._shared = SharedParams([own[i] for i in summed], [own[i] for i in averaged], initial=initial, rule=rule)
        self._shapes = [value.shape for value in values]
        self._places = summed + averaged
        self._write(values, self._shared.values())
        self._shared.model = Model(
            values=lambda: [self._checked()[index] for index in self._places],
            read=lambda: Parts([value for i, value in enumerate(self._read()) if i not in self._places]),
            check=self._check_rest,
            write=self._resume,
        )

    def _check_rest(self, parts: Parts) -> None:
        check_unshared(parts.own, [v for i, v in enumerate(self._checked()) if i not in self._places])

    def _resume(self, shared: list[Array], parts: Parts) -> None:
        rest = iter(parts.own)
        values = [v if i in self._places else next(rest) for i, v in enumerate(self._read())]
        self._write(values, shared)

    def _read(self) -> list[Array]:
        return [np.asarray(value) for value in self.get_all_param_values()]

    def _parts(self, values: list[Array]) -> tuple[list[int], list[int]]:
        for index, value in enumerate(values):
            if value.dtype.kind not in "fiub" and value.dtype.name != "bfloat16":
                raise DtypeMismatchError(
                    f"parameter {index} of the model has dtype {value.dtype}; expected a real float (shared) "
                    "or an integer or boolean (kept in each worker)"
                )
        shared = [index for index, value in enumerate(values) if value.dtype.kind not in "iub"]
        averaged = set(self.statistic_indices())
        return [i for i in shared if i not in averaged], [i for i in shared if i in averaged]

    def _write(self, values: list[Array], shared: list[Array]) -> None:
        for index, value in zip(self._places, shared, strict=True):
            values[index] = value
        self.set_all_param_values(values)
