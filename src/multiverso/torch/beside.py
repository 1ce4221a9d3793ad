"""Work during training."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


def beside(work: Callable[[], Any], name: str) -> Future[Any]:
    """Calls a function in a thread of its own, which ends with it, and which no program's end waits for.

    Args:
        work: the function, whose waits have deadlines of their own.
        name: the thread's.
    """
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
