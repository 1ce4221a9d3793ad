"""A part of shared memory as one process has it mapped, what outlives the job of it; and plain memory by a name."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource
import weakref
from collections import deque
from collections.abc import Callable
from functools import cached_property
from itertools import repeat
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from multiverso.errors import OutOfMemoryError
from multiverso.layout.words import HUGE_PAGE, PAGE, round_up
from multiverso.memory import system
from multiverso.memory.huge_pages import LARGE, fits
from multiverso.memory.system import libc

_consume = deque[object](maxlen=0).extend


class Mapping:
    """Mapped bytes, unmapped when nothing refers to them: the base of an array in them is the mapping.

    It is not Python's ``mmap``, which keeps a descriptor of its own open for each.

    Args:
        size: bytes.
        call: the system call that maps them, with its ``arguments``.
        writable: whether they may be written to.
    """

    def __init__(
        self, size: int, call: Callable[..., int | None], *arguments: int | None, writable: bool = True
    ) -> None:
        place: list[int | None] = []
        # not at the interpreter's end: other threads may still be in there
        weakref.finalize(self, _consume, map(libc.munmap, place, repeat(size))).atexit = False
        # Each in one step of the interpreter: an interruption after the call, or in a function that unmaps, would
        # leave the mapping behind.
        place.extend(map(call, *([argument] for argument in arguments)))
        self.address, self.size, self._writable = _mapped(place[0], size), size, writable
        self._protect()

    @property
    def __array_interface__(self) -> dict[str, Any]:
        place = (self.address, not self._writable)
        return {"shape": (self.size,), "typestr": "|u1", "data": place, "version": 3}

    def array(self, offset: int, count: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Returns the memory itself."""
        size = count * np.dtype(dtype).itemsize
        return np.asarray(self)[offset : offset + size].view(dtype)

    def detach(self) -> None:
        """Puts a private copy in the place of the shared memory, at the same address.

        Raises:
            OutOfMemoryError: there is no room for it.
        """
        flags = system.PRIVATE | system.ANONYMOUS
        copy = _mapped(libc.mmap(None, self.size, system.READ | system.WRITE, flags, -1, 0), self.size)
        ctypes.memmove(copy, self.address, self.size)
        how = system.MREMAP_MAYMOVE | system.MREMAP_FIXED
        _mapped(libc.mremap(copy, self.size, self.size, how, self.address), self.size)
        self._protect()

    def _protect(self) -> None:
        if not self._writable:
            libc.mprotect(self.address, self.size, system.READ)


class Segment(Mapping):
    """A mapped part of shared memory. It lives as long as anything refers to it: there is no close.

    The caller of a kernel with an address in it has to refer to it meanwhile.

    Args:
        descriptor: of the memory; stays the caller's, who may close it.
        offset: where the part begins, a multiple of the page size.
        size: its bytes; all of the memory by default.
        sparse: leave pages that are not there until they are used.
        writable: whether it may be written to; the descriptor has to allow it.

    Raises:
        OutOfMemoryError: this process has no room for it.
    """

    def __init__(
        self, descriptor: int, offset: int = 0, size: int | None = None, *, sparse: bool = False, writable: bool = True
    ) -> None:
        size = os.fstat(descriptor).st_size - offset if size is None else size
        flags = system.SHARED | (0 if sparse else system.POPULATE)
        rights = system.READ | (system.WRITE if writable else 0)
        if size < LARGE:
            super().__init__(size, libc.mmap, None, size, rights, flags, descriptor, offset, writable=writable)
        else:  # at an address where its huge pages fit; the place that is set aside for it goes with it
            room = size + HUGE_PAGE
            super().__init__(room, libc.mmap, None, room, 0, system.SET_ASIDE, -1, 0, writable=writable)
            self.address, self.size = fits(self.address, offset), size
            flags |= system.FIXED
            _mapped(libc.mmap(self.address, size, rights, flags, descriptor, offset), size)
        self._windows: dict[tuple[int, int, bool], weakref.ref[Mapping]] = {}

    def window(self, offset: int, count: int, dtype: npt.DTypeLike, *, writable: bool = False) -> npt.NDArray[Any]:
        """Returns the same memory through a mapping of its own, which `cut` can cut off."""
        start = offset // PAGE * PAGE
        size = round_up(offset + count * np.dtype(dtype).itemsize, PAGE) - start
        kept = self._windows.get((start, size, writable))
        mapping = kept() if kept is not None else None
        if mapping is None:
            # an old size of 0 maps the same pages once more
            place = (self.address + start, 0, size, system.MREMAP_MAYMOVE, None)
            mapping = Mapping(size, libc.mremap, *place, writable=writable)
            self._windows[start, size, writable] = weakref.ref(mapping)
        return mapping.array(offset - start, count, dtype)

    def clear(self) -> None:
        """Makes all of it zero, and gives its pages back to the system."""
        if libc.madvise(self.address, self.size, system.MADV_REMOVE) != 0:
            np.asarray(self)[:] = 0

    def abandon(self) -> None:
        """Replaces the memory with zeros, for those that still have an address in it.

        Where the system has no room even for nothing, all stays as it is until the mapping goes.
        """
        rights = system.READ | (system.WRITE if self._writable else 0)
        libc.mmap(self.address, self.size, rights, system.SET_ASIDE | system.FIXED, -1, 0)

    def cut(self) -> None:
        """Cuts windows that are still in use off from the shared memory: they keep what they show now."""
        for window in self._windows.values():
            mapping = window()
            if mapping is not None:
                mapping.detach()
        self._windows.clear()


def _mapped(address: int | None, size: int) -> int:
    """Returns the address that a system call gave, or raises what it says."""
    if address is not None and address != system.FAILED:
        return address
    code = ctypes.get_errno()
    what = f"no room for {size / 1e6:,.1f} MB in the address space of this process"
    if code == errno.ENOMEM:
        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        if limit != resource.RLIM_INFINITY:
            raise OutOfMemoryError(
                f"{what}: it is limited to {limit / 1e6:,.0f} MB (ulimit -v), which counts what is set aside and never "
                "used, as for the keys of a KeyedTable: raise it, and limit memory itself (a cgroup)"
            )
        with contextlib.suppress(OSError, ValueError), open("/proc/sys/vm/max_map_count") as file:
            what += f" (it may have {int(file.read())} mappings: vm.max_map_count)"
    raise OutOfMemoryError(f"{what}: {os.strerror(code)}")


class SharedMemory(Struct, frozen=True, dict=True):
    """Bytes that every worker of a job on this host sees; from ``Session.shared_memory``.

    Nothing guards them: users bring their own order (``multiverso.memory.mutex`` for locks,
    ``multiverso.memory.words`` for single words). The array keeps the memory mapped for as long as it lives, also
    after the session.

    Attributes:
        name: what the workers call it.
        number: its number in the job, below 0: waits name it by that.
        array: the bytes themselves: uint8, of shape (nbytes,), writable, at least on a 64-byte boundary (from one
            page on, on a page's). ``array[:8].view("int64")`` and the like show it in other dtypes.
    """

    name: str
    number: int
    array: npt.NDArray[np.uint8]

    @cached_property  # NumPy takes microseconds to say it
    def address(self) -> int:
        """Where it lies in this process."""
        return int(self.array.__array_interface__["data"][0])

    @property
    def addresses(self) -> range:
        """All addresses of it in this process."""
        return range(self.address, self.address + self.nbytes)

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self.array.nbytes

    def view(self, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Returns the whole of it as numbers of another dtype, flat; ``nbytes`` has to be a multiple of theirs."""
        return self.array.view(dtype)
