"""The child process that compiles: it has none of the user's settings for Numba, and takes its memory with it.

It answers one request after another, so that who wants many things compiled pays once for Numba's import.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import IO

from multiverso.compiling.object_code import Code
from multiverso.compiling.sources import Stamps, stamps_of_all

_LENGTH_BYTES = 8
_DEATH_SIGNAL = 1  # of prctl


class CompilerProcess:
    """Compiles in a child process, which is started when there is something to do; use it as a context manager.

    Owner: one thread.

    Attributes:
        stamps: of all sources, before the process began to import them; empty as long as there is none.
    """

    def __init__(self) -> None:
        self.stamps: Stamps = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._answers = -1

    def build(self, kind: str, name: str, dtype: str | None, seconds: float) -> Code | None:
        """Returns the object code, or None where no child can be started, or it has failed or takes longer."""
        deadline = time.monotonic() + seconds
        try:
            requests = self._requests()
            requests.write(json.dumps([kind, name, dtype]).encode() + b"\n")
            requests.flush()
            length = int.from_bytes(_read(self._answers, _LENGTH_BYTES, deadline), "little")
            return Code.from_bytes(_read(self._answers, length, deadline))
        except (OSError, ValueError):
            self.close()
            return None

    def _requests(self) -> IO[bytes]:
        if self._process is None:
            self._start()
        assert self._process is not None
        assert self._process.stdin is not None
        return self._process.stdin

    def _start(self) -> None:
        self._answers, writing = os.pipe()
        program = (
            "import signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); "  # it ends when its parent wants it to
            f"sys.path[:] = {[p for p in sys.path if p]!r}\n"
            f"from multiverso.compiling.on_demand import child; child({os.getpid()}, {writing})"
        )
        environment = {
            key: value for key, value in os.environ.items() if not key.startswith("NUMBA_") and key != "PYTHONWARNINGS"
        }
        environment["NUMBA_OPT"] = "0"  # compiler.emit optimises a group at once, and not each function before
        self.stamps = stamps_of_all()
        nothing = subprocess.DEVNULL  # what is wrong with it is said by trying it here
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", program],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=nothing,
                stderr=nothing,
                pass_fds=[writing],
            )
        finally:
            os.close(writing)

    def close(self) -> None:
        """Ends the process: it is done, hangs, or is not wanted any more."""
        process, self._process = self._process, None
        answers, self._answers = self._answers, -1
        if answers >= 0:
            os.close(answers)
        if process is not None:
            process.kill()
            try:
                process.communicate()
            except BrokenPipeError:  # the rest of a request
                process.wait()

    def __enter__(self) -> CompilerProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _read(descriptor: int, number: int, deadline: float) -> bytes:
    """Returns so many bytes from a pipe.

    Raises:
        TimeoutError: they were not there in time.
        BrokenPipeError: its other end was closed before.
    """
    pieces = bytearray()
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    while len(pieces) < number:
        if not poll.poll(1000 * max(0.0, deadline - time.monotonic())):
            raise TimeoutError("nothing came in time")
        piece = os.read(descriptor, min(number - len(pieces), 1 << 20))
        if not piece:
            raise BrokenPipeError("the compiling process has ended")
        pieces += piece
    return bytes(pieces)


def serve(parent: int, writing: int, build: Callable[[str, str, str | None], Code]) -> None:
    """What the child process does: compiles what each line of its standard input asks for."""
    ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        return
    with open(writing, "wb") as answers:
        for line in sys.stdin.buffer:
            data = build(*json.loads(line)).to_bytes()
            answers.write(len(data).to_bytes(_LENGTH_BYTES, "little") + data)
            answers.flush()
