"""The common part of callbacks of trainers: a trainer fits the model, and its steps exchange."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from multiverso.checkpoints import worker_folder
from multiverso.runtime.session.current import current
from multiverso.torch.param_manager import ParamManager


class Trained:
    """A callback's model, once training has begun. A subclass is a callback of its trainer, too.

    Args:
        directory: where the run is saved, the same for all workers; None: nowhere.
        options: what `ParamManager` takes.

    Attributes:
        manager: the `ParamManager`, once training has begun.
    """

    def __init__(self, directory: str | os.PathLike[str] | None, options: dict[str, Any]) -> None:
        self._directory, self._options = directory, options
        self._folder: Path | None = None  # to continue from
        self._apart: int | None = None  # a number of its own for a worker that continues from another one's
        self.manager: ParamManager | None = None
        self._pending = False

    def _find_saved(self) -> Path | None:
        """Returns what this worker continues from, and notes it; None if nothing was saved yet."""
        if self._directory is None:
            raise ValueError("MVCallback was given no directory= to resume from")
        session = self._options.get("session") or current()
        self._folder, newcomer = worker_folder(session, self._directory) or (None, False)
        self._apart = session.worker_id if newcomer else None
        return self._folder

    def _share(self, module: Any) -> None:
        """Shares a module, which is on its device and has its checkpoint by now."""
        self.manager = ParamManager(module, **self._options)
        if self._folder is not None and self._directory is not None:
            self._pending = (self.manager.load(self._directory) or {})["pending"]
            self._folder = None

    def _save(self, files: Any) -> None:
        """Saves, where there is a directory; ``files`` writes the trainer's part."""
        if self._directory is not None and self.manager is not None:
            self.manager.save(self._directory, {"pending": self._pending}, files=files)

    def _step(self) -> None:
        """Exchanges when it is time."""
        if self.manager is not None:
            self._pending = not self.manager.step()

    def _finish(self) -> None:
        """Exchanges what is left."""
        if self.manager is not None:
            self.manager.flush()
            if self._pending:
                self.manager.sync_all_param()
                self._pending = False
