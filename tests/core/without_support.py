"""Takes something away from this process and what it starts, for good: what `seccomp` refuses, nobody gets back."""

from __future__ import annotations

import ctypes
import errno
import platform
import struct

_LOAD_NUMBER, _EQUAL_JUMP, _RETURN = 0x20, 0x15, 0x06  # BPF: load the call's number, compare, answer
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_NO_NEW_PRIVS, _SET_SECCOMP, _FILTER = 38, 22, 2
NUMBERS = {"memfd_create": {"x86_64": 319, "aarch64": 279}, "pidfd_open": {"x86_64": 434, "aarch64": 434}}


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p))


def forbid(*calls: str, error: int = errno.ENOSYS) -> None:
    """Has the kernel answer these system calls with an error from here on, as an older one or a sandbox does."""
    rows = [(_LOAD_NUMBER, 0, 0, 0)]
    for call in calls:
        rows += [(_EQUAL_JUMP, 0, 1, NUMBERS[call][platform.machine()]), (_RETURN, 0, 0, _ERRNO | error)]
    rows.append((_RETURN, 0, 0, _ALLOW))
    text = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *row) for row in rows))
    program = _Program(len(rows), ctypes.addressof(text))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(_SET_SECCOMP, _FILTER, ctypes.byref(program), 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_SECCOMP)")
