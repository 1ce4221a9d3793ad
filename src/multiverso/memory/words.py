"""Shared words from plain Python, without Numba: for the node and for what is not on the data path.

Loads and stores of aligned words are whole on the platforms we support; what must be atomic beyond that (the
event word) goes through the kernel's FUTEX_WAKE_OP.
"""

from __future__ import annotations

import ctypes
import os
import platform

from multiverso.memory.system import libc

_FUTEX_CALL = {"x86_64": 202, "aarch64": 98}.get(platform.machine(), 98)
_FUTEX_WAIT = 0
_FUTEX_WAKE_OP, _OP_ADD, _COMPARE_NOT_EQUAL, _ALL = 5, 1, 1, 1 << 30
_ADD_ONE = ctypes.c_int32((_OP_ADD << 28) | (_COMPARE_NOT_EQUAL << 24) | (1 << 12) | 0xFFF).value


def load32(address: int) -> int:
    """Returns the int32 at an address."""
    return ctypes.c_int32.from_address(address).value


def store32(address: int, value: int) -> None:
    """Stores an int32."""
    ctypes.c_int32.from_address(address).value = value


def load64(address: int) -> int:
    """Returns the int64 at an address."""
    return ctypes.c_int64.from_address(address).value


def store64(address: int, value: int) -> None:
    """Stores an int64."""
    ctypes.c_int64.from_address(address).value = value


def bump_and_wake(address: int) -> None:
    """Adds one to an int32 and wakes everyone who sleeps on it, in one step of the operating system.

    The word has to change: a wake between a waiter's check and its sleep would be lost.
    """
    result = libc.syscall(
        ctypes.c_long(_FUTEX_CALL),
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
    timespec = (ctypes.c_long * 2)(int(seconds), int(seconds % 1 * 1e9))
    libc.syscall(
        ctypes.c_long(_FUTEX_CALL),
        ctypes.c_void_p(address),
        ctypes.c_int(_FUTEX_WAIT),
        ctypes.c_int(value),
        timespec,
        None,
        ctypes.c_int(0),
    )
