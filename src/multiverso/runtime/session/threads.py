"""Which threads of a worker may continue while one of them waits: with any, the worker is not stuck."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Threads:
    """The threads of one worker that have waited for others. Any thread.

    A thread of the user's may continue as long as it lives. One of ours that does things in the background (a table's
    queue, a checkpoint's writer) does so only while it is in the middle of one.
    """

    def __init__(self) -> None:
        self._first = threading.current_thread()
        self._others: dict[int, threading.Thread] = {}
        self._background: dict[int, bool] = {}  # of ours, and whether it is in the middle of something
        self._blocked: set[int] = set()  # that wait for one of ours, however long it takes

    @property
    def several(self) -> bool:
        """Whether there is more than the thread that has made the session."""
        return bool(self._others or self._background)

    @contextmanager
    def in_background(self) -> Iterator[None]:
        """Around what a thread of ours does beside the user's."""
        me = threading.get_ident()
        self._background[me] = True
        try:
            yield
        finally:
            self._background[me] = False

    @contextmanager
    def blocked(self) -> Iterator[None]:
        """Around a thread's wait without a deadline for what one of ours does."""
        me = threading.get_ident()
        self._blocked.add(me)
        try:
            yield
        finally:
            self._blocked.discard(me)

    def note(self, word: ctypes.c_int32) -> None:
        """Before and while a thread waits: writes for the other workers whether another thread may continue."""
        me = threading.get_ident()
        if me != self._first.ident and me not in self._background:
            self._others[me] = threading.current_thread()
        self._others = {ident: thread for ident, thread in self._others.items() if thread.is_alive()}
        users = [one for one in (self._first, *self._others.values()) if one.ident not in self._blocked]
        moving = any(moves for ident, moves in self._background.items() if ident != me)
        word.value = int(moving or any(thread.ident != me and thread.is_alive() for thread in users))
