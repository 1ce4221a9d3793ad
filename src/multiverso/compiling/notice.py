"""Reports slow work while it runs, so that a program does not look stuck."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from multiverso.saying import say

EVERY_SECONDS = 1.5


@contextmanager
def telling(
    what: str, begin: str | None = None, progress: Callable[[float], str] = lambda seconds: ""
) -> Iterator[Callable[[], float]]:
    """Says how long something has taken, repeatedly while the block runs.

    On a terminal that is one line, which is written over and gone in the end; elsewhere a line each time, each
    after twice the pause of the one before.

    Args:
        what: what is being done.
        begin: what is said at once; nothing by default.
        progress: returns how far it is after so many seconds; said after ``what``.

    Yields:
        What returns how many seconds it has taken until now.
    """
    began = time.monotonic()
    if begin:
        say(begin)
    over = threading.Event()
    thread = threading.Thread(target=_tell, args=(what, began, over, progress), name="multiverso-telling", daemon=True)
    try:
        thread.start()
        yield lambda: time.monotonic() - began
    finally:
        over.set()
        if thread.ident is not None:
            thread.join()


def _tell(what: str, began: float, over: threading.Event, progress: Callable[[float], str]) -> None:
    stream, longest = sys.stderr, 0
    moves = stream is not None and stream.isatty()
    pause = EVERY_SECONDS
    while not over.wait(pause):
        seconds = time.monotonic() - began
        text = f"multiverso: {what}{progress(seconds)}: {seconds:.0f} s"
        longest = max(longest, len(text))
        print(f"\r{text.ljust(longest)}" if moves else text, end="" if moves else "\n", file=stream, flush=True)
        if not moves:
            pause *= 2  # a job's log is read later
    if longest and moves:
        print("\r" + " " * longest + "\r", end="", file=stream, flush=True)
