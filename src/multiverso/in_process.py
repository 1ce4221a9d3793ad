"""What belongs to the process that made it: it is neither pickled nor copied, and says so in words."""

from __future__ import annotations

from typing import NoReturn, SupportsIndex


class InProcess:
    """Base of what stands for memory, connections or threads of this process."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Refuses; ``copy`` asks here, too.

        Raises:
            TypeError: always.
        """
        what = repr(self).partition("\n")[0]
        raise TypeError(
            f"{what} belongs to this process, and cannot be pickled or copied. Another worker opens the same table "
            "by its name=, a process that only looks by multiverso.attach_read_only(name), and table.get() gives "
            "values that can go anywhere"
        )
