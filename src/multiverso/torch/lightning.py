"""Sharing a module while Lightning's Trainer fits it."""

from __future__ import annotations

import os
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from multiverso.checkpoints import is_newcomer, random_state, read_tree, set_random_state, worker_folder, write_tree
from multiverso.runtime.session.current import current
from multiverso.torch.param_manager import ParamManager

_NAMES = {"pytorch_lightning": "pytorch_lightning", "lightning": "lightning.pytorch"}
_found = [module for name, module in _NAMES.items() if find_spec(name) is not None]
if not _found:
    raise ImportError(
        'multiverso.torch.lightning needs Lightning: pip install "multiverso[torch]" pytorch-lightning',
        name="pytorch_lightning",
    )
_CHECKPOINT, _RANDOM = "lightning.ckpt", "random.safetensors"
_Callback: Any = import_module(_found[0]).Callback


class MVCallback(_Callback):  # type: ignore[misc]  # Lightning is seen as untyped
    """Shares the module that is fitted, from the beginning of ``trainer.fit`` on: collective.

    Exchanges after every ``every`` steps of the optimizer, and before each validation and at the end what is
    left. Each worker is a Trainer of its own on one device (``devices=1``), with a part of the data.

    Args:
        directory: save the run here at the end of each epoch; the same for all workers (see `resume`).
        options: what `multiverso.torch.ParamManager` takes: ``every=``, ``rule=``, ``overlap=``, ...

    Attributes:
        manager: the `ParamManager`, once fitting has begun.

    Example:
        >>> Trainer(callbacks=[MVCallback(every=3)], devices=1).fit(module, loader)  # doctest: +SKIP
    """

    def __init__(self, *, directory: str | os.PathLike[str] | None = None, **options: Any) -> None:
        super().__init__()
        self._directory = directory
        self._folder: Path | None = None  # to go on from
        self._apart: int | None = None  # a number of its own for a worker that goes on from another one's
        self._options = options
        self.manager: ParamManager | None = None
        self._steps = 0
        self._pending = False

    def resume(self) -> str | None:
        """Returns this worker's checkpoint of Lightning's in ``directory``, or None if nothing was saved yet.

        Give it to ``fit``, and when training begins the job goes on where it was saved: Lightning restores its loops
        and optimizers, and this callback the shared parameters, this worker's own, the rule's state and the random
        numbers of Python, NumPy and torch.

        Example:
            >>> callback = MVCallback(directory="saved")  # doctest: +SKIP
            >>> Trainer(callbacks=[callback], devices=1).fit(
            ...     module, loader, ckpt_path=callback.resume()
            ... )  # doctest: +SKIP
        """
        if self._directory is None:
            raise ValueError("MVCallback was given no directory= to resume from")
        session = self._options.get("session") or current()
        self._folder = worker_folder(session, self._directory)
        self._apart = session.worker_id if is_newcomer(session, self._directory) else None
        return None if self._folder is None else str(self._folder / _CHECKPOINT)

    def on_fit_start(self, *_: Any) -> None:
        """Puts the random numbers back: before the loader is asked for the next epoch."""
        if self._folder is not None:
            set_random_state(read_tree(self._folder / _RANDOM), self._apart)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Shares the module, which is on its device and has its checkpoint by now."""
        self.manager = ParamManager(pl_module, **self._options)
        self._steps = trainer.global_step
        if self._folder is not None and self._directory is not None:
            own = self.manager.load(self._directory) or {}
            self._pending = own["pending"]
            self._folder = None

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Saves, where there is a directory."""
        if self._directory is None or self.manager is None:
            return

        def write(folder: Path) -> None:
            trainer.save_checkpoint(folder / _CHECKPOINT)
            write_tree(folder / _RANDOM, random_state())

        self.manager.save(self._directory, {"pending": self._pending}, files=write)

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
