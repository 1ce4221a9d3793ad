"""Many shared variables as one: a model's parameters in a single exchange."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import numpy as np

from multiverso.errors import ShapeMismatchError
from multiverso.params import SharedParams
from multiverso.runtime import Session
from multiverso.theano.framework import array_of


class ParamManager:
    """Shares a list of shared variables between all workers, in one table for each dtype: collective.

    All workers begin with the master worker's values.

    Args:
        variables: shared variables of Theano or PyTensor, of a floating dtype and any shape; one that is
            listed twice (tied parameters) is shared once.
        statistics: shared variables that are averaged and not summed: a batch normalisation's running mean.
        every: `step` exchanges at every so many calls, or after every so much time.
        name: create, or attach to, the tables of this name.
        session: the session to use instead of the current one.

    Raises:
        DtypeMismatchError: a variable that is not of a floating dtype.
        ValueError: no variables at all.

    Example:
        >>> manager = ParamManager([W, b])  # doctest: +SKIP
        >>> manager.sync_all_param()  # after each minibatch  # doctest: +SKIP
    """

    def __init__(
        self,
        variables: Iterable[Any],
        statistics: Iterable[Any] = (),
        *,
        every: int | timedelta = 1,
        name: str | None = None,
        session: Session | None = None,
    ) -> None:
        averaged = list({id(variable): variable for variable in statistics}.values())
        seen = {id(variable) for variable in averaged}
        summed = list({id(v): v for v in variables if id(v) not in seen}.values())
        self._variables = summed + averaged
        self._shared = SharedParams(
            [array_of(variable) for variable in summed],
            [array_of(variable) for variable in averaged],
            name=name,
            every=every,
            session=session,
        )
        self._views = self._shared.arrays + self._shared.statistics
        self._publish()

    def sync_all_param(self) -> None:
        """Adds what this worker changed since the last call, and takes the values of all, in one exchange.

        Raises:
            ShapeMismatchError: a variable has been given a value of another shape; nothing has been
                exchanged.
        """
        self._collect()
        self._shared.exchange()
        self._publish()

    def step(self) -> bool:
        """Counts one training step, exchanges when that is due (``every=``), and returns whether it did."""
        if not self._shared.due():
            return False
        self.sync_all_param()
        return True

    def _collect(self) -> None:
        values = [array_of(variable) for variable in self._variables]
        for variable, value, view in zip(self._variables, values, self._views, strict=True):
            if value.shape != view.shape:
                raise ShapeMismatchError(
                    f"the shared variable {variable} has the shape {value.shape} now; it was {view.shape} "
                    "when its ParamManager was made. Make a new ParamManager"
                )
        for value, view in zip(values, self._views, strict=True):
            if value is not view:
                np.copyto(view, value, casting="same_kind")

    def _publish(self) -> None:
        # The variables are given the exchanged buffers themselves, so that updates in place need no copy.
        for variable, view in zip(self._variables, self._views, strict=True):
            value = variable.get_value(borrow=True)
            if value is not view:
                same = value.dtype == view.dtype
                variable.set_value(view if same else view.astype(value.dtype), borrow=True)
