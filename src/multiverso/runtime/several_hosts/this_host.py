"""The state that the parts of a node on several hosts share: its memory, its connections and its threads.

One of these moves tables' values between hosts, one task after another.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from multiverso.deadline import Deadline
from multiverso.hosts.control import messages
from multiverso.hosts.fabric import Fabric
from multiverso.hosts.roster import Roster
from multiverso.runtime.job.control import Control
from multiverso.runtime.node.catalogue import Catalogue

Post = Callable[[messages.Order | messages.Alone | Callable[[], None]], None]
"""Hands the node's thread an order of the coordinator's, or something to call."""

_MOVE_SECONDS = 1800.0
_JOIN_SECONDS = 10.0


@dataclass(frozen=True, eq=False)
class ThisHost:
    """This host of several. Any thread may call it. Owner: `OtherHosts`.

    Attributes:
        roster: the job's hosts.
        control: the control segment.
        catalogue: the tables.
        fabric: moves tables' values.
        post: hands an order, or something to call, to the node's thread.
        tell: reports to the coordinator at once.
        closing: set once everything ends.
    """

    roster: Roster
    control: Control
    catalogue: Catalogue
    fabric: Fabric
    post: Post
    tell: Callable[[messages.Report], None]
    closing: threading.Event
    _tasks: queue.SimpleQueue[Callable[[], None] | None] = field(default_factory=queue.SimpleQueue)
    _threads: list[threading.Thread] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Its name in errors."""
        return self.roster.names[self.roster.host]

    # -- threads ---------------------------------------------------------------------------------------------

    def thread(self, name: str, run: Callable[[], None]) -> None:
        """Begins another thread of the node's: if it ends by an exception, so does the node."""
        thread = threading.Thread(target=self._run, args=(run,), name=f"multiverso-{name}", daemon=True)
        thread.start()
        self._threads.append(thread)

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            if not self.closing.is_set():
                why = f"values could not be exchanged with the other hosts: {type(error).__name__}: {error}"
                self.post(messages.Alone(why))

    def join(self) -> None:
        """Waits for the end of all threads, for ten seconds at most each, once ``closing`` is set."""
        for thread in self._threads:  # with those that one of them still begins
            thread.join(_JOIN_SECONDS)

    # -- moving values ---------------------------------------------------------------------------------------

    def put(self, task: Callable[[], None]) -> None:
        """Queues a task for the thread that moves values, after all that was asked for before."""
        self._tasks.put(task)

    def do(self, action: Callable[[], None], then: Callable[[], None]) -> None:
        """Queues a task, as above, after which ``then`` is called in the node's thread."""

        def task() -> None:
            action()
            self.post(then)

        self._tasks.put(task)

    def stop_moving(self) -> None:
        """Ends that thread, after ``closing`` was set. What it waits for has to end, too."""
        self._tasks.put(None)

    def move(self) -> None:
        """Runs the thread's tasks."""
        while (task := self._tasks.get()) is not None:
            if not self.closing.is_set():
                self._run(task)


def move_deadline() -> Deadline:
    """Returns until when values have to have moved."""
    return Deadline.after(_MOVE_SECONDS)
