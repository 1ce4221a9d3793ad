"""Synchronous rounds: every worker's slot is folded in worker order into the other of two buffers.

A worker's phase word says how far it is in round i: 2 i - 1, its slot is ready; 2 i, its part is folded. No
counter and no lock, so a death leaves nothing half-updated. The first worker that sees everybody there fixes
the round's members by one compare-and-swap; the lowest live member folds the part of a member that is gone
(from the old buffer into the new one, so doing it twice is harmless). Every element is
``((t + d0) + d1) + ...`` whatever the partition: the same bits in every worker and in every run.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

from __future__ import annotations

import numpy as np
from numba import njit

from multiverso import layout as at
from multiverso.kernels.atomics import compare_swap64, load32, load64, store32, store64
from multiverso.kernels.dense import (
    add_into,
    array_at,
    copy_into,
    line_of,
    store_both,
    subtract_into,
    update_with,
)
from multiverso.kernels.waits import (
    _YIELDS,
    block_of,
    counts,
    describe_wait,
    end_wait,
    is_lost,
    notify,
    sleep_on,
)

_READY, _LOST, _NOT_READY = 0, 1, 2
_CHUNK = 4096
# progress words of an unfinished round, kept by the caller so that a call can be taken up again
STAGE, MEMBERS, ROUND = 0, 1, 2


@njit(nogil=True)
def slot_at(base, worker, like):
    address = base + load64(base + at.SLOTS) + worker * load64(base + at.SLOT_STRIDE)
    return array_at(address, load64(base + at.ELEMENTS), like)


@njit(nogil=True)
def buffer_of(base, number):
    return load64(base + (at.BUFFER_1 if number & 1 else at.BUFFER_0))


@njit(nogil=True)
def state_of(base, number):
    return load64(base + (at.STATE_1 if number & 1 else at.STATE_0))


@njit(nogil=True)
def phase(base, worker):
    return load32(line_of(base, worker) + at.PHASE)


@njit(nogil=True)
def part_of(members, worker, elements):
    """The part [lo, hi) of a member, in whole cache lines."""
    number, before = 0, 0
    for other in range(at.MAX_WORKERS):
        if (members >> other) & 1:
            number += 1
            if other < worker:
                before += 1
    length = (elements + number - 1) // number
    length = (length + 15) // 16 * 16
    return min(elements, before * length), min(elements, (before + 1) * length)


@njit(nogil=True)
def add_two(out, table, a, b):
    for i in range(out.size):
        out[i] = (table[i] + a[i]) + b[i]


@njit(nogil=True)
def add_four(out, table, a, b, c, d):
    for i in range(out.size):
        out[i] = (((table[i] + a[i]) + b[i]) + c[i]) + d[i]


@njit(nogil=True)
def add_one(out, table, a):
    for i in range(out.size):
        out[i] = table[i] + a[i]


@njit(nogil=True)
def contributors(base, members, number):
    who = np.int64(0)
    for worker in range(at.MAX_WORKERS):
        if (members >> worker) & 1 and load32(line_of(base, worker) + at.HAS_DELTA + 4 * (number & 1)):
            who |= np.int64(1) << worker
    return who


@njit(nogil=True)
def fold(base, update, number, members, lo, hi, like):
    """new[lo:hi] = old[lo:hi] with the contributors' slots, in worker order."""
    elements, itemsize = load64(base + at.ELEMENTS), load64(base + at.ITEMSIZE)
    new = array_at(base + buffer_of(base, number), elements, like)
    old = array_at(base + buffer_of(base, number - 1), elements, like)
    who = contributors(base, members, number)
    ids = np.empty(at.MAX_WORKERS, np.int64)
    n = 0
    for worker in range(at.MAX_WORKERS):
        if (who >> worker) & 1:
            ids[n] = worker
            n += 1
    if update != 0:
        _fold_update(base, update, number, ids[:n], lo, hi, like, itemsize)
        return
    if n == 0:
        copy_into(new[lo:hi], old[lo:hi])
    elif n == 2:
        a, b = slot_at(base, ids[0], like), slot_at(base, ids[1], like)
        add_two(new[lo:hi], old[lo:hi], a[lo:hi], b[lo:hi])
    elif n == 4:
        a, b = slot_at(base, ids[0], like), slot_at(base, ids[1], like)
        c, d = slot_at(base, ids[2], like), slot_at(base, ids[3], like)
        add_four(new[lo:hi], old[lo:hi], a[lo:hi], b[lo:hi], c[lo:hi], d[lo:hi])
    else:
        for a in range(lo, hi, _CHUNK):
            b = min(hi, a + _CHUNK)
            add_one(new[a:b], old[a:b], slot_at(base, ids[0], like)[a:b])
            for k in range(1, n):
                add_into(new[a:b], slot_at(base, ids[k], like)[a:b])


