"""`mv.log`: what a worker says of its training goes to `multiverso top`, and to TensorBoard where that is asked for."""

from __future__ import annotations

import os
import sys
import weakref
import zlib
from collections.abc import Mapping
from operator import index
from pathlib import Path
from typing import Any

from multiverso.runtime.job.logged import BYTES, MEMORY, Logged
from multiverso.runtime.session.session import Session

FOLDER = "MULTIVERSO_TENSORBOARD"


class Log:
    """One worker's log. Owner: one thread at a time."""

    def __init__(self, session: Session) -> None:
        self._logged = Logged(session.shared_memory(MEMORY, BYTES, on_this_host=True), session.index)
        self._steps = 0
        self._writer = _writer(session)
        if self._writer is not None:
            weakref.finalize(session, self._writer.close)

    def write(self, values: Mapping[str, Any], step: int | None) -> None:
        """Publishes values of a step, and writes them to TensorBoard where that was asked for."""
        numbers = {name: _number(name, value) for name, value in values.items()}
        at = self._steps if step is None else index(step)
        self._steps = at + 1
        self._logged.write(at, numbers)
        if self._writer is not None:
            for name, number in numbers.items():
                self._writer.add_scalar(name, number, at)


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name} is a number, or an array or tensor of one; got {value!r}") from None


def _writer(session: Session) -> Any:
    folder = os.environ.get(FOLDER)
    if not folder:
        return None
    try:
        from tensorboard.summary import Writer
    except ImportError as error:
        raise ImportError(
            f"{FOLDER}={folder} asks for files for TensorBoard, which is not installed: pip install tensorboard, or "
            f"unset {FOLDER}"
        ) from error
    run = f"{Path(sys.argv[0]).stem or 'run'}-{zlib.crc32(session.address.encode()):08x}"
    return Writer(str(Path(folder) / run / f"worker-{session.worker_id}"))


_logs: weakref.WeakKeyDictionary[Session, Log] = weakref.WeakKeyDictionary()


def log_of(session: Session) -> Log:
    """Returns the session's one log."""
    if session not in _logs:
        _logs[session] = Log(session)
    return _logs[session]
