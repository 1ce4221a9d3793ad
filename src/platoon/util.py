"""What the whole package shares: its error, and words about how a process ended."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from multiverso.launch import WorkerExit


class PlatoonError(Exception):
    """Something between a worker and its controller went wrong; the message says what and what to do.

    Args:
        message: what happened.
        cause: the exception behind it, shown after the message.
    """

    def __init__(self, message: str, cause: BaseException | None = None) -> None:
        super().__init__(message if cause is None else f"{message}: {type(cause).__name__}: {cause}")
        if cause is not None:
            self.__cause__ = cause


def last_lines(path: str | os.PathLike[str], count: int = 20, most_bytes: int = 16384) -> list[str]:
    """Returns the last lines of a log, or an empty list if there is none."""
    try:
        with Path(path).open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(0, size - most_bytes))
            text = log.read().decode(errors="replace")
    except OSError:
        return []
    return text.splitlines()[-count:]


def counted(number: int, noun: str) -> str:
    """Returns ``1 worker``, ``2 workers``."""
    return f"{number} {noun}{'s' * (number != 1)}"


def exit_text(end: WorkerExit) -> str:
    """Returns how a process ended, in words: ``exit code 3`` or ``signal SIGKILL``."""
    return f"signal {end.signal}" if end.signal else f"exit code {end.code}"