@njit(nogil=True)
def _fold_update(base, update, number, ids, lo, hi, like, itemsize):
    """An updater sees the sum of the round's slots once: one step of synchronous training."""
    elements = load64(base + at.ELEMENTS)
    new = array_at(base + buffer_of(base, number), elements, like)
    old = array_at(base + buffer_of(base, number - 1), elements, like)
    total = np.empty(_CHUNK, like.dtype)
    for a in range(lo, hi, _CHUNK):
        b = min(hi, a + _CHUNK)
        copy_into(new[a:b], old[a:b])
        for s in range(load64(base + at.STATES)):
            skip = (s * elements + a) * itemsize
            target = array_at(base + state_of(base, number) + skip, b - a, like)
            copy_into(target, array_at(base + state_of(base, number - 1) + skip, b - a, like))
        if ids.size > 0:
            part = total[: b - a]
            copy_into(part, slot_at(base, ids[0], like)[a:b])
            for k in range(1, ids.size):
                add_into(part, slot_at(base, ids[k], like)[a:b])
            update_with(base, update, a, new[a:b], part, state_of(base, number))


@njit(nogil=True)
def takes_part(control, base, worker):
    return load32(line_of(base, worker) + at.ENROLLED) == 1 and counts(control, worker)


@njit(nogil=True)
def _collect(control, base, number):
    """(state, members) of round ``number``: have all live workers of the table their slots ready?"""
    go_on = load32(control + at.CONTINUE_WITHOUT_LOST)
    members = np.int64(0)
    state = _READY
    for worker in range(load64(base + at.TABLE_WORKERS)):
        if load32(line_of(base, worker) + at.ENROLLED) != 1:
            continue
        arrived = phase(base, worker) >= 2 * number - 1
        if is_lost(control, worker) and go_on == 0:
            return _LOST, members
        if counts(control, worker) and not arrived:
            state = _NOT_READY
        if arrived:
            # whoever died or left after its slot was ready is a member like the others
            members |= np.int64(1) << worker
    return state, members


@njit(nogil=True)
def _publish(control, base, me, value, members):
    store32(line_of(base, me) + at.PHASE, value)
    for worker in range(load64(base + at.TABLE_WORKERS)):
        if (members >> worker) & 1 and phase(base, worker) < value:
            return
    notify(control)


@njit(nogil=True)
def _live_members(control, base):
    members = np.int64(0)
    for worker in range(load64(base + at.TABLE_WORKERS)):
        if takes_part(control, base, worker):
            members |= np.int64(1) << worker
    return members


