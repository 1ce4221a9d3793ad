"""The objects by which a program holds its session's tables: handlers and keyed tables, one list of each table's."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Protocol

from multiverso.deadline import Deadline


class Handle(Protocol):
    """What a session asks of such an object."""

    def _flush_until(self, deadline: Deadline) -> None: ...
    def _raise_if_unsent(self) -> None: ...
    def _leave(self) -> None: ...


class Handles:
    """All of a session's. Any thread may look; a signal's handler may come between any two steps.

    Attributes:
        making: held while an object is made or closed: threads that open one table at once share its calls, and its
            hand.
    """

    def __init__(self) -> None:
        self.making = threading.RLock()
        self._of: dict[str, list[Handle]] = {}

    def __iter__(self) -> Iterator[Handle]:
        """All that are open, in the order in which their tables were made."""
        return iter([handle for handles in list(self._of.values()) for handle in list(handles)])

    def of(self, table: str) -> list[Handle]:
        """Returns those that are open of a table, by what the session calls it."""
        return list(self._of.get(table, ()))

    def known(self) -> list[str]:
        """Returns what tables are called, those whose objects were all closed too, until they are forgotten."""
        return list(self._of)

    def add(self, table: str, handle: Handle) -> None:
        """Takes in an object, in one step: either it is there, or it can be made again."""
        self.list_of(table).append(handle)

    def list_of(self, table: str) -> list[Handle]:
        """Returns the list itself of a table's objects, for `Holdings.keep`."""
        return self._of.setdefault(table, [])

    def remove(self, table: str, handle: Handle) -> None:
        """Takes one out, which may be gone already."""
        with contextlib.suppress(KeyError, ValueError):
            self._of[table].remove(handle)

    def forget(self, table: str) -> None:
        """Drops the name of a table that will not be opened again under it, if no object of it is open."""
        if not self._of.get(table, True):
            self._of.pop(table, None)

    def clear(self) -> None:
        """At the session's end."""
        self._of.clear()
