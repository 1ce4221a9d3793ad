"""One thread at a time, and none twice: a signal's handler must not wait for the call that it has interrupted."""

from __future__ import annotations

import threading
from typing import Any

from multiverso.errors import LockStateError

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
