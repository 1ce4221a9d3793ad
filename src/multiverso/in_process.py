"""What belongs to one process: closed at the end of a block and in a forked child, and never pickled or copied."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any, NoReturn, Self, SupportsIndex, TypeVar

T = TypeVar("T")


class InProcess:
    """Base of what stands for memory, connections or threads of this process."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Refuses; ``copy`` asks here, too.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            f"{self._line()} belongs to this process, and cannot be pickled or copied. Another worker opens the same "
            "table by its name=, a process that only looks reads what is published (multiverso.subscribe), and "
            "table.get() gives values that can go anywhere"
        )

    def __array__(self, *_: Any, **__: Any) -> Any:
        """Refuses where it has no values of its own: NumPy would make an array of one object of it.

        Raises:
            TypeError: always; a table of arrays has another one.
        """
        raise TypeError(f"{self._line()} is no array: table.get(keys), pending.wait() and counter.value return values")

    def _line(self) -> str:
        return " ".join(repr(self).split())


class Closing:
    """Base of what a ``with`` block closes."""

    def close(self) -> None:
        """Ends it."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


_close_in_child: weakref.WeakKeyDictionary[Any, Callable[[Any], None]] = weakref.WeakKeyDictionary()


def close_in_children(thing: T, close: Callable[[T], None]) -> None:
    """Has ``close(thing)`` called in each forked child: a copy of a socket or pipe would make its parent look alive."""
    _close_in_child[thing] = close


def _after_fork_in_child() -> None:
    for thing, close in list(_close_in_child.items()):
        close(thing)
    _close_in_child.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
