"""Sharing a model while Hugging Face's Trainer trains it."""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from multiverso.checkpoints import random_state, set_random_state
from multiverso.torch.trainers import Trained

if find_spec("transformers") is None:
    raise ImportError(
        'multiverso.torch.huggingface needs transformers: pip install "multiverso[torch]" "transformers[torch]"',
        name="transformers",
    )

from transformers import TrainerCallback


class MVCallback(Trained, TrainerCallback):  # type: ignore[misc]  # transformers is seen as untyped
    """Shares the model that is trained, from the beginning of ``trainer.train`` on: collective.

    Exchanges after every ``every`` steps of the optimizer, and at each epoch's end what is left. Each worker is
    a Trainer of its own on one device, with a part of the data.

    Args:
        directory: save the run here whenever the Trainer saves (``save_strategy``); the same for all workers, and all
            have to save at the same steps (see `resume`).
        options: what `multiverso.torch.ParamManager` takes: ``every=``, ``rule=``, ``overlap=``, ...

    Attributes:
        manager: the `ParamManager`, once training has begun.

    Examples:
        >>> Trainer(model, arguments, train_dataset=part, callbacks=[MVCallback()])  # doctest: +SKIP
    """

    def __init__(self, *, directory: str | os.PathLike[str] | None = None, **options: Any) -> None:
        Trained.__init__(self, directory, options)

    def resume(self) -> str | None:
        """Returns this worker's checkpoint of the Trainer's in ``directory``, or None if nothing was saved yet.

        Give it to ``train``, and when training begins the job continues where it was saved: the Trainer restores its
        optimizer, schedule, random numbers and place in the data, and this callback the shared parameters, this
        worker's own and the rule's state.

        Examples:
            >>> callback = MVCallback(directory="saved")  # doctest: +SKIP
            >>> trainer = Trainer(model, arguments, callbacks=[callback])  # doctest: +SKIP
            >>> trainer.train(resume_from_checkpoint=callback.resume())  # doctest: +SKIP
        """
        folder = self._find_saved()
        return None if folder is None else str(next(folder.glob("checkpoint-*")))

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
        """Shares the model, which is on its device and has its checkpoint by now."""
        self._share(model)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Saves the job, with the checkpoint that the Trainer has just written, where there is a directory."""
        written = Path(args.output_dir, f"checkpoint-{state.global_step}")

        def take(folder: Path) -> None:
            shutil.copytree(written, folder / written.name, copy_function=_link_or_copy)

        self._save(take)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Draws apart from the worker whose random numbers the Trainer has restored, in a worker that had none."""
        if self._apart is not None:
            set_random_state(random_state(), self._apart)
            self._apart = None

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Exchanges when it is time."""
        self._step()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Exchanges what is left, so that the shared parameters are evaluated and saved."""
        self._finish()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Exchanges what is left."""
        self._finish()


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        shutil.copy2(source, target)
