"""One step of a synchronous round without its waiting: where slots and buffers lie, who folds what, and folding."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,no-any-return"

from __future__ import annotations

import numpy as np

from multiverso.compiling.atomics import array_at, load32, load64, prefetch_to_write, scratch, store64, words
from multiverso.compiling.declaring import inner
from multiverso.kernels.codes import DONE
from multiverso.kernels.dense import PART, add_into, copy_into, update_in_step
from multiverso.kernels.waits import header_of, line_of
from multiverso.layout import words as at

_SENT_FOR = 8192  # bytes: with three more arrays of it, what the nearest cache holds
_MOST_MEMBERS = at.MAX_WORKERS  # a constant of this module is one for the compiler, too
# what a worker's slot holds in a round
NOTHING, WHOLE, CHUNKED = 0, 1, 2


@inner
def step_of(base, number, chunk):
    """Returns the number of a step, which counts chunks through all rounds, from 1."""
    return (number - 1) * header_of(base).chunk_count + chunk + 1


@inner
def bounds(base, chunk):
    """Returns where a chunk begins and ends, in elements."""
    head = header_of(base)
    length = head.chunk_size
    return chunk * length, min(head.elements, (chunk + 1) * length)


@inner
def slot_address(base, worker):
    """Returns where a worker's slot begins."""
    head = header_of(base)
    return base + head.slots + worker * head.slot_stride


@inner
def weight_of(base, worker):
    """What a worker's slot counts in the mean of a round."""
    return max(np.int64(1), load64(line_of(base, worker) + at.WEIGHT))


@inner
def weigh(base, worker, staged, weight):
    """A weight (0: as one) goes with what is added to a worker's slot, after what is ``staged`` there."""
    word = line_of(base, worker) + at.WEIGHT
    if not staged:
        store64(word, weight)
    elif weight > 0 or load64(word) > 0:
        store64(word, weight_of(base, worker) + max(1, weight))


@inner
def slot_at(base, worker, like):
    """Returns a worker's slot, of the table's size."""
    return array_at(slot_address(base, worker), header_of(base).elements, like)


@inner
def small_slot_at(base, worker, chunk, like):
    """One of a worker's two small slots: a chunk's is written again two steps later, when all have folded it."""
    length = header_of(base).chunk_size
    size = (length * header_of(base).itemsize + at.CACHE_LINE - 1) // at.CACHE_LINE * at.CACHE_LINE
    address = slot_address(base, worker) + header_of(base).small_slots + (chunk & 1) * size
    return array_at(address, length, like)


@inner
def buffer_of(base, number):
    """Returns where the values after a round lie."""
    head = header_of(base)
    return head.buffer_1 if number & 1 else head.buffer_0


@inner
def state_of(base, number):
    """Returns where the updater's arrays after a round lie."""
    head = header_of(base)
    return head.state_1 if number & 1 else head.state_0


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
    """new[lo:hi] = old[lo:hi] with the members' slots, in worker order; it always comes to its end: DONE."""
    return fold_between(base, update, number, chunk, members, lo, hi, like, places_of(base, number))


@inner
def places_of(base, number):
    """Where the values before and after a round lie, and the updater's arrays before and after it."""
    return buffer_of(base, number - 1), buffer_of(base, number), state_of(base, number - 1), state_of(base, number)


@inner
def fold_between(base, update, number, chunk, members, lo, hi, like, places):
    """As ``fold``, from and to given places."""
    elements = header_of(base).elements
    old = array_at(base + places[0], elements, like)[lo:hi]
    new = array_at(base + places[1], elements, like)[lo:hi]
    ids = words(_MOST_MEMBERS)
    n = 0
    for worker in range(at.MAX_WORKERS):
        if (members >> worker) & 1 and load32(line_of(base, worker) + at.SOURCES + 4 * (number & 1)) != NOTHING:
            ids[n] = worker
            n += 1
    if update != 0:
        _fold_update(base, update, number, chunk, ids[:n], lo, hi, like, places)
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
        for a in range(0, hi - lo, PART):
            b = min(hi - lo, a + PART)
            add_one(new[a:b], old[a:b], contribution(base, ids[0], number, chunk, lo + a, lo + b, like))
            for k in range(1, n):
                add_into(new[a:b], contribution(base, ids[k], number, chunk, lo + a, lo + b, like))
    return DONE


@inner
def divide_by(values, number):
    """``values /= number``, in their own dtype."""
    divisor = values.dtype.type(number)
    for i in range(values.size):
        values[i] /= divisor


@inner
def _fold_update(base, update, number, chunk, ids, lo, hi, like, places):
    """An updater sees the sum of the round's slots once: one step of synchronous training."""
    total, count = scratch(PART, like), np.int64(0)
    for worker in ids:
        count += weight_of(base, worker)
    for a in range(lo, hi, PART):
        b = min(hi, a + PART)
        part = total[: b - a]
        if ids.size > 0:
            copy_into(part, contribution(base, ids[0], number, chunk, a, b, like))
        for k in range(1, ids.size):
            add_into(part, contribution(base, ids[k], number, chunk, a, b, like))
        update_between(base, update, number, a, b, part, count, like, places, base + at.HYPER)


@inner
def update_part(base, update, number, lo, hi, total, count, like):
    """One step of the updater over [lo, hi), out of place: ``total`` is the sum of ``count`` contributions."""
    places = places_of(base, number)
    update_between(base, update, number, lo, hi, total, count, like, places, base + at.HYPER)


@inner
def update_between(base, update, number, lo, hi, total, count, like, places, hyper):
    """As ``update_part``, from and to given places, and with given hyperparameters."""
    head = header_of(base)
    elements, itemsize = head.elements, head.itemsize
    from_values, to_values, from_state, to_state = places
    new = array_at(base + to_values, elements, like)[lo:hi]
    copy_into(new, array_at(base + from_values, elements, like)[lo:hi])
    for s in range(head.state_count):
        skip = (s * elements + lo) * itemsize
        target = array_at(base + to_state + skip, hi - lo, like)
        copy_into(target, array_at(base + from_state + skip, hi - lo, like))
    if count > 0:
        if head.mean:
            divide_by(total, count)
        update_in_step(base, update, lo, new, total, to_state, number, hyper)
