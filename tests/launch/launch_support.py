"""Start the real command and talk to it."""

import os
import pty
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from warm import Warm

warm: list[Warm] = []  # the one of this session, put here by conftest.py
MULTIVERSO = (sys.executable, "-m", "multiverso.cli")
SECONDS = 100.0

# the beginning of a worker's program that waits for something
WAIT = """
import os, pathlib, signal, sys, time
def up():
    print("up", os.getpid(), flush=True)
def rest():
    while True:
        time.sleep(0.02)  # a signal that comes just before a sleep does not end it, and is handled after it
worker = int(os.environ["MULTIVERSO_WORKER_ID"])
"""


def command(*arguments: object) -> list[str]:
    return [*MULTIVERSO, *map(str, arguments)]


def environ(**changes: str | None) -> dict[str, str]:
    result = {**os.environ, **{name: value for name, value in changes.items() if value is not None}}
    for name, value in changes.items():
        if value is None:
            result.pop(name, None)
    return result


def multiverso(*arguments: object, **changes: str | None) -> subprocess.CompletedProcess[str]:
    """Run the command to its end, in a fork of an interpreter that has imported it."""
    run = command(*arguments)[1:]
    return warm[-1].run(*run, cwd=Path.cwd(), env=environ(**changes), timeout=SECONDS)


class Running:
    """A command that runs; its standard output is read line by line."""

    def __init__(self, arguments: Sequence[object], **changes: str | None) -> None:
        self.process = subprocess.Popen(
            list(map(str, arguments)),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environ(**changes),
            start_new_session=True,
        )

    def lines(self, number: int) -> list[str]:
        """Wait for so many lines (the test's own deadline ends the wait)."""
        assert self.process.stdout is not None
        found: list[str] = []
        for _ in range(number):
            line = self.process.stdout.readline()
            assert line, f"ended after {found}: {self.process.communicate()[1]}"
            found.append(line.rstrip("\n"))
        return found

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self) -> tuple[int, str, str]:
        """Wait for the end; return the exit code and what else was written."""
        out, err = self.process.communicate(timeout=SECONDS)
        return self.process.returncode, out, err


_TAKE_TERMINAL = """
import fcntl, os, sys, termios
os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


class OnTerminal:
    """A command on a terminal of its own, as a person's shell runs it."""

    def __init__(self, arguments: Sequence[str], **changes: str | None) -> None:
        self.terminal, theirs = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", _TAKE_TERMINAL, *arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=environ(**changes),
        )
        os.close(theirs)
        self.seen = b""

    def read_until(self, *texts: bytes, number: int = 1) -> bytes:
        """Read until one of the texts has come so many times."""
        while max(self.seen.count(text) for text in texts) < number:
            assert select.select([self.terminal], [], [], SECONDS)[0], self.seen
            self.seen += os.read(self.terminal, 4096)
        return self.seen

    def ctrl_c(self) -> int:
        """Type Ctrl-C, read on, and return the exit code."""
        os.write(self.terminal, b"\x03")
        return self.end()

    def end(self) -> int:
        """Read to the end, and return the exit code."""
        try:
            while os.read(self.terminal, 4096):
                pass
        except OSError:  # closed by the other side's end
            pass
        os.close(self.terminal)
        return self.process.wait(timeout=SECONDS)


def wait_until_gone(pids: Sequence[int]) -> list[int]:
    """Wait until processes have ended; return those that have not."""
    left = []
    for pid in pids:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        if not select.select([descriptor], [], [], SECONDS)[0]:
            left.append(pid)
        os.close(descriptor)
    return left


def wait_until_written(files: Sequence[Path]) -> None:
    """Wait until each file has something in it (the test's own deadline ends the wait)."""
    while not all(file.exists() and file.stat().st_size for file in files):
        threading.Event().wait(0.01)


def script(folder: Path, text: str, name: str = "job.py") -> Path:
    path = folder / name
    path.write_text(text)
    return path
