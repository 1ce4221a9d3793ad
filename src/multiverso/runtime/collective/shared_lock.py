"""Robust locks in shared memory, for a few stores from plain Python that belong together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from multiverso.deadline import Deadline
from multiverso.errors import MultiversoError
from multiverso.layout import words as at
from multiverso.memory import mutex
from multiverso.memory.shared import SharedMemory
from multiverso.runtime.session.patience import Patience
from multiverso.runtime.session.session import Session

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
