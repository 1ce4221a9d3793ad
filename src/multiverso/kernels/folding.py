"""One step of a synchronous round without its waiting: where slots and buffers lie, who folds what, and folding."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,no-any-return"

from __future__ import annotations

from multiverso import layout as at
from multiverso.kernels.atomics import array_at, load32, load64, prefetch_to_write, scratch, words
from multiverso.kernels.declaring import inner
from multiverso.kernels.dense import add_into, copy_into, update_in_step
from multiverso.kernels.waits import line_of

_PART = 4096
_SENT_FOR = 8192  # bytes: with three more arrays of it, what the nearest cache holds
_MOST_MEMBERS = at.MAX_WORKERS  # a constant of this module is one for the compiler, too
# what a worker's slot holds in a round
NOTHING, WHOLE, CHUNKED = 0, 1, 2


@inner
def step_of(base, number, chunk):
    """Returns the number of a step, which counts chunks through all rounds, from 1."""
    return (number - 1) * load64(base + at.CHUNK_COUNT) + chunk + 1


@inner
def bounds(base, chunk):
    """Returns where a chunk begins and ends, in elements."""
    length = load64(base + at.CHUNK_SIZE)
    return chunk * length, min(load64(base + at.ELEMENTS), (chunk + 1) * length)


@inner
def slot_address(base, worker):
    """Returns where a worker's slot begins."""
    return base + load64(base + at.SLOTS) + worker * load64(base + at.SLOT_STRIDE)


@inner
def slot_at(base, worker, like):
    """Returns a worker's slot, of the table's size."""
    return array_at(slot_address(base, worker), load64(base + at.ELEMENTS), like)


@inner
def small_slot_at(base, worker, chunk, like):
    """One of a worker's two small slots: a chunk's is written again two steps later, when all have folded it."""
    length = load64(base + at.CHUNK_SIZE)
    size = (length * load64(base + at.ITEMSIZE) + at.CACHE_LINE - 1) // at.CACHE_LINE * at.CACHE_LINE
    address = slot_address(base, worker) + load64(base + at.SMALL_SLOTS) + (chunk & 1) * size
    return array_at(address, length, like)


@inner
def buffer_of(base, number):
    """Returns where the values after a round lie."""
    return load64(base + (at.BUFFER_1 if number & 1 else at.BUFFER_0))


@inner
def state_of(base, number):
    """Returns where the updater's arrays after a round lie."""
    return load64(base + (at.STATE_1 if number & 1 else at.STATE_0))


@inner
def part_of(members, worker, lo, hi):
    """The part of [lo, hi) that a member folds, in whole cache lines."""
    number, before = 0, 0
    for other in range(at.MAX_WORKERS):
        if (members >> other) & 1:
            number += 1
            if other < worker:
                before += 1
    length = (hi - lo + number - 1) // number
    length = (length + 15) // 16 * 16
    return min(hi, lo + before * length), min(hi, lo + (before + 1) * length)


@inner
def add_one(out, table, a):
    """``out = table + a``."""
    for i in range(out.size):
        out[i] = table[i] + a[i]


@inner
def add_two(out, table, a, b):
    """``out = (table + a) + b``."""
    for i in range(out.size):
        out[i] = (table[i] + a[i]) + b[i]


@inner
def add_four(out, table, a, b, c, d):
    """``out = (((table + a) + b) + c) + d``."""
    for i in range(out.size):
        out[i] = (((table[i] + a[i]) + b[i]) + c[i]) + d[i]


@inner
def _push_pull_to(out, table, local, last):
    for i in range(out.size):
        value = table[i] + (local[i] - last[i])
        out[i] = value
        local[i] = value
        last[i] = value


