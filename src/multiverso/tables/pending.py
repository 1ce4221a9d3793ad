"""Operations that go on in the background: first in, first out for each table."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from multiverso.deadline import Deadline
from multiverso.errors import ClosedError, WaitTimeoutError

_MOST = 16


class Pending:
    """The result, some time, of an operation in the background. Any thread may wait for it."""

    def __init__(self, operation: Callable[[], Any], what: str) -> None:
        self._operation = operation
        self._what = what
        self._finished = threading.Event()
        self._result: Any = None
        self._error: BaseException | None = None

    def done(self) -> bool:
        """Returns whether it is over; never blocks."""
        return self._finished.is_set()

    def wait(self, timeout_seconds: float | None = None) -> Any:
        """Waits for the operation and returns its result.

        Raises:
            WaitTimeoutError: it was not over in time; it goes on.
            MultiversoError: whatever the operation itself raised.
        """
        deadline = Deadline.after(math.inf if timeout_seconds is None else timeout_seconds)
        while not self._finished.wait(deadline.left()):
            if deadline.passed:
                raise WaitTimeoutError(f"{self._what} in the background was not done after {deadline}")
        if self._error is not None:
            raise self._error
        return self._result

    def run(self) -> BaseException | None:
        """Does it (the queue's thread)."""
        try:
            self._result = self._operation()
        except BaseException as error:
            self._error = error
        self._operation = _nothing  # the arrays it refers to are free from here on
        self._finished.set()
        return self._error


def _nothing() -> None:
    return None


class Queue:
    """One table's background operations. Owner: the table; its thread starts with the first operation."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._waiting: deque[Pending] = deque()
        self._running = False
        self._closed = False
        self._thread: threading.Thread | None = None
        self._failed: BaseException | None = None

    @property
    def used(self) -> bool:
        """Whether it has ever held anything; never blocks."""
        return self._thread is not None

    @property
    def busy(self) -> bool:
        """Whether anything is pending; never blocks."""
        return self._running or bool(self._waiting)

    def put(self, pending: Pending, deadline: Deadline) -> Pending:
        """Adds an operation; blocks while there are already as many as allowed."""
        with self._changed:
            while len(self._waiting) >= _MOST and not self._closed:
                if deadline.passed:
                    raise WaitTimeoutError(
                        f"{_MOST} operations on {self._name} are pending and none was done in {deadline}"
                    )
                self._changed.wait(deadline.left())
            if self._closed:
                raise ClosedError(f"the session of {self._name} is over")
            self._waiting.append(pending)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name=f"multiverso-{self._name}", daemon=True
                )
                self._thread.start()
            self._changed.notify_all()
        return pending

    def withdraw(self, pending: Pending) -> None:
        """Takes back an operation that has not begun: its caller has not heard that it was accepted."""
        with self._changed:
            if pending in self._waiting:
                self._waiting.remove(pending)
                self._changed.notify_all()

    def flush(self, deadline: Deadline) -> None:
        """Waits until nothing is pending; raises what an operation that nobody waited for raised."""
        if threading.current_thread() is self._thread:
            return
        if self.busy:
            with self._changed:
                while self.busy:
                    if deadline.passed:
                        raise WaitTimeoutError(
                            f"operations on {self._name} were still pending after {deadline}"
                        )
                    self._changed.wait(deadline.left())
        failed, self._failed = self._failed, None
        if failed is not None:
            raise failed

    def close(self) -> None:
        """Ends the thread after its current operation."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None and threading.current_thread() is not self._thread:
            self._thread.join(2.0)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    for pending in self._waiting:
                        pending._error = ClosedError(f"the session of {self._name} is over")
                        pending._finished.set()
                    self._waiting.clear()
                    return
                self._running = True  # first: `busy` is read without the lock
                pending = self._waiting.popleft()
            error = pending.run()
            with self._changed:
                self._running = False
                self._failed = self._failed or error
                self._changed.notify_all()
