"""Anonymous shared memory that the kernel frees with its last user, even after SIGKILL of all of them."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from multiverso.errors import OutOfMemoryError
from multiverso.layout import PAGE, round_up

_F_ADD_SEALS, _SEAL_SHRINK, _SEAL_GROW = 1033, 2, 4
_PROT_READ, _PROT_WRITE, _MAP_PRIVATE, _MAP_ANONYMOUS = 1, 2, 2, 0x20
_MREMAP_MAYMOVE_FIXED = 3
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = _libc.mremap.restype = ctypes.c_void_p
_pointer, _size, _int, _long = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_long
_libc.mmap.argtypes = (_pointer, _size, _int, _int, _int, _long)
_libc.mremap.argtypes = (_pointer, _size, _size, _int, _pointer)


def free_memory() -> int:
    """Returns the bytes that may still be used: the machine's, or the container's if that is less."""
    meminfo = Path("/proc/meminfo").read_text()
    free = next(int(row.split()[1]) * 1024 for row in meminfo.splitlines() if row.startswith("MemAvailable:"))
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            most = Path(limit).read_text().strip()
            if most != "max":
                free = min(free, max(0, int(most) - int(Path(used).read_text())))
        except (OSError, ValueError):
            continue
    return free


def create(name: str, size: int) -> int:
    """Returns the descriptor of a new segment of zeroed, reserved memory that can neither grow nor shrink.

    Raises:
        OutOfMemoryError: there is not as much memory. Without this check the program would be killed by
            SIGBUS later, at the first use of a page that is not there.
    """
    size = round_up(size, PAGE)
    free = free_memory()
    if size > free:
        raise OutOfMemoryError(
            f"a table of {size / 1e6:,.0f} MB does not fit: {free / 1e6:,.0f} MB of memory are available; "
            "use a smaller table or fewer synchronous workers (each has a slot of the table's size)"
        )
    descriptor = os.memfd_create(f"multiverso-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(descriptor, 0, size)
        fcntl.fcntl(descriptor, _F_ADD_SEALS, _SEAL_SHRINK | _SEAL_GROW)
    except OSError as error:
        os.close(descriptor)
        if error.errno in (errno.ENOSPC, errno.ENOMEM):
            raise OutOfMemoryError(
                f"the system refused {size / 1e6:,.0f} MB of shared memory ({free / 1e6:,.0f} MB seemed free)"
            ) from error
        raise
    return descriptor


class Segment:
    """A mapped segment. It lives as long as anything refers to it: there is no close.

    Owner: the process that mapped it. The descriptor stays the caller's.
    """

    def __init__(self, descriptor: int) -> None:
        self.size = os.fstat(descriptor).st_size
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        self._map = mmap.mmap(descriptor, self.size, flags=flags)
        self._read_only = mmap.mmap(descriptor, self.size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._window: weakref.ref[npt.NDArray[Any]] = lambda: None  # type: ignore[assignment]

    def array(self, offset: int, count: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Returns the memory itself, writable."""
        return np.frombuffer(self._map, dtype=dtype, count=count, offset=offset)

    def view(self, offset: int, count: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Returns a read-only window on the memory."""
        window = self._window()
        if window is None:
            window = np.frombuffer(self._read_only, dtype=np.uint8)
            self._window = weakref.ref(window)
        size = count * np.dtype(dtype).itemsize
        return window[offset : offset + size].view(dtype)

    def freeze(self) -> None:
        """Cuts views that are still in use off from the shared memory: they keep what they show now."""
        window = self._window()
        if window is None:
            return
        address = window.__array_interface__["data"][0]
        protection, flags = _PROT_READ | _PROT_WRITE, _MAP_PRIVATE | _MAP_ANONYMOUS
        copy = _libc.mmap(None, self.size, protection, flags, -1, 0)
        if copy in (None, ctypes.c_void_p(-1).value):
            raise OutOfMemoryError(f"no {self.size / 1e6:,.0f} MB to keep the views that are still in use")
        ctypes.memmove(copy, address, self.size)
        if _libc.mremap(copy, self.size, self.size, _MREMAP_MAYMOVE_FIXED, address) != address:
            raise OSError(ctypes.get_errno(), "mremap of a view")
