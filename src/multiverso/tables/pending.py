"""Operations that run in the background: first in, first out for each table.

A signal's handler may raise in the middle of any function that is written in Python, those of ``threading`` included:
a ``Condition`` or an ``Event`` is left locked forever when it raises between taking the lock and saying so. So what
both sides of a queue touch are only the interpreter's own locks and queues, which act in one step, and plain flags.
"""

from __future__ import annotations

import _thread
import math
import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from queue import SimpleQueue
from typing import Any, Generic

from multiverso.deadline import Deadline
from multiverso.errors import ClosedError, WaitTimeoutError
from multiverso.in_process import InProcess
from multiverso.tables.typed import Result

_MOST = 16
_END_SECONDS = 2.0


class Pending(InProcess, Generic[Result]):
    """The future result of an operation in the background. Any thread may wait for it.

    Args:
        operation: what is done.
        what: the same, in words.
        blocked: a context around a thread's wait without a deadline.
    """

    def __init__(
        self,
        operation: Callable[[], Result],
        what: str,
        blocked: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._blocked = blocked
        self._operation: Callable[[], Any] = operation
        self._what = what
        self._gate = threading.Lock()  # held until it is over
        self._gate.acquire()
        self._over = False
        self._result: Any = None
        self._error: BaseException | None = None
        self.heard = False  # whether a caller has waited for it, and got its error

    def done(self) -> bool:
        """Returns whether it is over; never blocks."""
        return self._over

    def wait(self, timeout_seconds: float | None = None) -> Result:
        """Waits for the operation and returns its result.

        Raises:
            WaitTimeoutError: it was not over in time; it continues.
            MultiversoError: the operation's own error.
        """
        deadline = Deadline.after(math.inf if timeout_seconds is None else timeout_seconds)
        with self._blocked() if timeout_seconds is None else nullcontext():
            is_over = self.await_end(deadline)
        if not is_over:
            raise WaitTimeoutError(f"{self._what} in the background was not done after {deadline}")
        self.heard = True
        if self._error is not None:
            raise self._error
        result: Result = self._result
        return result

    def await_end(self, deadline: Deadline) -> bool:
        """Waits until it is over or the deadline has passed; returns whether it is over."""
        while not self._over and not deadline.passed:
            if self._gate.acquire(timeout=deadline.slice_left()):
                self._gate.release()  # for the next; one that is interrupted before this leaves the flag to them
        return self._over

    def run(self) -> BaseException | None:
        """Does it (the queue's thread)."""
        try:
            self._result = self._operation()
        except BaseException as error:
            self._error = error
        self.end()
        return self._error

    def end(self, error: BaseException | None = None) -> None:
        """Wakes the waiters (the queue's thread)."""
        self._error = self._error or error
        self._operation = _nothing  # the arrays it refers to are free from here on
        self._over = True
        self._gate.release()


def _nothing() -> None:
    return None


class Queue:
    """One table's background operations. Owner: the table; its thread starts with the first operation.

    Args:
        name: the table's, in words.
        moving: a context around each operation, in the queue's thread.

    Attributes:
        used: whether it has ever held anything. Every operation of the table asks.
    """

    def __init__(self, name: str, moving: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        self._name = name
        self._moving = moving
        self._lock = threading.RLock()  # of `_waiting` and `_runner`; a signal's handler may come in between
        self._waiting: deque[Pending] = deque()
        self._wakes: SimpleQueue[None] = SimpleQueue()
        self._taken: Pending | None = None  # the last one that its thread has begun
        self._running = False
        self._closed = False
        self.used = False
        self._runner: int | None = None  # the thread that does them
        self._gone = threading.Lock()  # held by that thread
        self._failed: Pending | None = None

    @property
    def busy(self) -> bool:
        """Whether anything is pending; never blocks."""
        return self._running or bool(self._waiting)

    def put(self, pending: Pending, deadline: Deadline) -> Pending:
        """Adds an operation; blocks while there are already as many as allowed."""
        while len(self._waiting) >= _MOST and not self._closed:
            if deadline.passed:
                raise WaitTimeoutError(
                    f"{_MOST} operations on {self._name} are pending and none was done in {deadline}"
                )
            self.wake()
            self._await_next(deadline)
        with self._lock:
            if self._closed:
                raise ClosedError(f"the session of {self._name} is over")
            self._waiting.append(pending)
        self.wake()
        return pending

    def wake(self) -> None:
        """Wakes its thread, which is started where there is none; tried again after an exception in between."""
        self.used = True
        if self._runner is None:
            # not threading.Thread: an exception while that waits for its thread to begin leaves one that never does
            _thread.start_new_thread(self._run, ())
        self._wakes.put(None)

    def has(self, pending: Pending) -> bool:
        """Returns whether an operation is to be done, is being done, or was done."""
        with self._lock:
            return pending in self._waiting or self._taken is pending or pending.done()

    def flush(self, deadline: Deadline) -> None:
        """Waits until nothing is pending; raises the error of an operation that was not waited for."""
        if threading.get_ident() == self._runner:
            return
        while self.busy:
            if deadline.passed:
                raise WaitTimeoutError(f"operations on {self._name} were still pending after {deadline}")
            self.wake()
            self._await_next(deadline)
        failed, self._failed = self._failed, None
        if failed is not None and not failed.heard and failed._error is not None:
            raise failed._error

    def _await_next(self, deadline: Deadline) -> None:
        """Waits until something has ended that is pending now."""
        with self._lock:
            first = self._taken if self._running else next(iter(self._waiting), None)
        if first is not None:
            first.await_end(deadline)

    def close(self) -> None:
        """Ends the thread after its current operation."""
        self._closed = True
        self._wakes.put(None)
        if self._runner not in (None, threading.get_ident()) and self._gone.acquire(timeout=_END_SECONDS):
            self._gone.release()

    def _run(self) -> None:
        with self._lock:
            if self._runner is not None:
                return  # there is one already, which the maker of this did not know of
            self._runner = threading.get_ident()
        with self._gone:
            self._serve()

    def _serve(self) -> None:
        while True:
            self._wakes.get()
            while not self._closed and self._waiting:
                with self._lock:
                    self._running = True  # first: `busy` is read without the lock
                    self._taken = pending = self._waiting.popleft()
                with self._moving():
                    error = pending.run()
                if error is not None:
                    self._failed = pending if self._failed is None or self._failed.heard else self._failed
                self._running = False
            if self._closed:
                with self._lock:
                    left, self._waiting = self._waiting, deque()
                for pending in left:
                    pending.end(ClosedError(f"the session of {self._name} is over"))
                return
