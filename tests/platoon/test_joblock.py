"""The job's lock in one process: two sessions, a thread each."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from multiverso.deadline import Deadline
from multiverso.errors import WaitTimeoutError
from multiverso.runtime import Node, Session
from platoon.channel import joblock
from platoon.channel.joblock import JobLock


def test_the_whole_lock_has_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is 65 mutexes: each of them had the full time once."""
    moments: list[Deadline | None] = []
    lock = JobLock._lock

    def noted(self: JobLock, number: int, deadline: Deadline | None) -> None:
        moments.append(deadline)
        lock(self, number, deadline)

    with Node(1) as node, Session(node.address, timeout_seconds=30) as session:
        job_lock = JobLock(session)
        monkeypatch.setattr(JobLock, "_lock", noted)
        job_lock.acquire(5)
        job_lock.release()
    assert len(moments) == joblock._COUNT
    assert moments[0] is not None
    assert {id(moment) for moment in moments} == {id(moments[0])}


def test_who_waits_for_the_lock_is_seen_and_named() -> None:
    shared, tried = threading.Event(), threading.Event()
    errors: list[Any] = []

    def share(address: str) -> None:
        with Session(address, 1, start_timeout_seconds=30) as session, JobLock(session).shared():
            shared.set()
            tried.wait(30)

    with Node(2) as node:
        other = threading.Thread(target=share, args=(node.address,))
        other.start()
        try:
            with Session(node.address, 0, start_timeout_seconds=30) as session:
                job_lock = JobLock(session)
                assert shared.wait(30)
                with pytest.raises(WaitTimeoutError) as raised:
                    job_lock.acquire(0.1)
                errors.append(raised.value)
                assert session.control.worker(0).wait is None
                with pytest.raises(WaitTimeoutError):
                    job_lock.acquire(0)
                tried.set()
                job_lock.acquire(30)
                job_lock.release()
        finally:
            tried.set()
            other.join(30)
    assert "holds the lock" in str(errors[0])
    assert "for a lock of platoon-lock that process" in str(errors[0])
