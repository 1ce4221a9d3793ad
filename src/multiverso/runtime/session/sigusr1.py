"""SIGUSR1 in a worker: who waits for whom is printed to standard error."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import weakref

from multiverso.runtime.session.session import Session


def explain_on_sigusr1(session: Session) -> None:
    """Makes SIGUSR1 print who waits for whom in a session's job, unless the program uses the signal itself."""
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGUSR1) in (signal.SIG_DFL, _explain):
        _explained.add(session)
        signal.signal(signal.SIGUSR1, _explain)


_explained: weakref.WeakSet[Session] = weakref.WeakSet()
_explaining = threading.Lock()


def _explain(number: int, frame: object) -> None:
    if sys.__stderr__ is None or not _explaining.acquire(blocking=False):
        return  # the last signal is still being answered
    try:
        for session in [s for s in list(_explained) if s.closed is None]:
            for line in session.wait_graph().describe(time.monotonic_ns()):
                # not print: what the signal interrupted may be one, which refuses another within it
                os.write(sys.__stderr__.fileno(), f"multiverso: {line}\n".encode())
    except (OSError, ValueError):
        pass  # nobody reads it, or it is closed
    finally:
        _explaining.release()
