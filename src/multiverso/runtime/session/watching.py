"""Waiting until a table has another version."""

from __future__ import annotations

import time
from collections.abc import Callable

from multiverso import kernels
from multiverso.deadline import SLICE_SECONDS
from multiverso.layout import words as at
from multiverso.memory.words import load32, store32, wait_for_change
from multiverso.runtime.session.patience import Patience
from multiverso.runtime.session.session import Session

# Whoever changes the table wakes us, but not if it was killed just before; and other hosts' changes come by the node,
# which wakes nobody.
_NAP_SECONDS, _HOSTS_NAP_SECONDS = 0.05, 0.005


def await_version(
    session: Session, base: int, reached: Callable[[], bool], what: str, timeout_seconds: float | None
) -> None:
    """Sleeps until a table has come so far, a deadline passes, or it cannot come any more.

    Args:
        session: whose wait it is.
        base: address of the table.
        reached: whether the table has come so far.
        what: what is waited for, in words.
        timeout_seconds: deadline, instead of the session's.

    Raises:
        WorkerLostError, NodeLostError, WaitTimeoutError: the wait could not end well.
    """
    session.check_may_wait()
    patience = Patience(session, session.start_deadline(timeout_seconds), what)
    longest, looked = _HOSTS_NAP_SECONDS if session.hosts else _NAP_SECONDS, time.monotonic()
    while not reached():
        event = load32(base + at.CHANGED)
        store32(base + at.WATCHED, 1)
        if reached():
            return
        if patience.deadline.passed or time.monotonic() - looked > SLICE_SECONDS:
            looked = time.monotonic()
            lost = any(worker.liveness == at.LOST for worker in session.control.workers())
            patience.raise_if_hopeless(
                kernels.LOST_SOMEONE if lost and not session.control.continues else kernels.TIMED_OUT
            )
        wait_for_change(base + at.CHANGED, event, patience.deadline.left(longest))
