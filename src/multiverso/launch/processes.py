"""A worker as an operating system process: start it, signal it, leave nothing of it behind."""

import errno
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Self

from multiverso.errors import StartupError
from multiverso.in_process import close_in_children

_HERE = Path(__file__).parent
_GUARD_SECONDS = 15.0
# of processes, of open files (in this process, in the system), of memory
NONE_LEFT = (errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOMEM)
HOW_TO_GET_MORE = "start fewer workers, or raise what limits processes, open files and memory here (`ulimit -a`)"


@dataclass(frozen=True)
class WorkerCommand:
    """The command of one worker.

    Attributes:
        arguments: the program and its arguments.
        environ: the whole environment.
        cores: the cores to run on, or None for the launcher's own.
        descriptors: open file descriptors to pass on, under their numbers.
        files: where standard output and standard error go, instead of two pipes.
        host: the name of the worker's host, in a job on several.
    """

    arguments: tuple[str, ...]
    environ: Mapping[str, str] = field(repr=False)
    cores: tuple[int, ...] | None = None
    descriptors: tuple[int, ...] = ()
    files: tuple[Path, Path] | None = None
    host: str = ""


def check_system() -> None:
    """Looks for what the launcher needs of the system to end what it has started.

    Raises:
        StartupError: it is not there.
    """
    if not Path("/proc/self/stat").exists():
        raise StartupError(
            "there is no /proc here, where the launcher finds the processes that it has to end: mount it "
            "(mount -t proc proc /proc), or start the workers with mpirun or torchrun"
        )
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError) as error:
        why = error.strerror if isinstance(error, OSError) else "this Python was built without it"
        raise StartupError(
            f"this system has no pidfd_open ({why}), which tells the launcher when its workers end: Linux has it "
            "from 5.3 on, unless a sandbox forbids it; start the workers with mpirun or torchrun"
        ) from error


def spawn(command: WorkerCommand, *, keep_stdin: bool = False) -> subprocess.Popen[bytes]:
    """Starts a worker in a session of its own, with its output in two pipes, or in the command's files.

    The worker is killed when the calling *thread* ends, so the caller stays until the worker is gone.
    """
    cores = ",".join(map(str, command.cores)) if command.cores else "-"
    shim = [_python(), "-I", "-S", str(_HERE / "_shim.py"), str(os.getpid()), cores]
    with ExitStack() as stack:
        outputs: list[IO[bytes] | int] = [subprocess.PIPE, subprocess.PIPE]
        if command.files is not None:
            outputs = [stack.enter_context(path.open("wb")) for path in command.files]
        return subprocess.Popen(
            [*shim, *command.arguments],
            env=dict(command.environ),
            stdin=None if keep_stdin else subprocess.DEVNULL,
            stdout=outputs[0],
            stderr=outputs[1],
            bufsize=0,
            start_new_session=True,
            pass_fds=command.descriptors,
        )


def signal_group(process: subprocess.Popen[bytes], number: int) -> None:
    """Signals a worker that is not yet reaped, and everything in its process group."""
    try:
        os.killpg(process.pid, number)
    except (ProcessLookupError, PermissionError):
        pass


def catches(pid: int, number: int) -> bool:
    """Returns whether a process has a handler for a signal whose default would end it."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    masks = dict(line.split(":", 1) for line in text.splitlines() if line.startswith(("SigCgt", "SigIgn")))
    return any(int(mask, 16) >> (number - 1) & 1 for mask in masks.values())


def signal_name(number: int) -> str:
    """Names a signal: "SIGKILL", or "signal 99" when it has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def end_process(process: subprocess.Popen[bytes], seconds: float) -> None:
    """Waits for a process that is about to end; kills it where it does not in that time."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class Guard:
    """The process that ends what the job leaves behind (see `_guard`); use it as a context manager.

    Args:
        marker: "NAME=value", what the environment of every process of the job has.
    """

    def __init__(self, marker: str) -> None:
        if not re.fullmatch(r"\w+=.+", marker):
            raise ValueError(f"a job's marker is NAME=value; got {marker!r}, which others could have, too")
        command = [_python(), "-I", "-S", str(_HERE / "_guard.py"), marker]
        environ = {name: value for name, value in os.environ.items() if f"{name}={value}" != marker}
        self._process = subprocess.Popen(
            command,
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,
        )
        close_in_children(self, Guard.leave)

    def watch(self, process: subprocess.Popen[bytes]) -> None:
        """Adds a worker that was just started, and is not yet reaped."""
        stat = Path(f"/proc/{process.pid}/stat").read_bytes()
        ticks = int(stat.rpartition(b") ")[2].split()[19])
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{process.pid} {ticks}\n".encode())
        except BrokenPipeError:
            raise StartupError("The guard process of this job was killed; start the job again.") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Has it sweep, and waits until it has."""
        self.leave()
        end_process(self._process, _GUARD_SECONDS)

    def leave(self) -> None:
        """Closes this process's end of the pipe: the guard sweeps when all have."""
        assert self._process.stdin is not None
        self._process.stdin.close()


def _python() -> str:
    if not sys.executable:
        raise StartupError("sys.executable is empty, so no worker can be started; run from a Python interpreter.")
    return sys.executable
