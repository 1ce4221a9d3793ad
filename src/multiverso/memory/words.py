"""Shared words from plain Python, without Numba: for the node and for what is not on the data path.

Loads and stores of aligned words are whole on the platforms we support; what must be atomic beyond that (the
event word) goes through the kernel's FUTEX_WAKE_OP.
"""

from __future__ import annotations

import ctypes
import os

from multiverso.compiling.atomics import FUTEX_CALL, futex_wait, load32, load64, store32, store64
from multiverso.memory.system import libc

__all__ = ["bump_and_wake", "load32", "load64", "store32", "store64", "wait_for_change"]

_FUTEX_WAKE_OP, _OP_ADD, _COMPARE_NOT_EQUAL, _ALL = 5, 1, 1, 1 << 30
_ADD_ONE = ctypes.c_int32((_OP_ADD << 28) | (_COMPARE_NOT_EQUAL << 24) | (1 << 12) | 0xFFF).value


def bump_and_wake(address: int) -> None:
    """Adds one to an int32 and wakes everyone who sleeps on it, in one step of the operating system.

    The word has to change: a wake between a waiter's check and its sleep would be lost.
    """
    result = libc.syscall(
        ctypes.c_long(FUTEX_CALL),
        ctypes.c_void_p(address),
        ctypes.c_int(_FUTEX_WAKE_OP),
        ctypes.c_int(_ALL),
        ctypes.c_long(_ALL),
        ctypes.c_void_p(address),
        ctypes.c_int(_ADD_ONE),
    )
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"futex wake: {os.strerror(error)}")


def wait_for_change(address: int, value: int, seconds: float) -> None:
    """Sleeps while an int32 has a value, until a wake or for at most so long; may return early."""
    futex_wait(address, value, int(seconds * 1e9))
