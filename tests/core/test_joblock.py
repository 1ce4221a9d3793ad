"""The job's lock: whoever waits for it is seen and named, and no exception between two steps leaves it locked."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

from multiverso.deadline import Deadline
from multiverso.errors import LockStateError, WaitTimeoutError
from multiverso.layout import words as at
from multiverso.runtime import JobLock, Node, Session


class Interrupted(BaseException):
    """What stands here for Ctrl-C."""


@pytest.fixture
def pair() -> Iterator[tuple[JobLock, JobLock]]:
    """Two workers of one process: the test's thread is the first, another thread has to be the second."""
    with Node(None) as node, Session(node.address, 0) as first, Session(node.address, 1) as second:
        locks = JobLock(first, "a lock"), JobLock(second, "a lock")
        # pytest keeps what it has given to a test; this lets the memory go all the same
        yield weakref.proxy(locks[0]), weakref.proxy(locks[1])


def interrupt_at(step: int, call: Callable[[], None]) -> bool:
    """Calls with an exception before the bytecode that is the step-th in the lock's code; was there one so late?"""
    steps = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal steps
        if not frame.f_code.co_filename.endswith("joblock.py"):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            steps += 1
            if steps == step:
                sys.settrace(None)
                frame.f_trace = None
                raise Interrupted
        return trace

    sys.settrace(trace)
    try:
        call()
    except Interrupted:
        return True
    finally:
        sys.settrace(None)
    return False


def free_for(lock: JobLock) -> bool:
    """Whether another worker gets the lock alone at once."""
    got: list[bool] = []

    def take() -> None:
        try:
            lock.acquire(0)
        except WaitTimeoutError:
            got.append(False)
        else:
            lock.release()
            got.append(True)

    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    return got[0]


def test_an_exception_anywhere_leaves_the_lock_free(pair: tuple[JobLock, JobLock]) -> None:
    mine, other = pair
    calls: dict[str, tuple[Callable[[], None], Callable[[], None]]] = {
        "acquire": (lambda: None, mine.acquire),
        "release": (mine.acquire, mine.release),
        "shared": (lambda: None, lambda: mine.shared(lambda: None)),
        "alone": (lambda: None, lambda: mine.alone(lambda: None)),
    }
    for name, (before, call) in calls.items():
        # Each of the 65 mutexes is taken by the same few bytecodes: the first ones and a sample of the rest.
        step, interrupted = 1, True
        while interrupted:
            before()
            interrupted = interrupt_at(step, call)
            if mine.held_alone and name in ("acquire", "release"):
                mine.release()  # it came before the first step or after the last: the caller knows that it has it
            assert free_for(other), f"{name}, interrupted at step {step}"
            step += 1 if step < 80 else 97


def test_it_is_taken_once_and_given_back_by_whoever_took_it(pair: tuple[JobLock, JobLock]) -> None:
    mine, other = pair
    with pytest.raises(LockStateError, match="without lock"):
        mine.release()
    mine.acquire()
    assert not free_for(other)
    with pytest.raises(LockStateError, match="already"):
        mine.acquire()
    done: list[int] = []
    mine.alone(lambda: done.append(1))
    mine.shared(lambda: done.append(2))
    assert done == [1, 2]
    assert mine.held_alone
    mine.release()
    assert free_for(other)


def test_what_the_work_raises_comes_out_and_the_lock_is_free(pair: tuple[JobLock, JobLock]) -> None:
    mine, other = pair

    def fail() -> None:
        raise ValueError("its own")

    for call in (mine.shared, mine.alone):
        with pytest.raises(ValueError, match="its own"):
            call(fail)
        assert free_for(other)


def test_the_whole_lock_has_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is 65 mutexes: each of them had the full time once."""
    moments: list[Deadline | None] = []
    lock = JobLock._lock

    def noted(self: JobLock, number: int, deadline: Deadline | None) -> None:
        moments.append(deadline)
        lock(self, number, deadline)

    with Node(1) as node, Session(node.address, timeout_seconds=30) as session:
        job_lock = JobLock(session, "a lock")
        monkeypatch.setattr(JobLock, "_lock", noted)
        job_lock.acquire(5)
        job_lock.release()
    assert len(moments) == at.MAX_WORKERS + 1
    assert moments[0] is not None
    assert {id(moment) for moment in moments} == {id(moments[0])}


def test_who_waits_for_the_lock_is_seen_and_named() -> None:
    shared, tried = threading.Event(), threading.Event()
    errors: list[str] = []

    def hold() -> None:
        shared.set()
        tried.wait(30)

    def share(address: str) -> None:
        with Session(address, 1, start_timeout_seconds=30) as session:
            JobLock(session, "our lock").shared(hold)

    with Node(2) as node:
        other = threading.Thread(target=share, args=(node.address,))
        other.start()
        try:
            with Session(node.address, 0, start_timeout_seconds=30) as session:
                job_lock = JobLock(session, "our lock")
                assert shared.wait(30)
                with pytest.raises(WaitTimeoutError) as raised:
                    job_lock.acquire(0.1)
                errors.append(str(raised.value))
                assert session.control.worker(0).wait is None
                with pytest.raises(WaitTimeoutError):
                    job_lock.acquire(0)
                tried.set()
                job_lock.acquire(30)
                job_lock.release()
                del raised
        finally:
            tried.set()
            other.join(30)
    assert "holds the lock" in errors[0]
    assert "for a lock of shared memory that process" in errors[0]
