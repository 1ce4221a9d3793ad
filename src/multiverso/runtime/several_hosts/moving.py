"""The node's thread that moves tables' values between hosts: one task after another, again where a host was lost."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from multiverso.deadline import Deadline
from multiverso.hosts.control import messages
from multiverso.runtime.job.control import Control

Order = messages.Order | messages.Alone | Callable[[], None]
"""What is given to the node's thread to do: an order of the coordinator's, or something to call."""

_MOVE_SECONDS = 1800.0
_JOIN_SECONDS = 10.0


class Mover:
    """Any thread may call it. Owner: `OtherHosts`.

    Args:
        post: hands an order, or something to call, to the node's thread.
        control: the control segment.
        closing: set once everything ends.
    """

    def __init__(self, post: Callable[[Order], None], control: Control, closing: threading.Event) -> None:
        self.post = post
        self._control = control
        self._closing = closing
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._regroups = 0  # how often the hosts that are left have given out new homes
        self._regrouping = False  # and whether they are about to
        self._thread = threading.Thread(target=self._move, name="multiverso-hosts-move", daemon=True)

    def begin(self) -> None:
        """Starts the thread; tasks may have been queued before."""
        self._thread.start()

    def close(self) -> None:
        """Ends the thread, after ``closing`` was set. What it waits for has to end, too."""
        self._tasks.put(None)

    def join(self) -> None:
        """Waits for its end, for ten seconds at most."""
        if self._thread.ident is not None:
            self._thread.join(_JOIN_SECONDS)

    def put(self, task: Callable[[], None]) -> None:
        """Queues a task, after all that was asked for before."""
        self._tasks.put(task)

    def do(self, action: Callable[[], None], then: Callable[[], None]) -> None:
        """Queues a task, as above, after which ``then`` is called in the node's thread."""

        def task() -> None:
            action()
            self.post(then)

        self._tasks.put(task)

    def again(self, action: Callable[[], None]) -> None:
        """Does something in the caller's thread; again, where a host was lost and the others continue without it."""
        while True:
            regroups = self._regroups
            try:
                return action()
            except Exception:
                if self._closing.is_set() or not self._goes_on(regroups):
                    raise

    def broken(self, error: Exception) -> None:
        """Reports that values cannot be moved any more: the node ends."""
        why = f"values could not be exchanged with the other hosts: {type(error).__name__}: {error}"
        self.post(messages.Alone(why))

    @contextmanager
    def regrouping(self) -> Iterator[None]:
        """While a lost host's tables get new homes: those that wait for it get an error before this is over."""
        self._regrouping = True
        try:
            yield
            self._regroups += 1
        finally:
            self._regrouping = False

    def _goes_on(self, regroups: int) -> bool:
        """Whether the hosts that are left have new homes since, or get them soon."""
        end = Deadline.after(_JOIN_SECONDS)
        while self._control.continues and self._regroups == regroups and (self._regrouping or not end.passed):
            if self._closing.wait(0.01):
                return False
        return self._regroups != regroups

    def _move(self) -> None:
        while (task := self._tasks.get()) is not None:
            if self._closing.is_set():
                continue
            try:
                self.again(task)
            except Exception as error:
                if not self._closing.is_set():
                    self.broken(error)


def move_deadline() -> Deadline:
    """Returns until when values have to have moved."""
    return Deadline.after(_MOVE_SECONDS)
