"""The current session: the only process-wide state, which the module-level functions of the originals need."""

from __future__ import annotations

from multiverso.errors import ClosedError, NotInitializedError
from multiverso.runtime.session import Session

_current: Session | None = None


def current() -> Session:
    """Returns the session that ``init()`` made.

    Raises:
        NotInitializedError: there is none.
        ClosedError: it is over, or this is a forked child.
    """
    if _current is None:
        raise NotInitializedError("multiverso is not initialised: call multiverso.init() first")
    if _current.closed is not None:
        raise ClosedError(_current.closed)
    return _current


def is_open() -> bool:
    """Whether there is a current session that can be used."""
    return _current is not None and _current.closed is None


def set_current(session: Session | None) -> None:
    """Makes a session the current one."""
    global _current
    _current = session
