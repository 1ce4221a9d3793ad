"""Sharing a module while Lightning's Trainer fits it."""

from __future__ import annotations

import os
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from multiverso.checkpoints import random_state, read_tree, set_random_state, write_tree
from multiverso.torch.trainers import Trained

_NAMES = {"pytorch_lightning": "pytorch_lightning", "lightning": "lightning.pytorch"}
_found = [module for name, module in _NAMES.items() if find_spec(name) is not None]
if not _found:
    raise ImportError(
        'multiverso.torch.lightning needs Lightning: pip install "multiverso[torch]" pytorch-lightning',
        name="pytorch_lightning",
    )
_CHECKPOINT, _RANDOM = "lightning.ckpt", "random.safetensors"
_Callback: Any = import_module(_found[0]).Callback


class MVCallback(Trained, _Callback):  # type: ignore[misc]  # Lightning is seen as untyped
    """Shares the module that is fitted, from the beginning of ``trainer.fit`` on: collective.

    Exchanges after every ``every`` steps of the optimizer, and before each validation and at the end what is
    left. Each worker is a Trainer of its own on one device (``devices=1``), with a part of the data.

    Args:
        directory: save the run here at the end of each epoch; the same for all workers (see `resume`).
        options: what `multiverso.torch.ParamManager` takes: ``every=``, ``rule=``, ``overlap=``, ...

    Attributes:
        manager: the `ParamManager`, once fitting has begun.

    Examples:
        >>> Trainer(callbacks=[MVCallback(every=3)], devices=1).fit(module, loader)  # doctest: +SKIP
    """

    def __init__(self, *, directory: str | os.PathLike[str] | None = None, **options: Any) -> None:
        _Callback.__init__(self)
        Trained.__init__(self, directory, options)
        self._steps = 0

    def resume(self) -> str | None:
        """Returns this worker's checkpoint of Lightning's in ``directory``, or None if nothing was saved yet.

        Give it to ``fit``, and when training begins the job continues where it was saved: Lightning restores its loops
        and optimizers, and this callback the shared parameters, this worker's own, the rule's state and the random
        numbers of Python, NumPy and torch.

        Examples:
            >>> callback = MVCallback(directory="saved")  # doctest: +SKIP
            >>> Trainer(callbacks=[callback], devices=1).fit(
            ...     module, loader, ckpt_path=callback.resume()
            ... )  # doctest: +SKIP
        """
        folder = self._find_saved()
        return None if folder is None else str(folder / _CHECKPOINT)

    def on_fit_start(self, *_: Any) -> None:
        """Puts the random numbers back: before the loader is asked for the next epoch."""
        if self._folder is not None:
            set_random_state(read_tree(self._folder / _RANDOM), self._apart)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Shares the module, which is on its device and has its checkpoint by now."""
        self._share(pl_module)
        self._steps = trainer.global_step

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Saves, where there is a directory."""

        def write(folder: Path) -> None:
            trainer.save_checkpoint(folder / _CHECKPOINT)
            write_tree(folder / _RANDOM, random_state())

        self._save(write)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Exchanges when it is time; batches whose gradients only accumulate do not count."""
        if trainer.global_step != self._steps:
            self._steps = trainer.global_step
            self._step()

    def on_validation_start(self, trainer: Any, *_: Any) -> None:
        """Exchanges what is left, so that the shared parameters are validated."""
        self._finish()

    def on_train_end(self, *_: Any) -> None:
        """Exchanges what is left."""
        self._finish()
