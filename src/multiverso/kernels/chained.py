"""Synchronous rounds on several hosts: the node folds what this host's workers have staged into a sum that passes by.

The hosts are a chain. A chunk's sum begins on the first one with the old values, every host adds the slots of its own
workers in their order, and the last one sends the whole sum back along the chain (``hosts/rounds.py``). So every
element is ``((t + d0) + d1) + ...`` over the workers of all hosts in host order, as if they were on one::

    worker                               its host's node
    slot ready: STAGED, wake    ------>  all who live are ready: TAKING_PART, DECIDED
                                         for each chunk: the sum so far comes, slots are added, it goes on
    copies the chunk            <------  the whole sum comes: into the other buffer, ARRIVED, wake

With an updater the sum does not hold the old values. It comes into TOTALS, and the workers of each host run the
updater over it, each its part of the chunk, as only they have the compiled loop: from the old buffer into the new one,
so that the lowest live one can do the part of one that is gone. What is contributed is always the whole slot: a worker
that dies before it is ready is in no chunk of a round, and one that dies after it in all.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,no-any-return,assignment"

from __future__ import annotations

import numpy as np

from multiverso import layout as at
from multiverso.kernels.atomics import (
    add32,
    array_at,
    futex_wait,
    load32,
    load64,
    scratch,
    store32,
    store64,
    words,
)
from multiverso.kernels.codes import DONE, LOST_SOMEONE
from multiverso.kernels.declaring import Address, Data, Int, Words, inner, kernel
from multiverso.kernels.dense import (
    add_into,
    copy_into,
    end_call,
    record_operation,
    store_both,
    subtract_into,
    update_in_step,
)
from multiverso.kernels.folding import (
    NOTHING,
    WHOLE,
    add_one,
    bounds,
    buffer_of,
    divide_by,
    part_of,
    slot_at,
    state_of,
    step_of,
)
from multiverso.kernels.round_steps import OPEN, ROUND, STAGE, STAGED, finish
from multiverso.kernels.rounds import copy_rows, stage_difference
from multiverso.kernels.rules import pull_round, stage_push
from multiverso.kernels.waits import (
    NOT_READY,
    READY,
    WAIT_WORDS,
    end_table_wait,
    is_live,
    is_lost,
    line_of,
    notify,
    pause,
    restart,
)

_PART = 4096

# -- the worker ------------------------------------------------------------------------------------------------


@inner
def _publish(control, base, me, source, number):
    """Says that this worker's slot is ready for a round."""
    line = line_of(base, me)
    store32(line + at.SOURCES + 4 * (number & 1), source)
    store64(line + at.STAGED, step_of(base, number, load64(base + at.CHUNK_COUNT) - 1))
    notify(control)


@inner
def _join_round(control, base, me, progress):
    """Is it known who takes part in the round? One that came too late goes on to the next."""
    while load64(base + at.DECIDED) >= progress[ROUND]:
        number = progress[ROUND]
        members = load64(base + at.TAKING_PART + 8 * (number & 1))
        if load64(base + at.DECIDED) <= number + 1 and (members >> me) & 1:
            return READY
        source = load32(line_of(base, me) + at.SOURCES + 4 * (number & 1))
        progress[ROUND] = number + 1
        store64(line_of(base, me) + at.FIRST_STEP, step_of(base, number + 1, 0))
        store64(line_of(base, me) + at.FOLDED, step_of(base, number + 1, 0) - 1)
        _publish(control, base, me, source, number + 1)
    return NOT_READY


@inner
def _state(control, base, me, progress, chunk):
    """Is a chunk's sum here?"""
    known = _join_round(control, base, me, progress) == READY
    if known and load64(base + at.ARRIVED) >= step_of(base, progress[ROUND], chunk):
        return READY
    if load32(control + at.CONTINUE_WITHOUT_LOST) == 0:
        for worker in range(load64(base + at.TABLE_WORKERS)):
            if load32(line_of(base, worker) + at.ENROLLED) == 1 and is_lost(control, worker):
                return LOST_SOMEONE
    return NOT_READY


@inner
def _await_chunk(control, base, me, progress, chunk, wait):
    while True:
        event = load32(control + at.EVENT)
        state = _state(control, base, me, progress, chunk)
        if state != NOT_READY:
            end_table_wait(control, base, me)
            restart(wait)
            return state
        first = step_of(base, progress[ROUND], 0)
        code = pause(control, me, wait, event, at.FOR_ROUND, load64(base + at.TABLE_ID), 0, first)
        if code != DONE:
            return code


