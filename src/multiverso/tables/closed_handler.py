"""What a table's handler holds once it is closed."""

from __future__ import annotations

from multiverso.errors import ClosedError


class Closed:
    """Stands in for a closed table's memory and operations: whatever is asked of it raises ClosedError.

    So the way of an open table's calls has no check in it.
    """

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def __getattr__(self, name: str) -> None:
        raise ClosedError(self._reason)
