"""This process's sessions that are not over."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from multiverso.runtime.session import Session

_open: set[Session] = set()


def note_opened(session: Session) -> None:
    """Adds a session that begins."""
    _open.add(session)


def note_over(session: Session) -> None:
    """Forgets a session that is over."""
    _open.discard(session)


def open_sessions() -> set[Session]:
    """Returns this process's sessions that are not over."""
    return set(_open)


def abandoned_by(before: set[Session]) -> list[Session]:
    """Returns the sessions that this thread has made since ``before``; see :func:`open_sessions`."""
    return [s for s in open_sessions() - before if s.made_by == threading.get_ident()]


def _after_fork_in_child() -> None:
    for session in open_sessions():
        session._forked()
    _open.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