@inner
def _apply(base, update, number, chunk, lo, hi, like):
    """Runs the updater over the sum of [lo, hi), a part of the chunk: from the old buffer and state into the new."""
    elements, itemsize = load64(base + at.ELEMENTS), load64(base + at.ITEMSIZE)
    totals = base + load64(base + at.TOTALS)
    count = load64(totals + load64(base + at.SMALL_SLOTS) + 8 * chunk)
    sums, part = array_at(totals, elements, like), scratch(_PART, like)
    new = array_at(base + buffer_of(base, number), elements, like)
    old = array_at(base + buffer_of(base, number - 1), elements, like)
    for a in range(lo, hi, _PART):
        b = min(hi, a + _PART)
        copy_into(new[a:b], old[a:b])
        for s in range(load64(base + at.STATE_COUNT)):
            skip = (s * elements + a) * itemsize
            target = array_at(base + state_of(base, number) + skip, b - a, like)
            copy_into(target, array_at(base + state_of(base, number - 1) + skip, b - a, like))
        if count > 0:
            copy_into(part[: b - a], sums[a:b])
            if load64(base + at.MEAN):
                divide_by(part[: b - a], count)
            update_in_step(base, update, a, new[a:b], part[: b - a], state_of(base, number), number)


@inner
def _publish_applied(control, base, worker, step, members):
    store64(line_of(base, worker) + at.FOLDED, step)
    for other in range(load64(base + at.TABLE_WORKERS)):
        if (members >> other) & 1 and load64(line_of(base, other) + at.FOLDED) < step:
            return
    notify(control)


@inner
def _apply_all(control, base, update, me, progress, chunk, wait, like):
    """This worker's part of a chunk, then the wait for the others of this host; the parts of those that are gone."""
    number = progress[ROUND]
    step = step_of(base, number, chunk)
    members = load64(base + at.TAKING_PART + 8 * (number & 1))
    lo, hi = bounds(base, chunk)
    if load64(line_of(base, me) + at.FOLDED) < step:
        a, b = part_of(members, me, lo, hi)
        _apply(base, update, number, chunk, a, b, like)
        _publish_applied(control, base, me, step, members)
    continues = load32(control + at.CONTINUE_WITHOUT_LOST)
    while True:
        event = load32(control + at.EVENT)
        ready, gone, lowest = True, False, -1
        for worker in range(load64(base + at.TABLE_WORKERS)):
            if not (members >> worker) & 1:
                continue
            here = is_live(control, worker)
            if here and lowest < 0:
                lowest = worker
            if load64(line_of(base, worker) + at.FOLDED) < step:
                ready = False
                if not here:
                    gone = True
                    if is_lost(control, worker) and continues == 0:
                        return LOST_SOMEONE
        if ready:
            end_table_wait(control, base, me)
            restart(wait)
            return DONE
        if gone and lowest == me:
            for worker in range(load64(base + at.TABLE_WORKERS)):
                # gone first, then not applied, as in round_steps._gather
                gone = (members >> worker) & 1 and not is_live(control, worker)
                if gone and load64(line_of(base, worker) + at.FOLDED) < step:
                    a, b = part_of(members, worker, lo, hi)
                    _apply(base, update, number, chunk, a, b, like)
                    _publish_applied(control, base, worker, step, members)
            continue
        code = pause(control, me, wait, event, at.FOR_ROUND, load64(base + at.TABLE_ID), 1, step)
        if code != DONE:
            return code


@inner
def _chunk(control, base, update, me, progress, chunk, wait, like):
    """Waits until a chunk's new values are in this round's buffer."""
    code = _await_chunk(control, base, me, progress, chunk, wait)
    if code == DONE and update != 0:
        code = _apply_all(control, base, update, me, progress, chunk, wait, like)
    return code


@inner
def _begin(control, base, me, progress):
    """Publishes this worker's slot; once a round, however often the call goes in again."""
    progress[OPEN] = 1
    if progress[STAGE] == 0:
        progress[STAGE] = 1
        _publish(control, base, me, WHOLE if progress[STAGED] else NOTHING, progress[ROUND])


@inner
def _finish(base, me, progress, what, size, call):
    last = step_of(base, progress[ROUND], load64(base + at.CHUNK_COUNT) - 1)
    store64(line_of(base, me) + at.FOLDED, last)
    finish(base, me, progress, what, size, call)


@inner
def _all_chunks(control, base, update, me, progress, like):
    _begin(control, base, me, progress)
    wait = words(WAIT_WORDS)
    for chunk in range(load64(base + at.CHUNK_COUNT)):
        code = _chunk(control, base, update, me, progress, chunk, wait, like)
        if code != DONE:
            return code
    return DONE