@njit(nogil=True)
def _decide(control, base, me, progress, rounds, timespec):
    """Fixes or learns the members of the round: 0, or why it has to wait or stop."""
    number = progress[ROUND]
    decision = base + at.DECISIONS + 8 * (number & 1)
    while True:
        event = load32(control + at.EVENT)
        seen = load64(decision)
        if seen >> 32 == number:
            proposer = (seen & 0xFFFFFFFF) - 1
            members = load64(line_of(base, proposer) + at.PROPOSAL + 8 * (number & 1))
            if (members >> me) & 1:
                progress[MEMBERS] = members
                return 0
            # joined too late for this round: take part in the next one
            line = line_of(base, me)
            store32(line + at.HAS_DELTA + 4 * ((number + 1) & 1), load32(line + at.HAS_DELTA + 4 * (number & 1)))
            number += 1
            progress[ROUND] = number
            decision = base + at.DECISIONS + 8 * (number & 1)
            _publish(control, base, me, 2 * number - 1, _live_members(control, base))
            continue
        state, members = _collect(control, base, number)
        if state == _LOST:
            return _LOST
        if state == _READY:
            again, same = _collect(control, base, number)
            if again == _READY and same == members:
                store64(line_of(base, me) + at.PROPOSAL + 8 * (number & 1), members)
                compare_swap64(decision, seen, (number << 32) | (me + 1))
                notify(control)
            continue
        rounds[0] += 1
        if rounds[0] == _YIELDS and load32(block_of(control, me) + at.WAIT_KIND) == at.NOTHING:
            describe_wait(control, me, at.FOR_ROUND, load64(base + at.TABLE_ID), 0, number)
        code = sleep_on(control, event, rounds[0], timespec)
        if code != 0:
            return code


@njit(nogil=True)
def _gather(control, base, update, me, progress, rounds, timespec, like):
    """Waits until every part of the new buffer is folded; does the parts of members that are gone."""
    number, members = progress[ROUND], progress[MEMBERS]
    elements = load64(base + at.ELEMENTS)
    go_on = load32(control + at.CONTINUE_WITHOUT_LOST)
    while True:
        event = load32(control + at.EVENT)
        ready, gone = True, False
        lowest = -1
        for worker in range(load64(base + at.TABLE_WORKERS)):
            if not (members >> worker) & 1:
                continue
            here = counts(control, worker)
            if here and lowest < 0:
                lowest = worker
            if phase(base, worker) < 2 * number:
                ready = False
                if not here:
                    gone = True
                    if is_lost(control, worker) and go_on == 0:
                        return _LOST
        if ready:
            return 0
        if gone and lowest == me:
            for worker in range(load64(base + at.TABLE_WORKERS)):
                if (members >> worker) & 1 and phase(base, worker) < 2 * number and not counts(control, worker):
                    lo, hi = part_of(members, worker, elements)
                    fold(base, update, number, members, lo, hi, like)
                    _publish(control, base, worker, 2 * number, members)
            continue
        rounds[0] += 1
        if rounds[0] == _YIELDS and load32(block_of(control, me) + at.WAIT_KIND) == at.NOTHING:
            describe_wait(control, me, at.FOR_ROUND, load64(base + at.TABLE_ID), 1, number)
        code = sleep_on(control, event, rounds[0], timespec)
        if code != 0:
            return code


@njit(nogil=True)
def _note_wait(control, base, me):
    waited = end_wait(control, me)
    line = line_of(base, me)
    store64(line + at.WAITED, load64(line + at.WAITED) + waited)


@njit(nogil=True)
def _finish(control, base, me, progress, what, size):
    _note_wait(control, base, me)
    store64(base + at.COMMITTED, progress[ROUND])
    line = line_of(base, me)
    store32(line + at.HAS_DELTA + 4 * ((progress[ROUND] + 1) & 1), 0)
    store64(line + what, load64(line + what) + 1)
    store64(line + at.BYTES, load64(line + at.BYTES) + size * load64(base + at.ITEMSIZE))
    progress[STAGE] = 0
    progress[ROUND] += 1


