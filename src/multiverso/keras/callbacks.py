"""Sharing a model while ``model.fit`` runs."""

from __future__ import annotations

import operator
from typing import Any

from keras.callbacks import Callback

from multiverso.keras.param_manager import ParamManager
from multiverso.rules import Rule
from multiverso.runtime import Session


class MVCallback(Callback):  # type: ignore[misc]  # Keras is seen as untyped
    """Shares a model's weights while ``model.fit`` runs: collective.

    Exchanges after every ``freq`` minibatches, and before each validation and at each epoch's end what is left,
    so that what is validated is what is shared. Each worker fits on a part of the data of its own.

    Args:
        model: the model that is fitted.
        freq: exchange after every so many minibatches.
        rule: how weights are exchanged (`multiverso.rules`); changes add up (ASGD) by default.
        session: the session to use instead of the current one.

    Raises:
        ValueError: ``freq`` below 1; no table has been made.
        TypeError: ``freq`` that is not an integer.

    Attributes:
        kpm: the `ParamManager`.

    Example:
        >>> model.fit(x, y, callbacks=[MVCallback(model)])  # doctest: +SKIP
    """

    def __init__(
        self, model: Any, freq: int = 1, *, rule: Rule | None = None, session: Session | None = None
    ) -> None:
        super().__init__()
        self.freq = operator.index(freq)
        if self.freq < 1:
            raise ValueError(f"freq={freq}: expected at least 1 minibatch between two exchanges")
        self.kpm = ParamManager(model, rule=rule, session=session)
        self._fitting = False
        self._pending = 0
        self._seen = -1

    def on_train_begin(self, logs: Any = None) -> None:
        """Begins to count."""
        self._fitting, self._pending = True, 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Minibatches are numbered anew."""
        self._seen = -1

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Exchanges when it is time. With ``steps_per_execution`` a call stands for several minibatches."""
        self._pending += batch - self._seen
        self._seen = batch
        if self._pending >= self.freq:
            self._exchange()

    def on_test_begin(self, logs: Any = None) -> None:
        """Exchanges what is left, so that the shared weights are validated."""
        if self._fitting and self._pending:
            self._exchange()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Exchanges what is left."""
        if self._pending:
            self._exchange()

    def on_train_end(self, logs: Any = None) -> None:
        """Exchanges nothing: another callback may have put older weights back (``restore_best_weights``)."""
        self._fitting = False

    def _exchange(self) -> None:
        self.kpm.sync_all_param()
        self._pending = 0
