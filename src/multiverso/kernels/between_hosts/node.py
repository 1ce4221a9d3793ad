"""Synchronous rounds on several hosts, the node's side: what its host's workers have staged goes into a passing sum.

``rounds.py``, the workers' side, describes such a round.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,no-any-return"

from __future__ import annotations

import numpy as np

from multiverso.compiling.atomics import add32, array_at, futex_wait, load32, load64, store64
from multiverso.compiling.declaring import Address, Data, Int, Words, inner, kernel
from multiverso.kernels.dense import PART, add_into, copy_into
from multiverso.kernels.rounds.folding import NOTHING, add_one, bounds, buffer_of, slot_at, step_of, weight_of
from multiverso.kernels.waits import header_of, is_live, line_of, notify
from multiverso.layout import words as at


@kernel
def members_of(control: Address, base: Address, number: Int, found: Words) -> Int:
    """Writes who of this host's workers takes part in a round, a bit each; returns 0 while one is not ready."""
    step = step_of(base, number, header_of(base).chunk_count - 1)
    members = np.int64(0)
    for worker in range(header_of(base).node_line):
        line = line_of(base, worker)
        if load32(line + at.ENROLLED) != 1:
            continue
        here = is_live(control, worker)  # before its slot: a worker that leaves has said before that it is ready
        if load64(line + at.FIRST_STEP) > step:
            continue
        if load64(line + at.STAGED) >= step:
            members |= np.int64(1) << worker
        elif here:
            return 0
    found[0] = members
    return 1


@kernel
def waits_for(control: Address, base: Address, number: Int) -> Int:
    """Returns 1 when a live worker of this host is ready for a round, so that it is wanted."""
    step = step_of(base, number, header_of(base).chunk_count - 1)
    for worker in range(header_of(base).node_line):
        line = line_of(base, worker)
        here = load32(line + at.ENROLLED) == 1 and is_live(control, worker)
        if here and load64(line + at.STAGED) >= step:
            return 1
    return 0


@kernel
def sleep(control: Address, event: Int, nanoseconds: Int) -> None:
    """Sleeps until the event word is no longer ``event``, as workers do, but is not shown as a wait."""
    add32(control + at.WAITERS, 1)
    futex_wait(control + at.EVENT, event, nanoseconds)
    add32(control + at.WAITERS, -1)


@kernel
def decide(base: Address, number: Int, members: Int) -> None:
    """Says who takes part."""
    store64(base + at.TAKING_PART + 8 * (number & 1), members)
    store64(base + at.DECIDED, number)


@inner
def add_part(base, place, number, members, begins, total, lo, count):
    """As ``fold``, of the elements from ``lo`` on; the old values are at ``place``."""
    hi = lo + total.size
    for worker in range(header_of(base).node_line):
        source = load32(line_of(base, worker) + at.SOURCES + 4 * (number & 1))
        if not (members >> worker) & 1 or source == NOTHING:
            continue
        part = slot_at(base, worker, total)[lo:hi]
        if count > 0:
            add_into(total, part)
        elif begins:
            old = array_at(base + place, header_of(base).elements, total)
            add_one(total, old[lo:hi], part)
        else:
            copy_into(total, part)
        count += weight_of(base, worker)
    return count


@kernel
def fold(base: Address, number: Int, chunk: Int, members: Int, begins: Int, total: Data, count: Int) -> Int:
    """Adds the members' slots of a chunk to a sum of ``count`` contributions; returns how many there are then.

    Where there are none yet, nothing is in ``total``; the sum then begins with the old values if ``begins`` says so.
    """
    place = buffer_of(base, number - 1)
    return add_part(base, place, number, members, begins, total, bounds(base, chunk)[0], count)


@kernel
def fold_values(base: Address, chunk: Int, total: Data, count: Int) -> Int:
    """As ``fold``, of what the workers of this host have written as initial values."""
    lo, hi = bounds(base, chunk)
    values = array_at(base + buffer_of(base, 0), header_of(base).elements, total)[lo:hi]
    if count > 0:
        add_into(total, values)
    else:
        copy_into(total, values)
    return count + 1


@inner
def _place_of(base, number, chunk, begins, like):
    """Where a chunk's whole sum goes: to the values after the round, or to where an updater finds it."""
    lo, hi = bounds(base, chunk)
    place = base + buffer_of(base, number) if begins else base + load64(base + at.TOTALS)
    return array_at(place, header_of(base).elements, like)[lo:hi]


@inner
def _arrive(control, base, number, chunk, begins, count, like):
    """A chunk's whole sum of ``count`` contributions is in its place: says so to the workers."""
    if begins:
        if count == 0 and number > 0:
            copy_into(_place_of(base, number, chunk, begins, like), _place_of(base, number - 1, chunk, begins, like))
        if chunk == header_of(base).chunk_count - 1:
            store64(base + at.COMMITTED, number)
    else:
        counts = base + load64(base + at.TOTALS) + header_of(base).small_slots
        store64(counts + 8 * chunk, count)
    store64(base + at.ARRIVED, step_of(base, number, chunk))
    notify(control)


@kernel
def take(control: Address, base: Address, number: Int, chunk: Int, begins: Int, total: Data, count: Int) -> None:
    """A chunk's whole sum is here: for the workers to read, or for their updater."""
    begins = 1 if begins or number == 0 else 0
    if count > 0:
        copy_into(_place_of(base, number, chunk, begins, total), total)
    _arrive(control, base, number, chunk, begins, count, total)


@kernel
def finish(
    control: Address, base: Address, number: Int, chunk: Int, members: Int, begins: Int, total: Data, count: Int
) -> Int:
    """``fold`` and ``take`` in one pass, on the last host: what was added is stored while it is in the cache."""
    lo, hi = bounds(base, chunk)
    place = _place_of(base, number, chunk, begins, total)
    now, before = count, buffer_of(base, number - 1)
    for a in range(0, hi - lo, PART):
        b = min(hi - lo, a + PART)
        now = add_part(base, before, number, members, begins, total[a:b], lo + a, count)
        if now > 0:
            copy_into(place[a:b], total[a:b])
    _arrive(control, base, number, chunk, begins, now, total)
    return now
