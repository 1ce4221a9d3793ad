"""The barriers that a session has passed, and the one that it is in."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager

from multiverso.deadline import Deadline
from multiverso.kernels import waits
from multiverso.runtime.session.view import SessionView


class Barrier:
    """Owner: the session, to which it does not refer: a cycle would keep the memory until the next collection.

    Attributes:
        passed: the number of the last barrier that this worker has passed.
    """

    def __init__(self) -> None:
        waits.barrier.compiled()  # now, and not while others wait for this worker
        self.passed = 0
        self._raised = 0  # the number of one that raised: the next call is its repetition

    def wait(
        self,
        session: SessionView,
        lock: AbstractContextManager[object],
        tell: Callable[[int], None],
        deadline: Deadline,
    ) -> None:
        """Flushes, arrives at the next barrier (or again at one that raised), and waits for every live worker.

        Args:
            session: whose barrier it is.
            lock: lets one thread at a time into a barrier.
            tell: reports to the node which barrier this worker is about to wait at.
            deadline: until when.

        Raises:
            WorkerLostError, NodeLostError, DeadlockError, WaitTimeoutError: ``session.resume`` does, by
                ``Patience.raise_if_hopeless`` (``patience.py``), twice a second while it waits.
            OutOfMemoryError: ``session.raise_if_unsent`` does.
        """
        target = 0
        try:
            session.flush_until(deadline)
            with lock:
                target = self._raised or self.passed + 1
                arrive = functools.partial(waits.barrier.compiled(), session.control.address, session.worker_id, target)
                tell(target)
                code = arrive()
                if code:
                    session.resume(code, arrive, deadline, f"barrier {target}")
                session.raise_if_unsent()
                self.passed = max(self.passed, target)
        except BaseException:
            self._raised = target or self._raised
            raise
        self._raised = 0
