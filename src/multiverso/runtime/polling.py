"""Waiting for what nobody announces."""

from __future__ import annotations

import time
from collections.abc import Callable

from multiverso import kernels
from multiverso import layout as at
from multiverso.deadline import SLICE_SECONDS
from multiverso.runtime.patience import Patience
from multiverso.runtime.session import Session

_FIRST_SECONDS, _LONGEST_SECONDS = 50e-6, 5e-3


def wait_until(
    session: Session, reached: Callable[[], bool], what: str, timeout_seconds: float | None
) -> None:
    """Looks, more and more rarely, until something is so, a deadline passes, or it cannot come any more.

    Args:
        session: whose wait it is.
        reached: whether it is so.
        what: what is waited for, in words.
        timeout_seconds: deadline, instead of the session's.

    Raises:
        WorkerLostError, NodeLostError, WaitTimeoutError: the wait could not end well.
    """
    session.enter()
    patience = Patience(session, session.deadline(timeout_seconds), what)
    pause, looked = _FIRST_SECONDS, time.monotonic()
    while not reached():
        if patience.deadline.passed or time.monotonic() - looked > SLICE_SECONDS:
            looked = time.monotonic()
            lost = any(worker.liveness == at.LOST for worker in session.control.workers())
            patience.raise_if_hopeless(
                kernels.LOST_SOMEONE if lost and not session.control.continues else kernels.TIMED_OUT
            )
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_SECONDS)
