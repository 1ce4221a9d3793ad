"""The current session: the only process-wide state, which the module-level functions of the originals need."""

from __future__ import annotations

from functools import partial

from multiverso.errors import ClosedError, NotInitializedError
from multiverso.runtime.session.session import Session

_current: Session | None = None
_over: str | None = None  # why the last one cannot be used any more; the session itself is released, with its memory


def current() -> Session:
    """Returns the session that ``init()`` made.

    Raises:
        NotInitializedError: there is none.
        ClosedError: it is over, or this is a forked child.
    """
    session = _current
    if session is not None and session.closed is None:
        return session
    reason = _over if session is None else session.closed
    if reason is None:
        raise NotInitializedError("multiverso is not initialised: call multiverso.init() first")
    raise ClosedError(reason)


def latest() -> Session | None:
    """Returns the session that ``init()`` made, also when its end has begun; None after that."""
    return _current


def is_open() -> bool:
    """Returns whether there is a current session that can be used."""
    return _current is not None and _current.closed is None


def set_current(session: Session | None) -> None:
    """Makes a session the current one until it ends; None releases the last one."""
    global _current, _over
    if session is None and _current is not None:
        _over = _current.closed
    _current = session
    if session is not None:
        session.after_end.append(partial(_release, session))


def _release(session: Session) -> None:
    if session is _current:
        set_current(None)
