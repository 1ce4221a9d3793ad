"""What to start as a controller or a worker, where its output goes, and how its end is reported."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from multiverso.launch import WorkerCommand, WorkerExit
from platoon.devices import device_environment
from platoon.util import exit_text, last_lines

GRACE_SECONDS = 2.0


@dataclass(frozen=True)
class Program:
    """A program of this Python on a device, and where its output goes."""

    device: str
    command: WorkerCommand
    out: Path
    err: Path

    def failure_text(self, who: str, end: WorkerExit) -> str:
        """Returns what a person wants to know about its failure."""
        lines = last_lines(self.err) or last_lines(self.out)
        shown = "\n".join(f"    {line}" for line in lines) or "    (nothing)"
        return f"{who} on {self.device} ended with {exit_text(end)}\n  log: {self.err}\n  last lines:\n{shown}"


def program(
    name: str,
    arguments: Sequence[str],
    device: str,
    log_directory: str | os.PathLike[str],
    variables: Mapping[str, str],
    *,
    without: tuple[str, ...] = (),
    descriptors: tuple[int, ...] = (),
) -> Program:
    """Returns a program that writes ``name.out`` and ``name.err``.

    Args:
        name: what it is called.
        arguments: those of ``python``.
        device: what it computes on.
        log_directory: where its output goes; made if it is not there.
        variables: what its environment has besides ours.
        without: beginnings of names of variables that are not handed down.
        descriptors: open files that are.

    Raises:
        OSError: the directory cannot be made.
        PlatoonError: the device does not exist.
    """
    directory = Path(log_directory)
    directory.mkdir(parents=True, exist_ok=True)
    inherited = {key: value for key, value in os.environ.items() if not without or not key.startswith(without)}
    environment = {**inherited, "PYTHONUNBUFFERED": "1", **variables}
    environment.update(device_environment(device, environment))
    out, err = directory / f"{name}.out", directory / f"{name}.err"
    command = WorkerCommand((sys.executable, "-u", *arguments), environment, descriptors=descriptors, files=(out, err))
    return Program(device, command, out, err)


@contextmanager
def stopped_by_sigterm(stop: Callable[[str], None]) -> Iterator[None]:
    """Makes SIGTERM call ``stop`` with a reason for as long as the block lasts, if this is the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda number, _: stop("got SIGTERM"))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