def stage(base, me, delta, first):
    """Puts a delta into this worker's slot: the round's first, or added to what is there."""
    slot = slot_at(base, me, delta)
    if first:
        copy_into(slot, delta)
    else:
        add_into(slot, delta)
    line = line_of(base, me)
    store64(line + at.ADDS, load64(line + at.ADDS) + 1)
    store64(line + at.BYTES, load64(line + at.BYTES) + delta.size * load64(base + at.ITEMSIZE))


def stage_difference(base, me, local, last, first):
    slot = slot_at(base, me, local)
    if first:
        subtract_into(slot, local, last)
    else:
        for i in range(slot.size):
            slot[i] += local[i] - last[i]


def stage_rows(base, me, ids, delta, first):
    """Returns the position of a bad row id, or -1 once the rows are in the slot."""
    columns, elements = load64(base + at.COLUMNS), load64(base + at.ELEMENTS)
    for i in range(ids.size):
        if ids[i] < 0 or ids[i] >= elements // columns:
            return i
    slot = slot_at(base, me, delta)
    if first:
        for i in range(slot.size):
            slot[i] = 0
    for i in range(ids.size):
        lo = ids[i] * columns
        add_into(slot[lo : lo + columns], delta[i * columns : (i + 1) * columns])
    line = line_of(base, me)
    store64(line + at.ADDS, load64(line + at.ADDS) + 1)
    return -1


def commit(control, base, update, me, has_delta, progress, like):
    """Goes through the round up to the point where the new buffer is whole; 0, or why it stopped."""
    rounds = np.zeros(1, np.int64)
    timespec = np.empty(2, np.int64)
    number = progress[ROUND]
    if progress[STAGE] == 0:
        store32(line_of(base, me) + at.HAS_DELTA + 4 * (number & 1), has_delta)
        _publish(control, base, me, 2 * number - 1, _live_members(control, base))
        progress[STAGE] = 1
    if progress[STAGE] == 1:
        code = _decide(control, base, me, progress, rounds, timespec)
        if code != 0:
            return code
        _note_wait(control, base, me)
        number = progress[ROUND]
        lo, hi = part_of(progress[MEMBERS], me, load64(base + at.ELEMENTS))
        fold(base, update, number, progress[MEMBERS], lo, hi, like)
        _publish(control, base, me, 2 * number, progress[MEMBERS])
        progress[STAGE] = 2
        rounds[0] = 0
    return _gather(control, base, update, me, progress, rounds, timespec, like)


def take(control, base, me, progress, out):
    """The end of a ``get``: the new buffer into ``out``."""
    values = array_at(base + buffer_of(base, progress[ROUND]), out.size, out)
    copy_into(out, values)
    _finish(control, base, me, progress, at.GETS, out.size)


def take_both(control, base, me, progress, local, last):
    """The end of an ``exchange``: the new buffer into both arrays."""
    values = array_at(base + buffer_of(base, progress[ROUND]), local.size, local)
    store_both(values, local, last)
    _finish(control, base, me, progress, at.EXCHANGES, 2 * local.size)


def take_rows(control, base, me, progress, ids, out):
    """The end of a ``get`` of rows; their ids were checked before the round began."""
    columns = load64(base + at.COLUMNS)
    values = array_at(base + buffer_of(base, progress[ROUND]), load64(base + at.ELEMENTS), out)
    for i in range(ids.size):
        lo = ids[i] * columns
        copy_into(out[i * columns : (i + 1) * columns], values[lo : lo + columns])
    _finish(control, base, me, progress, at.GETS, out.size)


def leave(control, base, me, number):
    """Publishes what was added since the last read, for the others' next round, before a worker leaves."""
    store32(line_of(base, me) + at.HAS_DELTA + 4 * (number & 1), 1)
    _publish(control, base, me, 2 * number - 1, 0)
    notify(control)


def committed_copy(base, number, out):
    values = array_at(base + buffer_of(base, number), out.size, out)
    copy_into(out, values)


def committed_put(base, number, source):
    values = array_at(base + buffer_of(base, number), source.size, source)
    copy_into(values, source)
