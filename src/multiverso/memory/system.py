"""The system's own calls on memory, and their constants, which Python's ``mmap`` has in part."""

from __future__ import annotations

import ctypes

NONE, READ, WRITE = 0, 1, 2
SHARED, PRIVATE, FIXED, ANONYMOUS, NORESERVE, POPULATE = 1, 2, 0x10, 0x20, 0x4000, 0x8000
SET_ASIDE = PRIVATE | ANONYMOUS | NORESERVE
MREMAP_MAYMOVE, MREMAP_FIXED = 1, 2
MADV_REMOVE, MADV_POPULATE_WRITE, MADV_COLLAPSE = 9, 23, 25
KEEP_SIZE, PUNCH_HOLE = 1, 2
FAILED = ctypes.c_void_p(-1).value

libc = ctypes.CDLL(None, use_errno=True)
_pointer, _size, _int, _long = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_long
libc.mmap.restype = libc.mremap.restype = _pointer
libc.mmap.argtypes = (_pointer, _size, _int, _int, _int, _long)
libc.mremap.argtypes = (_pointer, _size, _size, _int, _pointer)
libc.munmap.argtypes = (_pointer, _size)
libc.madvise.argtypes = libc.mprotect.argtypes = (_pointer, _size, _int)
libc.fallocate.argtypes = (_int, _int, _long, _long)
libc.syscall.restype = _long