@inner
def push_pull_to(out, table, local, last):
    """``out = table + (local - last)``; then ``local = last = out``.

    Cache lines that are only written come one by one, as they are needed, unless they are sent for: a quarter slower.
    """
    length = _SENT_FOR // out.itemsize
    for a in range(0, out.size, length):
        b = min(out.size, a + length)
        part = out[a:b]
        for line in range(0, (b - a) * out.itemsize, at.CACHE_LINE):
            prefetch_to_write(part.ctypes.data + line)
        _push_pull_to(part, table[a:b], local[a:b], last[a:b])


@inner
def contribution(base, worker, number, chunk, lo, hi, like):
    """A member's slot of [lo, hi), a part of the chunk."""
    if load32(line_of(base, worker) + at.SOURCES + 4 * (number & 1)) == WHOLE:
        return slot_at(base, worker, like)[lo:hi]
    start, _ = bounds(base, chunk)
    return small_slot_at(base, worker, chunk, like)[lo - start : hi - start]


@inner
def fold(base, update, number, chunk, members, lo, hi, like):
    """new[lo:hi] = old[lo:hi] with the members' slots, in worker order."""
    elements = load64(base + at.ELEMENTS)
    new = array_at(base + buffer_of(base, number), elements, like)[lo:hi]
    old = array_at(base + buffer_of(base, number - 1), elements, like)[lo:hi]
    ids = words(_MOST_MEMBERS)
    n = 0
    for worker in range(at.MAX_WORKERS):
        if (members >> worker) & 1 and load32(
            line_of(base, worker) + at.SOURCES + 4 * (number & 1)
        ) != NOTHING:
            ids[n] = worker
            n += 1
    if update != 0:
        _fold_update(base, update, number, chunk, ids[:n], lo, new, old, like)
    elif n == 0:
        copy_into(new, old)
    elif n == 2:
        a = contribution(base, ids[0], number, chunk, lo, hi, like)
        b = contribution(base, ids[1], number, chunk, lo, hi, like)
        add_two(new, old, a, b)
    elif n == 4:
        a = contribution(base, ids[0], number, chunk, lo, hi, like)
        b = contribution(base, ids[1], number, chunk, lo, hi, like)
        c = contribution(base, ids[2], number, chunk, lo, hi, like)
        d = contribution(base, ids[3], number, chunk, lo, hi, like)
        add_four(new, old, a, b, c, d)
    else:
        for a in range(0, hi - lo, _PART):
            b = min(hi - lo, a + _PART)
            add_one(new[a:b], old[a:b], contribution(base, ids[0], number, chunk, lo + a, lo + b, like))
            for k in range(1, n):
                add_into(new[a:b], contribution(base, ids[k], number, chunk, lo + a, lo + b, like))


@inner
def divide_by(values, number):
    """``values /= number``, in their own dtype."""
    divisor = values.dtype.type(number)
    for i in range(values.size):
        values[i] /= divisor


@inner
def _fold_update(base, update, number, chunk, ids, lo, new, old, like):
    """An updater sees the sum of the round's slots once: one step of synchronous training."""
    elements, itemsize = load64(base + at.ELEMENTS), load64(base + at.ITEMSIZE)
    total = scratch(_PART, like)
    for a in range(0, new.size, _PART):
        b = min(new.size, a + _PART)
        copy_into(new[a:b], old[a:b])
        for s in range(load64(base + at.STATE_COUNT)):
            skip = (s * elements + lo + a) * itemsize
            target = array_at(base + state_of(base, number) + skip, b - a, like)
            copy_into(target, array_at(base + state_of(base, number - 1) + skip, b - a, like))
        if ids.size > 0:
            part = total[: b - a]
            copy_into(part, contribution(base, ids[0], number, chunk, lo + a, lo + b, like))
            for k in range(1, ids.size):
                add_into(part, contribution(base, ids[k], number, chunk, lo + a, lo + b, like))
            if load64(base + at.MEAN):
                divide_by(part, ids.size)
            update_in_step(base, update, lo + a, new[a:b], part, state_of(base, number), number)
