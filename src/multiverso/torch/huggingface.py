"""Sharing a model while Hugging Face's Trainer trains it."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from multiverso.torch.param_manager import ParamManager

if find_spec("transformers") is None:
    raise ImportError(
        'multiverso.torch.huggingface needs transformers: pip install "multiverso[torch]" "transformers[torch]"',
        name="transformers",
    )

from transformers import TrainerCallback


class MVCallback(TrainerCallback):  # type: ignore[misc]  # transformers is seen as untyped
    """Shares the model that is trained, from the beginning of ``trainer.train`` on: collective.

    Exchanges after every so many steps of the optimizer, and at each epoch's end what is left. Each worker is
    a Trainer of its own on one device, with a part of the data.

    Args:
        options: what `multiverso.torch.ParamManager` takes: ``every=``, ``rule=``, ``overlap=``, ...

    Attributes:
        manager: the `ParamManager`, once training has begun.

    Example:
        >>> Trainer(model, arguments, train_dataset=part, callbacks=[MVCallback()])  # doctest: +SKIP
    """

    def __init__(self, **options: Any) -> None:
        self._options = options
        self.manager: ParamManager | None = None
        self._pending = False

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
        """Shares the model, which is on its device and has its checkpoint by now."""
        self.manager = ParamManager(model, **self._options)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Exchanges when it is time."""
        if self.manager is not None:
            self._pending = not self.manager.step()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Exchanges what is left, so that the shared parameters are evaluated and saved."""
        self._finish()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Exchanges what is left."""
        self._finish()

    def _finish(self) -> None:
        if self.manager is not None:
            self.manager.flush()
            if self._pending:
                self.manager.sync_all_param()
                self._pending = False
