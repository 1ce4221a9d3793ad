"""Robust locks in shared memory: one for a few stores that belong together, and one that workers share or have alone.

Both survive the SIGKILL of their holders. Of a `JobLock` each worker has its own robust mutex. To share the lock is to
lock one's own, without contention, so it costs next to nothing; to have it alone is to lock all of them. A turnstile
before them keeps workers that share from overtaking one that waits for it alone. The operating system unlocks the
mutexes of the dead.

What a living worker leaves locked when an exception (Ctrl-C) comes between any two steps is unlocked on its way
out: a mutex knows the thread that holds it, so there is nothing to be remembered beside it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from multiverso.deadline import Deadline
from multiverso.errors import LockStateError, MultiversoError
from multiverso.layout import words as at
from multiverso.memory import mutex
from multiverso.memory.segment import SharedMemory
from multiverso.runtime.session.session import Session
from multiverso.runtime.session.waiting import Patience

_SLICE_SECONDS = 0.1


def prepare(memory: SharedMemory) -> None:
    """Makes the lock, in the first `at.MUTEX_BYTES` of new memory."""
    mutex.initialise(memory.address)


def take(session: Session, address: int, memory: int, offset: int, deadline: Deadline | None, what: str) -> None:
    """Takes a lock, perhaps over from an owner that died.

    Args:
        session: whose thread this is.
        address: where the lock is.
        memory: the number of the memory that it is in.
        offset: its place there.
        deadline: of the wait for it; None is the session's own time from when it has to wait.
        what: it is, or is for, in words.

    Raises:
        WaitTimeoutError, ClosedError: another one kept it; this session is over.
    """
    code = mutex.try_lock(address)
    if code == mutex.BUSY:
        patience = Patience(session, deadline or session.start_deadline(), what)
        with session.waiting(at.FOR_LOCK, memory, offset):
            while (code := mutex.lock(address, patience.deadline.left(_SLICE_SECONDS))) == mutex.TIMED_OUT:
                patience.raise_if_over()
    if code == mutex.OWNER_DEAD:
        mutex.recover(address)
    elif code != 0:
        raise MultiversoError(f"{what}: a lock in shared memory cannot be taken (code {code}); restart the job")


@contextmanager
def held(session: Session, memory: SharedMemory, deadline: Deadline, what: str) -> Iterator[None]:
    """Holds the lock meanwhile; takes it over from an owner that died.

    What its owner had begun to store is then half done: the stores under such a lock come in an order in which
    every beginning of them makes sense.

    Args:
        session: whose thread this is.
        memory: what the lock is for; see `prepare`.
        deadline: of the wait for it.
        what: it is for, in words.

    Raises:
        WaitTimeoutError, ClosedError: another one kept it; this session is over.
    """
    address = memory.address
    try:
        take(session, address, memory.number, 0, deadline, what)
        yield
    finally:
        # Not by what try_lock said: a Ctrl-C may have come between its success and our notice of it.
        if mutex.is_ours(address):
            mutex.recover(address)
            mutex.unlock(address)


_TURNSTILE = at.MAX_WORKERS
_ALL = (_TURNSTILE, *range(at.MAX_WORKERS))


class JobLock:
    """This worker's part in a lock of the job's workers on this host.

    Args:
        session: this worker's session.
        name: what the workers call it.
    """

    def __init__(self, session: Session, name: str) -> None:
        self._session = session
        self._memory = session.shared_memory(
            name,
            len(_ALL) * at.MUTEX_BYTES,
            lambda memory: mutex.initialise(memory.address, len(_ALL), at.MUTEX_BYTES),
            on_this_host=True,
        )
        self._address = self._memory.address
        self._thread: int | None = None

    @property
    def held_alone(self) -> bool:
        """Whether this thread has the lock alone."""
        return self._thread == threading.get_ident()

    def acquire(self, timeout_seconds: float | None = None) -> None:
        """Takes the lock alone. If it raises, for whatever reason, this worker does not have it.

        Args:
            timeout_seconds: how long to wait; 0 fails at once, None waits as long as the session does.

        Raises:
            LockStateError: this worker has it already.
            WaitTimeoutError: others kept it for too long; says which process.
        """
        if self._thread is not None:
            raise LockStateError("this worker has the lock already: unlock() it first")
        try:
            deadline = self._session.start_deadline(timeout_seconds)
            for number in _ALL:
                self._lock(number, deadline)
            self._thread = threading.get_ident()
        except BaseException:
            self.abandon()
            raise

    def release(self) -> None:
        """Gives the lock back; only the thread that took it can. If it raises otherwise, it is given back, too.

        Raises:
            LockStateError: this thread does not have it.
        """
        if not self.held_alone:
            raise LockStateError("unlock() without lock(), or in another thread than lock()")
        self.abandon()

    def abandon(self) -> None:
        """Gives back whatever of the lock this thread has, in whatever state; it does nothing without any."""
        try:
            self._unlock_all()
        except BaseException:
            self._unlock_all()
            raise

    def _unlock_all(self) -> None:
        for number in reversed(_ALL):
            if mutex.is_ours(self._mutex(number)):
                mutex.unlock(self._mutex(number))
        if self.held_alone:
            self._thread = None

    def alone(self, work: Callable[[], None]) -> None:
        """Calls ``work`` while this worker has the lock alone, be it taken for this or before."""
        self._during(self.acquire, work, self.release)

    def shared(self, work: Callable[[], None]) -> None:
        """Calls ``work`` while this worker shares the lock with others, or has it alone."""
        own = self._session.index

        def share() -> None:
            self._lock(_TURNSTILE, None)
            mutex.unlock(self._mutex(_TURNSTILE))
            self._lock(own, None)

        self._during(share, work, lambda: mutex.unlock(self._mutex(own)))

    def _during(self, take: Callable[[], None], work: Callable[[], None], give_back: Callable[[], None]) -> None:
        if self.held_alone:
            work()
            return
        try:
            take()
            work()
            give_back()
        except BaseException:
            self.abandon()
            raise

    def _mutex(self, number: int) -> int:
        return self._address + at.MUTEX_BYTES * number

    def _lock(self, number: int, deadline: Deadline | None) -> None:
        """Locks a mutex by ``deadline``; None is the session's own time from now on."""
        offset = at.MUTEX_BYTES * number
        take(self._session, self._address + offset, self._memory.number, offset, deadline, "the job's lock")
