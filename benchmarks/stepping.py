"""Kills a process at a chosen instruction: when memory says that it is in the middle of something, and so many further.

Random kills seldom come while a word is held, some ten nanoseconds in a microsecond. So this watches the memory until
the process is there, stops it, steps it until it is there again, for it has gone on meanwhile, and then so many
instructions further. One thread is stepped; the others of its process go on.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable

_CONTINUE, _STEP, _SEIZE, _INTERRUPT = 7, 9, 0x4206, 0x4207  # requests of ptrace(2)
_STEPS = 3000  # until it is there again
_ALL_CHILDREN = 0x40000000  # of waitpid: a traced thread is one
_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = (ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
_libc.ptrace.restype = ctypes.c_long


def kill_at(pid: int, reached: Callable[[], bool], further: int, seconds: float = 0.5) -> bool:
    """Kills a process ``further`` instructions after something was reached, or when the time is over.

    Args:
        pid: of the process, whose first thread is stepped; one that the system lets us trace.
        reached: looked at again and again, in memory that is shared with it.
        further: instructions.
        seconds: to wait for it.

    Returns:
        Whether it was reached.
    """
    if _libc.ptrace(_SEIZE, pid, None, None) != 0:
        os.kill(pid, signal.SIGKILL)
        return False
    end = time.monotonic() + seconds
    there = False
    while not there and time.monotonic() < end:
        if not reached():
            continue
        _libc.ptrace(_INTERRUPT, pid, None, None)
        if not _has_stopped(pid, end):
            break
        there = _step(pid, reached, _STEPS, end)
        if not there:
            _libc.ptrace(_CONTINUE, pid, None, None)
    if there:
        _step(pid, lambda: False, further, end)
    os.kill(pid, signal.SIGKILL)
    while os.WIFSTOPPED(os.waitpid(pid, _ALL_CHILDREN)[1]):
        pass
    return there


def _step(pid: int, reached: Callable[[], bool], most: int, end: float) -> bool:
    """Steps a thread that has stopped until something is reached, so many instructions at most; whether it was."""
    for _ in range(most):
        if reached():
            return True
        if _libc.ptrace(_STEP, pid, None, None) != 0 or not _has_stopped(pid, end):
            return False
    return reached()


def _has_stopped(pid: int, end: float) -> bool:
    """Waits until it has; False: not in time, since it waits for something itself."""
    while True:
        found, status = os.waitpid(pid, os.WNOHANG | _ALL_CHILDREN)
        if found:
            return os.WIFSTOPPED(status)
        if time.monotonic() > end:
            return False
