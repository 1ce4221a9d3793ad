"""The node's thread that moves tables' values between hosts: one task after another."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from multiverso.deadline import Deadline
from multiverso.hosts.control import messages

Order = messages.Order | messages.Alone | Callable[[], None]
"""What is given to the node's thread to do: an order of the coordinator's, or something to call."""

_MOVE_SECONDS = 1800.0
_JOIN_SECONDS = 10.0


class Mover:
    """Any thread may call it. Owner: `OtherHosts`.

    Args:
        post: hands an order, or something to call, to the node's thread.
        closing: set once everything ends.
    """

    def __init__(self, post: Callable[[Order], None], closing: threading.Event) -> None:
        self.post = post
        self._closing = closing
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
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

    def thread(self, name: str, run: Callable[[], None]) -> threading.Thread:
        """Returns another thread of the node's, not started: if it ends by an exception, so does the node."""

        def run_or_end() -> None:
            try:
                run()
            except Exception as error:
                if not self._closing.is_set():
                    self.broken(error)

        return threading.Thread(target=run_or_end, name=name, daemon=True)

    def broken(self, error: Exception) -> None:
        """Reports that values cannot be moved any more: the node ends."""
        why = f"values could not be exchanged with the other hosts: {type(error).__name__}: {error}"
        self.post(messages.Alone(why))

    def _move(self) -> None:
        while (task := self._tasks.get()) is not None:
            if self._closing.is_set():
                continue
            try:
                task()
            except Exception as error:
                if not self._closing.is_set():
                    self.broken(error)


def move_deadline() -> Deadline:
    """Returns until when values have to have moved."""
    return Deadline.after(_MOVE_SECONDS)
