"""The job's lock: an exception that comes between any two steps leaves nothing locked."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

from multiverso.errors import LockStateError, WaitTimeoutError
from multiverso.runtime import JobLock, Node, Session


class Interrupted(BaseException):
    """What stands here for Ctrl-C."""


@pytest.fixture
def pair() -> Iterator[tuple[JobLock, JobLock]]:
    """Two workers of one process: the test's thread is the first, another thread has to be the second."""
    with Node(None) as node, Session(node.address, 0) as first, Session(node.address, 1) as second:
        yield JobLock(first, "a lock"), JobLock(second, "a lock")


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
