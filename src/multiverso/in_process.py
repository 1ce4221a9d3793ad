"""What belongs to the process that made it: it is neither pickled nor copied, and says so; and what a block closes."""

from __future__ import annotations

from typing import Any, NoReturn, Self, SupportsIndex


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
