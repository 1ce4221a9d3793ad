"""Work during training."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class Beside:
    """One function's call in a thread of its own, which ends with it.

    Args:
        work: the function.
        name: the thread's.
    """

    def __init__(self, work: Callable[[], Any], name: str) -> None:
        self._work = work
        self._result: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._result = self._work()
        except BaseException as error:
            self._error = error

    def join(self) -> Any:
        """Waits until it is done, within the deadlines that its own waits have; returns or raises what it did."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._result
