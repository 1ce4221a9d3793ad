"""Many shared variables as one: a model's parameters in a single exchange."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

from multiverso.params import Array, Model, Resumable, SharedParams
from multiverso.rules import Rule, RuleName
from multiverso.runtime import Session
from multiverso.theano.framework import array_of


class ParamManager(Resumable):
    """Shares a list of shared variables between all workers, in one table for each dtype: collective.

    All workers begin with the master worker's values.

    Args:
        variables: shared variables of Theano or PyTensor, of a floating dtype and any shape; one that is
            listed twice (tied parameters) is shared once.
        statistics: shared variables that are averaged and not summed: a batch normalisation's running mean.
        every: `step` exchanges at every N-th call (a bare number), or after that much time (a ``timedelta``).
        fragments: the parameters are cut into so many parts that take turns, each at every ``every`` steps, so that
            each exchange moves that much less (`multiverso.params.SharedParams`).
        rule: how parameters are exchanged (`multiverso.rules`, or a name: ``"easgd"``); changes add up by default.
        name: create, or attach to, the tables of this name.
        session: the session to use instead of the current one.

    Raises:
        DtypeMismatchError: a variable that is not of a floating dtype.
        ValueError: no variables at all.

    Examples:
        >>> manager = ParamManager([W, b])  # doctest: +SKIP
        >>> manager.sync_all_param()  # after each minibatch  # doctest: +SKIP
    """

    def __init__(
        self,
        variables: Iterable[Any],
        statistics: Iterable[Any] = (),
        *,
        every: int | timedelta = 1,
        fragments: int = 1,
        rule: Rule | RuleName | None = None,
        name: str | None = None,
        session: Session | None = None,
    ) -> None:
        if hasattr(variables, "get_value"):
            raise TypeError(f"ParamManager(variables) shares a list of shared variables: [{variables}] for one")
        averaged = list({id(variable): variable for variable in statistics}.values())
        seen = {id(variable) for variable in averaged}
        summed = list({id(v): v for v in variables if id(v) not in seen}.values())
        self._variables = summed + averaged
        self._shared = SharedParams(
            [array_of(variable) for variable in summed],
            [array_of(variable) for variable in averaged],
            name=name,
            every=every,
            fragments=fragments,
            rule=rule,
            session=session,
        )
        self._shared.hold.take(self._variables)
        self._set(self._shared.values())
        self._shared.model = Model(values=self._values, write=lambda values, _: self._set(values))

    def sync_all_param(self) -> None:
        """Adds what this worker changed since the last call, and takes the values of all, in one exchange.

        Raises:
            ShapeMismatchError: a variable has been given a value of another shape; nothing has been
                exchanged.
        """
        self._sync(whole=True)

    def _sync(self, whole: bool) -> None:
        self._set(self._shared.sync(self._values(), whole))

    def _values(self) -> list[Array]:
        return [array_of(variable) for variable in self._variables]

    def _set(self, values: list[Array]) -> None:
        for variable, value in zip(self._variables, values, strict=True):
            variable.set_value(value, borrow=True)  # a fresh array, which is the variable's from now on
