"""Sharing a model while ``model.fit`` runs."""

from __future__ import annotations

import os
from typing import Any

from keras.callbacks import Callback

from multiverso.checkpoints import random_state, set_random_state
from multiverso.checks import whole
from multiverso.keras.param_manager import ParamManager
from multiverso.rules import Rule, RuleName
from multiverso.runtime import Session
from multiverso.runtime.session.current import current


class MVCallback(Callback):  # type: ignore[misc]  # Keras is seen as untyped
    """Shares a model's weights while ``model.fit`` runs: collective.

    Exchanges after every ``freq`` minibatches, and before each validation and at each epoch's end what is left,
    so that what is validated is what is shared. Each worker fits on a part of the data of its own.

    Args:
        model: the model that is fitted.
        freq: how many minibatches there are from one exchange to the next.
        directory: save the run here at the end of each epoch; the same for all workers (see `resume`).
        rule: how weights are exchanged (`multiverso.rules`, or a name: ``"easgd"``); changes add up (ASGD) by default.
        session: the session to use instead of the current one.

    Raises:
        ValueError: ``freq`` is not a whole number, 1 or more; no table has been made.
        TypeError: no model.

    Attributes:
        kpm: the `ParamManager`.

    Examples:
        >>> model.fit(x, y, callbacks=[MVCallback(model)])  # doctest: +SKIP
    """

    def __init__(
        self,
        model: Any,
        freq: int = 1,
        *,
        directory: str | os.PathLike[str] | None = None,
        rule: Rule | RuleName | None = None,
        session: Session | None = None,
    ) -> None:
        super().__init__()
        if not hasattr(model, "weights"):
            raise TypeError(f"MVCallback(model, freq): the model comes first; got {type(model).__name__}")
        self.freq = whole(freq, "freq", 1)
        self.kpm = ParamManager(model, rule=rule, session=session)
        self._session = session
        self._directory = directory
        self._random: dict[str, Any] | None = None  # to continue with, after a resume
        self._apart: int | None = None  # a number of its own for a worker that continues from another one's
        self._fitting = False
        self._pending = 0
        self._seen = -1

    def on_train_begin(self, logs: Any = None) -> None:
        """Begins to count.

        Raises:
            ValueError: another model is fitted.
        """
        if self.model is not self.kpm.model:
            raise ValueError(
                f"this MVCallback shares the model {self.kpm.model.name!r}, and {self.model.name!r} is fitted with it: "
                "make one for the model that is fitted"
            )
        self._fitting, self._pending = True, 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Minibatches are numbered from 0 again."""
        self._seen = -1
        if self._random is not None:  # only now: the start of `fit` has drawn from them
            set_random_state(self._random, self._apart)
            self._random = None

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
        """Exchanges what is left, and saves where there is a directory."""
        if self._pending:
            self._exchange()
        if self._directory is not None:
            variables = [variable.numpy() for variable in self._optimizer().variables]
            own = {"epoch": epoch + 1, "optimizer": variables, "random": random_state()}
            self.kpm.save(self._directory, own)

    def resume(self) -> int:
        """Goes back to what was saved in ``directory``, if anything was: collective; before ``fit``.

        That is the weights, the rule's state, the compiled optimizer's, and the random numbers of Python, NumPy,
        torch and the model's seeds. What other callbacks keep (``ReduceLROnPlateau``) is not part of it.

        Returns:
            How many epochs there were, for ``fit(initial_epoch=...)``; 0 if nothing was saved yet.

        Examples:
            >>> callback = MVCallback(model, directory="saved")  # doctest: +SKIP
            >>> model.fit(
            ...     x, y, epochs=9, initial_epoch=callback.resume(), callbacks=[callback]
            ... )  # doctest: +SKIP
        """
        if self._directory is None:
            raise ValueError("MVCallback was given no directory= to resume from")
        optimizer = self._optimizer()
        own = self.kpm.load(self._directory, missing_ok=True)
        if own is None:
            return 0
        for variable, value in zip(optimizer.variables, own["optimizer"], strict=True):
            variable.assign(value)
        self._random = own["random"]
        self._apart = (self._session or current()).worker_id if self.kpm.newcomer else None
        return int(own["epoch"])

    def _optimizer(self) -> Any:
        optimizer = self.kpm.model.optimizer
        if optimizer is None:
            raise ValueError(f"the model {self.kpm.model.name!r} has no optimizer yet: compile it first")
        if not optimizer.built:
            optimizer.build(self.kpm.model.trainable_variables)
        return optimizer

    def on_train_end(self, logs: Any = None) -> None:
        """Exchanges nothing: another callback may have put older weights back (``restore_best_weights``)."""
        self._fitting = False

    def _exchange(self) -> None:
        self.kpm.sync_all_param()
        self._pending = 0
