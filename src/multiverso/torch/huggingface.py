"""Sharing a model while Hugging Face's Trainer trains it."""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from multiverso.checkpoints import is_newcomer, random_state, set_random_state, worker_folder
from multiverso.runtime.session.current import current
from multiverso.torch.param_manager import ParamManager

if find_spec("transformers") is None:
    raise ImportError(
        'multiverso.torch.huggingface needs transformers: pip install "multiverso[torch]" "transformers[torch]"',
        name="transformers",
    )

from transformers import TrainerCallback


class MVCallback(TrainerCallback):  # type: ignore[misc]  # transformers is seen as untyped
    """Shares the model that is trained, from the beginning of ``trainer.train`` on: collective.

    Exchanges after every ``every`` steps of the optimizer, and at each epoch's end what is left. Each worker is
    a Trainer of its own on one device, with a part of the data.

    Args:
        directory: save the run here whenever the Trainer saves (``save_strategy``); the same for all workers, and all
            have to save at the same steps (see `resume`).
        options: what `multiverso.torch.ParamManager` takes: ``every=``, ``rule=``, ``overlap=``, ...

    Attributes:
        manager: the `ParamManager`, once training has begun.

    Example:
        >>> Trainer(model, arguments, train_dataset=part, callbacks=[MVCallback()])  # doctest: +SKIP
    """

    def __init__(self, *, directory: str | os.PathLike[str] | None = None, **options: Any) -> None:
        self._directory = directory
        self._resumes = False
        self._apart: int | None = None  # a number of its own for a worker that goes on from another one's
        self._options = options
        self.manager: ParamManager | None = None
        self._pending = False

    def resume(self) -> str | None:
        """Returns this worker's checkpoint of the Trainer's in ``directory``, or None if nothing was saved yet.

        Give it to ``train``, and when training begins the job goes on where it was saved: the Trainer restores its
        optimizer, schedule, random numbers and place in the data, and this callback the shared parameters, this
        worker's own and the rule's state.

        Example:
            >>> callback = MVCallback(directory="saved")  # doctest: +SKIP
            >>> trainer = Trainer(model, arguments, callbacks=[callback])  # doctest: +SKIP
            >>> trainer.train(resume_from_checkpoint=callback.resume())  # doctest: +SKIP
        """
        if self._directory is None:
            raise ValueError("MVCallback was given no directory= to resume from")
        session = self._options.get("session") or current()
        folder = worker_folder(session, self._directory)
        self._apart = session.worker_id if is_newcomer(session, self._directory) else None
        self._resumes = folder is not None
        return None if folder is None else str(next(folder.glob("checkpoint-*")))

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
        """Shares the model, which is on its device and has its checkpoint by now."""
        self.manager = ParamManager(model, **self._options)
        if self._resumes and self._directory is not None:
            self._pending = (self.manager.load(self._directory) or {})["pending"]
            self._resumes = False

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Saves the job, with the checkpoint that the Trainer has just written, where there is a directory."""
        if self._directory is None or self.manager is None:
            return
        written = Path(args.output_dir, f"checkpoint-{state.global_step}")

        def take(folder: Path) -> None:
            shutil.copytree(written, folder / written.name, copy_function=_link_or_copy)

        self.manager.save(self._directory, {"pending": self._pending}, files=take)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Draws apart from the worker whose random numbers the Trainer has restored, in a worker that had none."""
        if self._apart is not None:
            set_random_state(random_state(), self._apart)
            self._apart = None

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


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        shutil.copy2(source, target)
