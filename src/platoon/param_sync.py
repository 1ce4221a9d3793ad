"""The rules by which `Worker.sync_params` exchanges a worker's parameters with the shared ones.

The rules here run on the shared memory itself, one pass over it, a stripe at a time under that stripe's lock.
A rule of your own overrides `ParamSyncRule.update_params`, or `theano_update`, or `make_update_function`; it
works on the whole arrays, so `sync_params` then excludes all other workers for as long as it takes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from platoon.params import adapt

Array = npt.NDArray[Any]
Update = Callable[[Sequence[Array]], None]

__all__ = ["ASGD", "EASGD", "ParamSyncRule"]


class ParamSyncRule:
    """A rule of your own: override one of the three methods."""

    def make_update_function(self, local_params: Any) -> Update:
        """Returns a function that is called with the shared parameters at every synchronisation.

        It changes the arrays that it gets in place, and ``local_params`` as well. This one calls what
        `theano_update` returned or, if that is not overridden, `update_params`.

        Args:
            local_params: what was given to `Worker.init_shared_params`.
        """
        try:
            compiled = self.theano_update(local_params)
        except NotImplementedError:
            return self._update_by_arrays(local_params)

        def update(master_params: Sequence[Array]) -> None:
            for master, value in zip(master_params, compiled(*master_params), strict=True):
                master[...] = value

        return update

    def theano_update(self, local_params: Any) -> Callable[..., Sequence[Any]]:
        """Returns a compiled function from shared values to new ones, which updates the local ones as well.

        Args:
            local_params: a list of Theano or PyTensor shared variables.
        """
        raise NotImplementedError

    def update_params(self, local_params: Sequence[Array], master_params: Sequence[Array]) -> None:
        """Changes both lists of arrays in place; they are in the order of `Worker.init_shared_params`."""
        raise NotImplementedError(f"{type(self).__name__} overrides none of the methods of ParamSyncRule")

    def _update_by_arrays(self, local_params: Any) -> Update:
        parameters = adapt(local_params)

        def update(master_params: Sequence[Array]) -> None:
            local = [parameter.load() for parameter in parameters]
            self.update_params(local, master_params)
            for parameter, value in zip(parameters, local, strict=True):
                parameter.write(value)

        return update


class EASGD(ParamSyncRule):
    """Elastic averaging: worker and shared parameters (the centre) are drawn to each other.

    ``d = alpha (worker - centre); worker -= d; centre += d``, so their sum stays. Zhang, Choromanska, LeCun,
    "Deep learning with Elastic Averaging SGD", arXiv 1412.6651, equations 5 and 6 (asynchronous: section
    3.1).

    Args:
        alpha: how far they move, between 0 (every worker trains alone) and 1 (they change places). The paper
            takes 0.9 divided by the number of workers.
    """

    def __init__(self, alpha: float) -> None:
        self.set_alpha(alpha)

    def get_alpha(self) -> float:
        """Returns alpha."""
        return self.alpha

    def set_alpha(self, alpha: float) -> None:
        """Sets alpha for the synchronisations to come.

        Raises:
            ValueError: it is not between 0 and 1.
        """
        if not 0.0 <= float(alpha) <= 1.0:
            raise ValueError(f"alpha must be between 0 and 1, got {alpha!r}")
        self.alpha = float(alpha)

    def update_params(self, local_params: Sequence[Array], master_params: Sequence[Array]) -> None:
        """The same in NumPy, for arrays of your own."""
        for local, master in zip(local_params, master_params, strict=True):
            difference = (self.alpha * (local - master)).astype(local.dtype)
            local -= difference
            master += difference


class ASGD(ParamSyncRule):
    """Asynchronous SGD: the worker's changes since its last exchange are added to the shared parameters.

    ``shared += worker - last; worker = last = shared``. Dean et al., "Large scale distributed deep networks",
    2012.
    """

    def __init__(self) -> None:
        self._last: list[Array] | None = None

    def make_update_function(self, local_params: Any) -> Update:
        """The same in NumPy, for parameters of your own."""
        self._last = [np.array(parameter.load()) for parameter in adapt(local_params)]
        return super().make_update_function(local_params)

    def update_params(self, local_params: Sequence[Array], master_params: Sequence[Array]) -> None:
        """The same for arrays of your own; the first call only notes them, if nothing was noted before."""
        if self._last is None:
            self._last = [np.array(local) for local in local_params]
        for local, master, last in zip(local_params, master_params, self._last, strict=True):
            master += local - last
            local[...] = master
            last[...] = master
