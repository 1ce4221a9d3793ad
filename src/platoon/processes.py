"""Starting a worker or controller with its log files, and ending it with everything that it started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from platoon.devices import device_environment
from platoon.util import exit_text, last_lines


@dataclass(frozen=True)
class Process:
    """A started process and where its output goes."""

    name: str
    device: str
    handle: subprocess.Popen[bytes]
    out: Path
    err: Path

    @property
    def pid(self) -> int:
        return self.handle.pid


def launch_process(
    name: str,
    command: Sequence[str],
    device: str,
    log_directory: str | os.PathLike[str],
    *,
    variables: Mapping[str, str] | None = None,
    without: tuple[str, ...] = (),
    pass_fds: Sequence[int] = (),
) -> Process:
    """Starts a process of this Python in its own process group; it writes ``name.out`` and ``name.err``.

    Must be called from the main thread: the process ends when the thread that started it does. Variables
    whose names begin with one of ``without`` are not handed down.

    Raises:
        OSError: it could not be started, or its logs could not be written.
        PlatoonError: the device does not exist.
    """
    directory = Path(log_directory)
    directory.mkdir(parents=True, exist_ok=True)
    inherited = {
        name: value for name, value in os.environ.items() if not without or not name.startswith(without)
    }
    environment = {**inherited, "PYTHONUNBUFFERED": "1", **(variables or {})}
    environment.update(device_environment(device, environment))
    out, err = directory / f"{name}.out", directory / f"{name}.err"
    guard = [sys.executable, "-m", "platoon._child", str(os.getpid())]
    with out.open("wb") as out_file, err.open("wb") as err_file:
        handle = subprocess.Popen(
            [*guard, *command],
            stdin=subprocess.DEVNULL,
            stdout=out_file,
            stderr=err_file,
            env=environment,
            pass_fds=pass_fds,
            start_new_session=True,
        )
    return Process(name, device, handle, out, err)


def end_processes(processes: Sequence[Process], grace_seconds: float = 2.0) -> None:
    """Ends processes and their groups: SIGTERM, and SIGKILL for what is still there after the grace."""
    for process in processes:
        if process.handle.poll() is None:
            _signal_group(process, signal.SIGTERM)
    until = time.monotonic() + grace_seconds
    for process in processes:
        try:
            process.handle.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            pass
    for process in processes:
        # Also when the process itself has ended: it may have left children in its group.
        _signal_group(process, signal.SIGKILL)
        process.handle.wait()


def _signal_group(process: Process, number: signal.Signals) -> None:
    try:
        os.killpg(process.pid, number)
    except (ProcessLookupError, PermissionError):
        pass


def failure_text(who: str, process: Process, code: int) -> str:
    """Returns what a person wants to know about a process that failed."""
    lines = last_lines(process.err) or last_lines(process.out)
    shown = "\n".join(f"    {line}" for line in lines) or "    (nothing)"
    what = f"{who} on {process.device} ended with {exit_text(code)}"
    return f"{what}\n  log: {process.err}\n  last lines:\n{shown}"


def on_sigterm(stop: Callable[[str], None]) -> Callable[[], None]:
    """Makes SIGTERM call ``stop`` with a reason, if this is the main thread; returns what undoes it."""
    if threading.current_thread() is not threading.main_thread():
        return lambda: None

    def handle(number: int, frame: FrameType | None) -> None:
        stop(f"got {signal.Signals(number).name}")

    before = signal.signal(signal.SIGTERM, handle)

    def restore() -> None:
        signal.signal(signal.SIGTERM, before)

    return restore
