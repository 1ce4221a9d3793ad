"""This process's sessions that are not over."""

from __future__ import annotations

import os
import threading
from typing import Protocol


class Session(Protocol):
    """What is asked of a session here; see `multiverso.runtime.Session`.

    Attributes:
        made_by: the thread that has made it.
    """

    made_by: int

    def shutdown(self) -> None:
        """Leaves the job."""

    def note_forked(self) -> None:
        """In a forked child: it cannot be used there."""


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
    """Returns the sessions that this thread has made since ``before``; see `open_sessions`."""
    return [s for s in open_sessions() - before if s.made_by == threading.get_ident()]


def _after_fork_in_child() -> None:
    for session in open_sessions():
        session.note_forked()
    _open.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
