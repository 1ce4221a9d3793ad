"""Kills a process at a chosen instruction: steps it through its code until memory says so, and some further.

Random kills seldom come while a word is held, some ten nanoseconds in a microsecond. One thread is stepped; the
others of its process go on.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable

_STEP, _SEIZE, _INTERRUPT = 9, 0x4206, 0x4207  # requests of ptrace(2)
_ALL_CHILDREN = 0x40000000  # of waitpid: a traced thread is one
_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = (ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
_libc.ptrace.restype = ctypes.c_long


def kill_at(pid: int, reached: Callable[[], bool], further: int, seconds: float = 0.5) -> bool:
    """Kills a process ``further`` instructions after something was reached, or when the time is over.

    Args:
        pid: of the process, whose first thread is stepped; one that the system lets us trace.
        reached: looked at after every instruction, in memory that is shared with it.
        further: instructions.
        seconds: to wait for it.

    Returns:
        Whether it was reached.
    """
    was_reached = False
    if _libc.ptrace(_SEIZE, pid, None, None) == 0:
        end = time.monotonic() + seconds
        _libc.ptrace(_INTERRUPT, pid, None, None)
        while time.monotonic() < end and _has_stopped(pid, end):
            was_reached = was_reached or reached()
            if was_reached and further <= 0:
                break
            further -= was_reached
            if _libc.ptrace(_STEP, pid, None, None) != 0:
                break
        os.kill(pid, signal.SIGKILL)
        while os.WIFSTOPPED(os.waitpid(pid, _ALL_CHILDREN)[1]):
            pass
    else:
        os.kill(pid, signal.SIGKILL)
    return was_reached


def _has_stopped(pid: int, end: float) -> bool:
    """Waits until it has; False: not in time, since it waits for something itself."""
    while True:
        found, status = os.waitpid(pid, os.WNOHANG | _ALL_CHILDREN)
        if found:
            return os.WIFSTOPPED(status)
        if time.monotonic() > end:
            return False
