"""Lasagne networks, shared."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import lasagne

from multiverso.params import Array
from multiverso.tables import ArrayTableHandler
from multiverso.theano_ext.param_manager import MVModelParamManager


class LasagneParamManager(MVModelParamManager):
    """Shares a Lasagne network's parameters between all workers: collective.

    Parameters without the tag ``trainable`` (a batch normalisation's ``mean`` and ``inv_std``) are averaged.

    Args:
        network: the output layer, or a list of output layers.
        rule: how parameters are exchanged (`multiverso.rules`); changes add up by default.

    Examples:
        >>> manager = LasagneParamManager(network)  # doctest: +SKIP
        >>> manager.sync_all_param()  # after each minibatch  # doctest: +SKIP
    """

    def get_all_param_values(self) -> Sequence[Array]:
        """Returns the values of all parameters, in the order of ``lasagne.layers.get_all_params``."""
        return [param.get_value(borrow=True) for param in lasagne.layers.get_all_params(self.model)]

    def set_all_param_values(self, params: list[Array]) -> None:
        """Gives each parameter its new array."""
        for param, value in zip(lasagne.layers.get_all_params(self.model), params, strict=True):
            param.set_value(value, borrow=True)

    def statistic_indices(self) -> Iterable[int]:
        """Returns which parameters are not trainable."""
        trainable = set(lasagne.layers.get_all_params(self.model, trainable=True))
        every = lasagne.layers.get_all_params(self.model)
        return [index for index, param in enumerate(every) if param not in trainable]


class MVNetParamManager(LasagneParamManager):
    """The older manager: a flag says whose values count, and ``update_all_param`` exchanges.

    Args:
        network: the output layer, or a list of output layers.
        is_master_worker: True in the one worker whose network's values all workers begin with; left out, it
            is the master worker.

    Raises:
        ValueError: the flag is True in no worker, or in several.
    """

    def __init__(self, network: Any, is_master_worker: bool | None = None) -> None:
        if is_master_worker is None:
            super().__init__(network)
            return
        self.model = network
        masters = ArrayTableHandler(1, [float(bool(is_master_worker))], initial="sum")
        count = int(masters.snapshot()[0])
        if count != 1:
            raise ValueError(f"is_master_worker is True in {count} workers; expected exactly one")
        self._begin("sum", counts=bool(is_master_worker))

    @property
    def network(self) -> Any:
        """The network, by the older manager's name."""
        return self.model

    def update_all_param(self) -> None:
        """The older name of ``sync_all_param``."""
        self.sync_all_param()
