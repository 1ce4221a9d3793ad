"""One lock for a whole job, shared or alone, in shared memory; it survives the SIGKILL of whoever holds it.

Each worker has a robust mutex of its own. To share the lock is to lock one's own, which nobody else wants, so
it costs next to nothing; to have it alone is to lock all of them. A turnstile before them keeps workers that
share from overtaking one that waits for it alone. The operating system unlocks the mutexes of the dead.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import numpy as np

from multiverso import layout as at
from multiverso.deadline import Deadline
from multiverso.memory import mutex
from multiverso.runtime import Session
from multiverso.runtime.patience import Patience
from multiverso.spec import TableSpec
from platoon.util import PlatoonError

_COUNT = at.MAX_WORKERS + 1
_TURNSTILE = at.MAX_WORKERS


class JobLock:
    """This worker's part in the job's lock.

    Args:
        session: this worker's session.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        # Unlocked mutexes are plain bytes, so they can be a table's initial value.
        fresh = np.zeros(_COUNT * at.MUTEX_BYTES // 8, np.int64)
        mutex.initialise(fresh.ctypes.data, _COUNT, at.MUTEX_BYTES)
        spec = TableSpec("array", 1, fresh.size, dtype="int64", name="platoon-lock")
        self._number, shard = session.open_table(spec, lambda made, last, of: np.copyto(made.values(), fresh))
        self._address = int(shard.values().ctypes.data)
        self._shard = shard
        self._thread: int | None = None

    @property
    def held_alone(self) -> bool:
        """Whether this thread has the lock alone."""
        return self._thread == threading.get_ident()

    def shared(self) -> AbstractContextManager[None]:
        """Shares the lock with the other workers; it does nothing in a thread that has it alone."""
        return _NOTHING if self.held_alone else _Shared(self)

    def enter_shared(self) -> None:
        """Begins to share the lock."""
        self._lock(_TURNSTILE, None)
        mutex.unlock(self._mutex(_TURNSTILE))
        self._lock(self._session.worker_id, None)

    def leave_shared(self) -> None:
        """Ends what `enter_shared` began."""
        mutex.unlock(self._mutex(self._session.worker_id))

    def acquire(self, timeout_seconds: float | None) -> None:
        """Takes the lock alone.

        Args:
            timeout_seconds: how long to wait; 0 fails at once, None waits as long as the session does.

        Raises:
            PlatoonError: this thread has it already, or another thread of this process has.
            WaitTimeoutError: others kept it for too long; says which process.
        """
        if self._thread is not None:
            raise PlatoonError("this worker has the lock already: unlock() it first")
        deadline = self._session.deadline(timeout_seconds)
        held: list[int] = []
        try:
            for number in (_TURNSTILE, *range(at.MAX_WORKERS)):
                self._lock(number, deadline)
                held.append(number)
        except BaseException:
            for number in reversed(held):
                mutex.unlock(self._mutex(number))
            raise
        self._thread = threading.get_ident()

    def release(self) -> None:
        """Gives the lock back; only the thread that took it can.

        Raises:
            PlatoonError: this thread does not have it.
        """
        if not self.held_alone:
            raise PlatoonError("unlock() without lock(), or in another thread than lock()")
        self._thread = None
        for number in reversed((_TURNSTILE, *range(at.MAX_WORKERS))):
            mutex.unlock(self._mutex(number))

    @contextmanager
    def alone(self, timeout_seconds: float | None = None) -> Iterator[None]:
        """Has the lock alone meanwhile; it does nothing in a thread that has it alone already."""
        if self.held_alone:
            yield
            return
        self.acquire(timeout_seconds)
        try:
            yield
        finally:
            self.release()

    def _mutex(self, number: int) -> int:
        return self._address + at.MUTEX_BYTES * number

    def _lock(self, number: int, deadline: Deadline | None) -> None:
        """Locks a mutex by ``deadline``; None is the session's own time from now on."""
        address = self._mutex(number)
        code = mutex.try_lock(address)
        if code == mutex.BUSY:
            patience = Patience(self._session, deadline or self._session.deadline(), "the job's lock")
            with self._session.waiting(at.FOR_LOCK, self._number, address - self._shard.base):
                while True:
                    code = mutex.lock(address, patience.deadline.left())
                    if code in (0, mutex.OWNER_DEAD):
                        break
                    patience.judge(code)
        if code == mutex.OWNER_DEAD:
            mutex.recover(address)
        elif code != 0:
            raise OSError(code, "the job's lock")


class _Shared(AbstractContextManager[None]):
    """A share of the lock; a class, because a generator's context costs as much as the lock."""

    __slots__ = ("_job_lock",)

    def __init__(self, job_lock: JobLock) -> None:
        self._job_lock = job_lock

    def __enter__(self) -> None:
        self._job_lock.enter_shared()

    def __exit__(self, *error: object) -> None:
        self._job_lock.leave_shared()


_NOTHING = nullcontext()
