"""Sharing a module while Lightning's Trainer fits it."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from multiverso.torch.param_manager import ParamManager

_NAMES = {"pytorch_lightning": "pytorch_lightning", "lightning": "lightning.pytorch"}
_found = [module for name, module in _NAMES.items() if find_spec(name) is not None]
if not _found:
    raise ImportError(
        'multiverso.torch.lightning needs Lightning: pip install "multiverso[torch]" pytorch-lightning',
        name="pytorch_lightning",
    )
_Callback: Any = import_module(_found[0]).Callback


class MVCallback(_Callback):  # type: ignore[misc]  # Lightning is seen as untyped
    """Shares the module that is fitted, from the beginning of ``trainer.fit`` on: collective.

    Exchanges after every so many steps of the optimizer, and before each validation and at the end what is
    left. Each worker is a Trainer of its own on one device (``devices=1``), with a part of the data.

    Args:
        options: what `multiverso.torch.ParamManager` takes: ``every=``, ``rule=``, ``overlap=``, ...

    Attributes:
        manager: the `ParamManager`, once fitting has begun.

    Example:
        >>> Trainer(callbacks=[MVCallback(every=3)], devices=1).fit(module, loader)  # doctest: +SKIP
    """

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self._options = options
        self.manager: ParamManager | None = None
        self._steps = 0
        self._pending = False

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Shares the module, which is on its device and has its checkpoint by now."""
        self.manager = ParamManager(pl_module, **self._options)
        self._steps = trainer.global_step

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Exchanges when it is time; batches whose gradients only accumulate do not count."""
        if self.manager is not None and trainer.global_step != self._steps:
            self._steps = trainer.global_step
            self._pending = not self.manager.step()

    def on_validation_start(self, trainer: Any, *_: Any) -> None:
        """Exchanges what is left, so that the shared parameters are validated."""
        self._finish()

    def on_train_end(self, *_: Any) -> None:
        """Exchanges what is left."""
        self._finish()

    def _finish(self) -> None:
        if self.manager is not None:
            self.manager.flush()
            if self._pending:
                self.manager.sync_all_param()
                self._pending = False
