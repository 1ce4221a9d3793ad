"""Keras 1.2.2 and 2.3.1, whose models are lists of the backend's shared variables."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

from keras import backend
from keras.callbacks import Callback

from multiverso.errors import ShapeMismatchError
from multiverso.params import Array
from multiverso.rules import Rule, RuleName
from multiverso.theano_ext.param_manager import MVModelParamManager


class KerasParamManager(MVModelParamManager):
    """Shares a Keras model's weights between all workers: collective.

    Weights that are not trainable (a batch normalisation's moving mean and variance) are averaged. A weight
    that several layers share is shared once.

    Args:
        model: a built model; of a ``Sequential`` or a functional one, nested or not.
        rule: how weights are exchanged (`multiverso.rules`, or a name: ``"easgd"``); changes add up by default.

    Examples:
        >>> manager = KerasParamManager(model)  # doctest: +SKIP
        >>> manager.sync_all_param()  # after each minibatch  # doctest: +SKIP
    """

    def __init__(self, model: Any, *, rule: Rule | RuleName | None = None) -> None:
        # Freezing a layer moves its weights in model.weights; here each keeps its place.
        self._weights = _weights_of(model)
        super().__init__(model, rule=rule)

    def get_all_param_values(self) -> Sequence[Array]:
        """Returns the values of all weights, each once.

        Raises:
            ShapeMismatchError: the model has other weights than when this manager was made.
        """
        now = _weights_of(self.model)
        if {id(weight) for weight in now} != {id(weight) for weight in self._weights}:
            raise ShapeMismatchError(
                f"the model had {len(self._weights)} weights when its {type(self).__name__} was made and has "
                f"{len(now)} now, or different ones; make a new manager after a change of its layers"
            )
        values: Sequence[Array] = backend.batch_get_value(self._weights)
        return values

    def set_all_param_values(self, params: list[Array]) -> None:
        """Gives each weight its new value."""
        backend.batch_set_value(list(zip(self._weights, params, strict=True)))

    def statistic_indices(self) -> Iterable[int]:
        """Returns which weights are not trainable."""
        trainable = {id(weight) for weight in self.model.trainable_weights}
        return [index for index, weight in enumerate(self._weights) if id(weight) not in trainable]


def _weights_of(model: Any) -> list[Any]:
    return list({id(weight): weight for weight in model.weights}.values())


class MVCallback(Callback):  # type: ignore[misc]  # Keras has no types
    """Shares a model's weights while ``model.fit`` runs: collective.

    Args:
        model: the compiled model that is fitted.
        freq: how many minibatches there are from one exchange to the next.
        rule: how weights are exchanged (`multiverso.rules`, or a name: ``"easgd"``); changes add up by default.

    Raises:
        ValueError: ``freq`` below 1; no table has been made.
        TypeError: ``freq`` that is not an integer.

    Examples:
        >>> model.fit(x, y, callbacks=[MVCallback(model)])  # doctest: +SKIP
    """

    def __init__(self, model: Any, freq: int = 1, *, rule: Rule | RuleName | None = None) -> None:
        super().__init__()
        self.freq = operator.index(freq)
        if self.freq < 1:
            raise ValueError(f"freq={freq}: expected at least 1 minibatch between two exchanges")
        self.kpm = KerasParamManager(model, rule=rule)
        self._pending = 0

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        """Exchanges when it is time."""
        self._pending += 1
        if self._pending >= self.freq:
            self._exchange()

    def on_train_end(self, logs: Any = None) -> None:
        """Exchanges what the last minibatches changed, where their number is not a multiple of ``freq``."""
        if self._pending:
            self._exchange()

    def _exchange(self) -> None:
        self.kpm.sync_all_param()
        self._pending = 0
