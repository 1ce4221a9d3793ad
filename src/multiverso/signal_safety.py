"""Keeps signal handlers out of code that does one thing at a time, or that they would break."""

from __future__ import annotations

import _thread
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from multiverso.errors import LockStateError

T = TypeVar("T")
# The interpreter's own kind of lock, used by `with` itself: so no exception comes between taking it and knowing so.
Lock = Any


def new_lock() -> Lock:
    """Returns a lock for `turn`."""
    return threading.RLock()


def turn(lock: Lock, what: object) -> Lock:
    """Gives the lock to a ``with``, unless this thread has it.

    Args:
        lock: of what can do one thing at a time.
        what: what that is, in words.

    Raises:
        LockStateError: a handler or a finalizer has come in between, and would wait forever.
    """
    if lock._is_owned():
        raise LockStateError(
            f"{what} is in the middle of a call of this thread, which a signal's handler or a finalizer (__del__) has "
            "interrupted to make this one: note there what is to be done, and do it once that call has returned"
        )
    return lock


def holds(lock: Lock) -> bool:
    """Whether this thread has it."""
    return bool(lock._is_owned())


def uninterrupted(work: Callable[[], T]) -> T:
    """Returns what a function returns, done in a thread, where no signal's handler runs.

    The wait for it may be interrupted; the thread ends by itself.
    """
    results: list[T] = []
    errors: list[BaseException] = []
    over = threading.Lock()  # not an Event: an exception in the middle of its methods leaves it locked
    over.acquire()

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)
        finally:
            over.release()

    _thread.start_new_thread(run, ())
    over.acquire()
    if errors:
        raise errors[0]
    return results[0]
