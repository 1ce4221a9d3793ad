"""A module of kernels that compiles in a second, for the tests of compiling."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call"

from __future__ import annotations

from multiverso.compiling.atomics import array_at, compare_swap64, load64, scratch, words
from multiverso.compiling.declaring import Address, Data, Int, Int32, Words, inner, kernel


@inner
def _doubled(number):
    return 2 * number


@kernel
def scale(data: Data, ids: Words, by: Int, offset: Int32) -> Int:
    """Multiplies by ``by`` what ``ids`` names, through the stack; returns the sum of ``ids`` and the offset."""
    copy = scratch(64, data)
    total = words(1)
    for i in range(ids.size):
        copy[i] = data[ids[i]] * by
        total[0] += ids[i]
    for i in range(ids.size):
        data[ids[i]] = copy[i]
    return total[0] + _doubled(offset)


@kernel
def clear(data: Data) -> None:
    for i in range(data.size):
        data[i] = 0


@kernel
def swap_first(address: Address, old: Int, new: Int) -> Int:
    """Swaps a word, and returns what the array there holds now."""
    compare_swap64(address, old, new)
    return load64(address)


__all__ = ["array_at", "clear", "scale", "swap_first"]