@kernel
def read(
    control: Address, base: Address, update: Address, me: Int, progress: Words, out: Data, call: Address
) -> Int:
    """As ``rounds.read``: copies chunk after chunk while the next ones are under way."""
    _begin(control, base, me, progress)
    wait = words(WAIT_WORDS)
    for chunk in range(load64(base + at.CHUNK_COUNT)):
        code = _chunk(control, base, update, me, progress, chunk, wait, out)
        if code != DONE:
            return code
        lo, hi = bounds(base, chunk)
        copy_into(out[lo:hi], array_at(base + buffer_of(base, progress[ROUND]), out.size, out)[lo:hi])
    _finish(base, me, progress, at.GETS, out.size, call)
    return DONE


@kernel
def read_rows(
    control: Address,
    base: Address,
    update: Address,
    me: Int,
    progress: Words,
    ids: Words,
    out: Data,
    call: Address,
) -> Int:
    """As ``rounds.read_rows``."""
    code = _all_chunks(control, base, update, me, progress, out)
    if code != DONE:
        return code
    values = array_at(base + buffer_of(base, progress[ROUND]), load64(base + at.ELEMENTS), out)
    copy_rows(values, load64(base + at.COLUMNS), ids, out)
    _finish(base, me, progress, at.GETS, out.size, call)
    return DONE


@kernel
def exchange(
    control: Address,
    base: Address,
    update: Address,
    me: Int,
    progress: Words,
    local: Data,
    last: Data,
    call: Address,
) -> Int:
    """As ``rounds.exchange``; the difference goes into the slot as a whole."""
    if progress[OPEN] == 0:
        if progress[STAGED]:
            stage_difference(base, me, local, last)
        else:
            subtract_into(slot_at(base, me, local), local, last)
            progress[STAGED] = 1
        progress[OPEN] = 1  # the difference is in: it is not added again when this call goes in again
    _begin(control, base, me, progress)
    wait = words(WAIT_WORDS)
    for chunk in range(load64(base + at.CHUNK_COUNT)):
        code = _chunk(control, base, update, me, progress, chunk, wait, local)
        if code != DONE:
            return code
        lo, hi = bounds(base, chunk)
        values = array_at(base + buffer_of(base, progress[ROUND]), local.size, local)
        store_both(values[lo:hi], local[lo:hi], last[lo:hi])
    _finish(base, me, progress, at.EXCHANGES, 2 * local.size, call)
    return DONE


@kernel
def apply_rule(
    control: Address,
    base: Address,
    update: Address,
    push: Address,
    pull: Address,
    me: Int,
    local_state: Address,
    hyper: Address,
    progress: Words,
    local: Data,
    reads: Int,
    call: Address,
) -> Int:
    """As ``rules.apply_rule_in_round``."""
    if push != 0 and progress[OPEN] == 0:
        stage_push(base, push, me, local_state, hyper, progress, local)
    if reads == 0:
        record_operation(base, me, at.ADDS, local.size)
        end_call(call)
        return DONE
    code = _all_chunks(control, base, update, me, progress, local)
    if code != DONE:
        return code
    if pull != 0:
        pull_round(base, pull, local_state, hyper, progress, local)
    if push != 0:
        _finish(base, me, progress, at.EXCHANGES, 2 * local.size, call)
    else:
        _finish(base, me, progress, at.GETS, local.size, call)
    return DONE


@kernel
def leave(control: Address, base: Address, me: Int, progress: Words) -> None:
    """As ``rounds.leave``: what was added since the last read is in the others' next round."""
    if progress[STAGED] == 0 or progress[OPEN] != 0:
        return
    progress[STAGED] = 0
    _publish(control, base, me, WHOLE, progress[ROUND])
    _join_round(control, base, me, progress)


# -- the node --------------------------------------------------------------------------------------------------


@kernel
def members_of(control: Address, base: Address, local: Int, number: Int) -> Int:
    """Returns who of this host's workers (``local``: bits) takes part in a round, or -1 while one is not ready."""
    step = step_of(base, number, load64(base + at.CHUNK_COUNT) - 1)
    members = np.int64(0)
    for worker in range(load64(base + at.TABLE_WORKERS)):
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
    step = step_of(base, number, load64(base + at.CHUNK_COUNT) - 1)
    for worker in range(load64(base + at.TABLE_WORKERS)):
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
    elements = load64(base + at.ELEMENTS)
    old = array_at(base + buffer_of(base, number - 1), elements, total)[lo:hi]
    for worker in range(load64(base + at.TABLE_WORKERS)):
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
    values = array_at(base + buffer_of(base, 0), load64(base + at.ELEMENTS), total)[lo:hi]
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
    elements, last = load64(base + at.ELEMENTS), load64(base + at.CHUNK_COUNT) - 1
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
        store64(totals + load64(base + at.SMALL_SLOTS) + 8 * chunk, count)
    store64(base + at.ARRIVED, step_of(base, number, chunk))
    notify(control)
