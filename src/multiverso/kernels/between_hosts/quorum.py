"""Rounds with a quorum on several hosts, the node's side: it folds what has come here, and runs the updater itself.

The workers' side is that of one host (``kernels/quorum.py``), where the node appears as one more worker that closes
rounds. It alone commits: into the two buffers of a worker (``home``) whose own are on another host.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,no-any-return"

from __future__ import annotations

import numpy as np

from multiverso.compiling.atomics import array_at, compare_swap64, fence_release, load32, load64, scratch, store64
from multiverso.compiling.declaring import Address, Data, Int, Words, kernel
from multiverso.kernels.between_hosts.node import add_part
from multiverso.kernels.dense import PART, copy_into
from multiverso.kernels.quorum import include, next_buffer, own_buffer, place_of, waits_elsewhere
from multiverso.kernels.rounds.folding import bounds, update_between
from multiverso.kernels.rounds.steps import takes_part
from multiverso.kernels.waits import block_of, header_of, is_lost, line_of, notify
from multiverso.layout import words as at

# of what `came` counts, see ``hosts/rounds/roll.py``
CAME, AWAITING, THERE, ELSEWHERE, HELD, RELEASED, NEEDED, OF, GRACE = range(9)


@kernel
def came(control: Address, base: Address, number: Int, found: Words) -> None:
    """Counts this host's workers that have come to a round, and those that may come."""
    found[:] = 0
    stops = load32(control + at.CONTINUE_WITHOUT_LOST) == 0
    found[RELEASED] = load64(control + at.RELEASED)
    for worker in range(header_of(base).node_line):
        line = line_of(base, worker)
        if load32(line + at.ENROLLED) != 1:
            continue
        here = takes_part(control, base, worker, number)  # before its slot: one that leaves makes that ready first
        if load64(line + at.STAGED) == number:
            found[CAME] += 1
            if here:
                asks = line + at.ASKS
                grace = load64(asks + 16)
                found[NEEDED] = max(found[NEEDED], load64(asks))
                found[OF] = load64(asks + 8)
                found[GRACE] = min(found[GRACE], grace) if found[AWAITING] else grace
                found[AWAITING] += 1
        elif here and load64(block_of(control, worker) + at.BARRIER) > found[RELEASED]:
            found[HELD] += 1
        elif here or (stops and is_lost(control, worker)):  # all are about to hear that one is lost
            found[THERE] += 1
            found[ELSEWHERE] += waits_elsewhere(control, base, worker)


@kernel
def wake(control: Address) -> None:
    """Wakes all that sleep until something happens on this host."""
    notify(control)


@kernel
def close(base: Address, number: Int) -> Int:
    """Closes a round on this host: returns who is in it, a bit each. One that leaves makes it look again."""
    node = header_of(base).node_line
    while True:
        decision = load64(base + at.DECISIONS)
        members = np.int64(0)
        for worker in range(node):
            line = line_of(base, worker)
            if load32(line + at.ENROLLED) == 1 and load64(line + at.STAGED) == number:
                members |= np.int64(1) << worker
        store64(line_of(base, node) + at.PROPOSALS, int(members))
        if compare_swap64(base + at.DECISIONS, decision, (number << 16) | (node + 1)) == decision:
            return int(members)


@kernel
def fold(base: Address, number: Int, chunk: Int, members: Int, begins: Int, total: Data, count: Int) -> Int:
    """As ``node.fold``."""
    place = place_of(base, load64(base + at.COMMITTED))
    return add_part(base, place, number, members, begins, total, bounds(base, chunk)[0], count)


@kernel
def take(
    base: Address, home: Int, update: Address, number: Int, chunk: Int, total: Data, hyper: Data, count: Int
) -> None:
    """A chunk's whole sum of ``count`` contributions is here: makes the new values of it.

    The hyperparameters come with the sum, as they may be set anew on one host before they are on another.
    """
    lo, hi = bounds(base, chunk)
    before = load64(base + at.COMMITTED)
    elements = header_of(base).elements
    whole = elements * header_of(base).itemsize
    old, new = place_of(base, before), own_buffer(base, home, next_buffer(before, home))
    fence_release()  # who reads the new values there finds that COMMITTED no longer names the old ones
    if update != 0:
        places, part = (old, new, old + whole, new + whole), scratch(PART, total)
        for a in range(lo, hi, PART):
            b = min(hi, a + PART)
            if count > 0:
                copy_into(part[: b - a], total[a - lo : b - lo])
            update_between(base, update, number, a, b, part[: b - a], count, total, places, hyper.ctypes.data)
    elif count > 0:
        copy_into(array_at(base + new, elements, total)[lo:hi], total)
    else:
        copy_into(array_at(base + new, elements, total)[lo:hi], array_at(base + old, elements, total)[lo:hi])


@kernel
def commit(control: Address, base: Address, home: Int, number: Int, members: Int) -> None:
    """All chunks of a round are here: tells its members, and everybody where its values are."""
    for worker in range(header_of(base).node_line):
        if (members >> worker) & 1:
            include(control, base, worker, number)
    which = next_buffer(load64(base + at.COMMITTED), home)
    store64(base + at.COMMITTED, (number << 16) | ((home + 1) << 1) | which)
    notify(control)
