"""What publishers and readers of a publication do to its words, and the copying of its tensors.

A reader writes a pin and then looks whether what it has pinned is still current; the publisher makes another slot
current and then looks for pins. Each of the two has a full fence between its store and its load, so at least one of
them sees the
other: a slot that the publisher finds without a pin is not read by anybody until it is current again.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,no-any-return"

from __future__ import annotations

from multiverso.compiling.atomics import (
    array_at,
    compare_swap64,
    fence_all,
    load_acquire64,
    store64,
    store_release64,
    words,
)
from multiverso.compiling.declaring import Address, Int, Thing, Words, inner, kernel
from multiverso.layout.publications import MOST_PINS, PINS, READER_BYTES, SLOT_MASK, TAKEN

_MIX = -0x61C8864680B583EB  # 2**64 divided by the golden ratio, as an int64
_LOW = 0xFFFFFFFF


@kernel
def pin(current: Address, pins: Address, cell: Words) -> Int:
    """Pins what is current, and returns its word; 0: nothing has been published; -1: no pin is free.

    Args:
        current: the publication's word.
        pins: of this process, all of whose threads may be in here.
        cell: gets the place of the pin, for :func:`unpin`.
    """
    for number in range(MOST_PINS):
        place = pins + 8 * number
        if load_acquire64(place) == 0 and compare_swap64(place, 0, TAKEN) == 0:
            while True:
                word = load_acquire64(current)
                store64(place, word)
                fence_all()
                if load_acquire64(current) == word:
                    cell[0] = place if word else 0
                    return word
    return -1


@kernel
def unpin(cell: Words, reference: Thing) -> Int:
    """Gives a pin back, after all that was read under it.

    It is called by the weak reference to whoever has it: no exception comes before it or in the middle of it.
    """
    place = cell[0]
    if place:
        cell[0] = 0
        store_release64(place, 0)
    return 0


@kernel
def free_slot(current: Address, readers: Address, count: Int, slots: Int) -> Int:
    """Returns a slot that is neither current nor pinned, or -1.

    Args:
        current: the publication's word.
        readers: where the readers' memory begins.
        count: how many readers may have pins.
        slots: of the publication.
    """
    fence_all()
    word = load_acquire64(current)
    taken = 1 << (word & SLOT_MASK)  # bit 0: nothing is current
    for reader in range(count):
        for place in range(MOST_PINS):
            taken |= 1 << (load_acquire64(readers + reader * READER_BYTES + PINS + 8 * place) & SLOT_MASK)
    for slot in range(slots):
        if (taken >> (slot + 1)) & 1 == 0:
            return slot
    return -1


@kernel
def make_current(current: Address, word: Int) -> Int:
    """Publishes what has been written into a slot."""
    store_release64(current, word)
    return 0


@inner
def _copy(to, source, first):
    """Copies words, and returns their sum, each mixed with its place."""
    total = 0
    for i in range(source.size):
        word = source[i]
        to[i] = word
        mixed = word ^ ((first + i) * _MIX)
        total += (mixed & _LOW) * ((mixed >> 32) & _LOW) + word
    return total


@inner
def _sum(source, first):
    """As ``_copy``, without copying."""
    total = 0
    for i in range(source.size):
        word = source[i]
        mixed = word ^ ((first + i) * _MIX)
        total += (mixed & _LOW) * ((mixed >> 32) & _LOW) + word
    return total


@kernel
def copy_summed(to: Address, source: Address, count: Int, first: Int) -> Int:
    """Copies 64-bit words, and returns their part of the tensor's checksum.

    The checksum of a tensor is the sum, modulo 2**64, over its words w at the places i = 0, 1, ... (little-endian,
    the last one filled up with zeros) of ``low(w ^ i c) * high(w ^ i c) + w``, where c is 2**64 divided by the golden
    ratio and low
    and high are the halves of a word: sums of parts add up, and the loop is as quick as the copy alone.

    Args:
        to: where they go.
        source: where they lie.
        count: how many.
        first: the place of the first one in the tensor.
    """
    like = words(1)
    return _copy(array_at(to, count, like), array_at(source, count, like), first)


@kernel
def summed(source: Address, count: Int, first: Int) -> Int:
    """Returns what `copy_summed` does, of words that are there already."""
    return _sum(array_at(source, count, words(1)), first)
