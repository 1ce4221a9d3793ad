"""Signals of a process that runs a job for its user: passed on while the job runs, ignored while it is cleaned up."""

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Self

from multiverso.errors import StartupError
from multiverso.launch._ssh import SIGNALS
from multiverso.launch.results import Reason

# by which the launcher of a job on several hosts tells each host's why it is ended; to workers each is SIGTERM
TOLD: dict[Reason, int] = {"failed": signal.SIGUSR2, "timeout": signal.SIGXCPU}
Handler = Callable[[int, FrameType | None], Any] | int | None


class Signals:
    """Passes the signals of `SIGNALS` to one job after another, and ignores them after the last one.

    In the main thread of a process that is there for these jobs only.

    Attributes:
        number: the first signal that has asked for an end, whether a job was running or not; 0 for none.
    """

    def __init__(self) -> None:
        self.number = 0
        self._receiver: Callable[[int], None] | None = None
        self._before: dict[int, Handler] = {}

    def __enter__(self) -> Self:
        """Takes them over; a SIGHUP that nohup had ignored stays ignored."""
        if threading.current_thread() is not threading.main_thread():
            raise StartupError("Signals can be forwarded from the main thread only.")
        for number in SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *error: object) -> None:
        # They are not put back: the process that runs a job for a user ends with it, and what it still has to clean up
        # must not be cut short by a second Ctrl-C. Not a handler: the interpreter's own end would put the default back.
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    def end_us(self) -> None:
        """Until `pass_to` they end this process at once, or are ignored where that is not what they ask for.

        The system does so: a handler would wait for the main thread, which may wait for the network.
        """
        for number in self._before:
            signal.signal(number, signal.SIG_IGN if number == signal.SIGUSR1 else signal.SIG_DFL)
        if self.number:
            os.kill(os.getpid(), self.number)

    def pass_to(self, receiver: Callable[[int], None] | None) -> None:
        """Hands signals to a job from here on, or to none; also one that came between two jobs."""
        for number in self._before:
            signal.signal(number, self._receive)
        self._receiver = receiver
        if self.number:
            self._pass_on(self.number)

    def put_back(self) -> None:
        """In a program that continues after its jobs: handles signals as before them."""
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _receive(self, number: int, _: FrameType | None) -> None:
        if number != signal.SIGUSR1:
            self.number = self.number or number
        self._pass_on(number)

    def _pass_on(self, number: int) -> None:
        if self._receiver is not None:
            self._receiver(signal.SIGTERM if number in TOLD.values() else number)


def let_signals_end_us() -> None:
    """After `run`, when only output is left to write, perhaps to a reader who never reads it."""
    # by our own handler: no traceback, and the usual exit code
    signal.signal(signal.SIGINT, lambda number, _: os._exit(128 + number))
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
