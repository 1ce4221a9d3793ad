"""A kernel for each ordered access that kernels have, for the test of the order of memory."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call"

from __future__ import annotations

from multiverso.compiling.atomics import (
    add32,
    add64,
    compare_swap64,
    fence_acquire,
    fence_all,
    fence_release,
    load32,
    load64,
    load_acquire64,
    store32,
    store64,
    store_release64,
)
from multiverso.compiling.declaring import Address, Int, kernel


@kernel
def loads(address: Address) -> Int:
    return load32(address) + load64(address + 8) + load_acquire64(address + 16)


@kernel
def stores(address: Address) -> None:
    store32(address, 1)
    store64(address + 8, 2)
    store_release64(address + 16, 3)


@kernel
def changes(address: Address) -> Int:
    return add32(address, 1) + add64(address + 8, 2) + compare_swap64(address + 16, 3, 4)


@kernel
def fences(address: Address) -> None:
    fence_acquire()
    store64(address, 1)
    fence_release()
    store64(address, 2)
    fence_all()
