"""Synchronous rounds on several hosts, the node's side: what its host's workers have staged goes into a passing sum.

How such a round goes is told in ``chained.py``, which is the workers' side.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,no-any-return"

from __future__ import annotations

import numpy as np

from multiverso import layout as at
from multiverso.compiling.atomics import add32, array_at, futex_wait, load32, load64, store64
from multiverso.compiling.declaring import Address, Data, Int, kernel
from multiverso.kernels.dense import add_into, copy_into
from multiverso.kernels.folding import NOTHING, add_one, bounds, buffer_of, slot_at, step_of
from multiverso.kernels.waits import header_of, is_live, line_of, notify


@kernel
def members_of(control: Address, base: Address, local: Int, number: Int) -> Int:
    """Returns who of this host's workers (``local``: bits) takes part in a round, or -1 while one is not ready."""
    step = step_of(base, number, header_of(base).chunk_count - 1)
    members = np.int64(0)
    for worker in range(header_of(base).table_workers):
        line = line_of(base, worker)
        if not (local >> worker) & 1 or load32(line + at.ENROLLED) != 1:
            continue
        here = is_live(control, worker)  # before its slot: whoever leaves has said before that it is ready
        if load64(line + at.FIRST_STEP) > step:
            continue
        if load64(line + at.STAGED) >= step:
            members |= np.int64(1) << worker
        elif here:
            return -1
    return int(members)


@kernel
def waits_for(control: Address, base: Address, local: Int, number: Int) -> Int:
    """Returns 1 when a live worker of this host is ready for a round, so that somebody wants it."""
    step = step_of(base, number, header_of(base).chunk_count - 1)
    for worker in range(header_of(base).table_workers):
        line = line_of(base, worker)
        here = (local >> worker) & 1 and load32(line + at.ENROLLED) == 1 and is_live(control, worker)
        if here and load64(line + at.STAGED) >= step:
            return 1
    return 0


@kernel
def sleep(control: Address, event: Int, nanoseconds: Int) -> None:
    """Sleeps until the event word is no longer ``event``, as workers do, but is seen by nobody."""
    add32(control + at.WAITERS, 1)
    futex_wait(control + at.EVENT, event, nanoseconds)
    add32(control + at.WAITERS, -1)


@kernel
def decide(base: Address, number: Int, members: Int) -> None:
    """Says who takes part."""
    store64(base + at.TAKING_PART + 8 * (number & 1), members)
    store64(base + at.DECIDED, number)


@kernel
def fold(base: Address, number: Int, chunk: Int, members: Int, begins: Int, total: Data, count: Int) -> Int:
    """Adds the members' slots of a chunk to a sum of ``count`` contributions; returns how many there are then.

    Where there are none yet, nothing is in ``total``; the sum then begins with the old values if ``begins`` says so.
    """
    lo, hi = bounds(base, chunk)
    elements = header_of(base).elements
    old = array_at(base + buffer_of(base, number - 1), elements, total)[lo:hi]
    for worker in range(header_of(base).table_workers):
        source = load32(line_of(base, worker) + at.SOURCES + 4 * (number & 1))
        if not (members >> worker) & 1 or source == NOTHING:
            continue
        part = slot_at(base, worker, total)[lo:hi]
        if count > 0:
            add_into(total, part)
        elif begins:
            add_one(total, old, part)
        else:
            copy_into(total, part)
        count += 1
    return count


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


@kernel
def take(
    control: Address, base: Address, number: Int, chunk: Int, begins: Int, total: Data, count: Int
) -> None:
    """A chunk's whole sum is here: for the workers to read, or for their updater."""
    lo, hi = bounds(base, chunk)
    head = header_of(base)
    elements, last = head.elements, head.chunk_count - 1
    if begins or number == 0:
        new = array_at(base + buffer_of(base, number), elements, total)[lo:hi]
        if count > 0:
            copy_into(new, total)
        elif number > 0:
            copy_into(new, array_at(base + buffer_of(base, number - 1), elements, total)[lo:hi])
        if chunk == last:
            store64(base + at.COMMITTED, number)
    else:
        totals = base + load64(base + at.TOTALS)
        if count > 0:
            copy_into(array_at(totals, elements, total)[lo:hi], total)
        store64(totals + header_of(base).small_slots + 8 * chunk, count)
    store64(base + at.ARRIVED, step_of(base, number, chunk))
    notify(control)
