"""Synchronous rounds on several hosts: the node folds what this host's workers have staged into a sum that passes by.

The workers' side; the node's is ``node.py``.

The hosts are a chain. A chunk's sum begins on the first one with the old values, every host adds the slots of its own
workers in their order, and the last one sends the whole sum back along the chain (``hosts/rounds/rounds.py``). So every
element is ``((t + d0) + d1) + ...`` over the workers of all hosts in host order, as if they were on one::

    worker                               its host's node
    slot ready: STAGED, wake    ------>  all who live are ready: TAKING_PART, DECIDED
                                         for each chunk: the sum so far comes, slots are added, it is sent on
    copies the chunk            <------  the whole sum comes: into the other buffer, ARRIVED, wake

With an updater the sum does not hold the old values. It comes into TOTALS, and the workers of each host run the
updater over it, each its part of the chunk, as only they have the compiled loop: from the old buffer into the new one,
so that the lowest live one can do the part of one that is gone. What is contributed is always the whole slot: a worker
that dies before it is ready is in no chunk of a round, and one that dies after it in all.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,no-any-return,assignment"

from __future__ import annotations

from multiverso.compiling.atomics import array_at, load32, load64, scratch, store32, store64, words
from multiverso.compiling.declaring import Address, Data, Int, Words, inner, kernel
from multiverso.kernels.codes import DONE, LOST_SOMEONE
from multiverso.kernels.dense import PART, copy_into, store_both, subtract_into
from multiverso.kernels.rounds.calls import copy_rows, stage_difference
from multiverso.kernels.rounds.folding import NOTHING, WHOLE, bounds, buffer_of, part_of, slot_at, step_of, update_part
from multiverso.kernels.rounds.steps import OPEN, ROUND, STAGE, STAGED, finish, gather, publish_folded
from multiverso.kernels.rules import step_in_round, values_of_round
from multiverso.kernels.waits import (
    NOT_READY,
    READY,
    WAIT_WORDS,
    end_table_wait,
    header_of,
    is_lost,
    line_of,
    notify,
    pause,
    restart,
)
from multiverso.layout import words as at

_BEGAN = 0  # of the words of a wait, when its slice began: see ``waits.py``


@inner
def _publish(control, base, me, source, number):
    """Says that this worker's slot is ready for a round."""
    line = line_of(base, me)
    store32(line + at.SOURCES + 4 * (number & 1), source)
    store64(line + at.STAGED, step_of(base, number, header_of(base).chunk_count - 1))
    notify(control)


@inner
def _join_round(control, base, me, progress):
    """Is it known who takes part in the round? One that came too late joins the next."""
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
        for worker in range(header_of(base).table_workers):
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
            wait[_BEGAN] = 0  # a slice of its own; giving way was in vain before, and takes the nodes' time
            return state
        first = step_of(base, progress[ROUND], 0)
        code = pause(control, me, wait, event, at.FOR_ROUND, header_of(base).table_id, 0, first)
        if code != DONE:
            return code


@inner
def _apply(base, update, number, chunk, members, lo, hi, like):
    """Runs the updater over the sum of [lo, hi), a part of the chunk: from the old buffer and state into the new."""
    totals = base + load64(base + at.TOTALS)
    count = load64(totals + header_of(base).small_slots + 8 * chunk)
    sums, part = array_at(totals, header_of(base).elements, like), scratch(PART, like)
    for a in range(lo, hi, PART):
        b = min(hi, a + PART)
        if count > 0:
            copy_into(part[: b - a], sums[a:b])
        update_part(base, update, number, a, b, part[: b - a], count, like)
    return DONE


@inner
def _apply_all(control, base, update, me, progress, chunk, wait, like):
    """This worker's part of a chunk, then the wait for the others of this host; the parts of those that are gone."""
    number = progress[ROUND]
    step = step_of(base, number, chunk)
    members = load64(base + at.TAKING_PART + 8 * (number & 1))
    if load64(line_of(base, me) + at.FOLDED) < step:
        lo, hi = bounds(base, chunk)
        a, b = part_of(members, me, lo, hi)
        _apply(base, update, number, chunk, members, a, b, like)
        publish_folded(control, base, me, step, members)
    code = gather(control, base, update, me, number, chunk, members, wait, like, _apply)
    if code == DONE:
        end_table_wait(control, base, me)
        restart(wait)
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
    last = step_of(base, progress[ROUND], header_of(base).chunk_count - 1)
    store64(line_of(base, me) + at.FOLDED, last)
    finish(base, me, progress, what, size, call)


@inner
def _go_through(control, base, update, me, progress, local, last, read_chunk):
    """Waits for chunk after chunk, and reads each while the next ones are under way: DONE, or why it stopped."""
    _begin(control, base, me, progress)
    wait = words(WAIT_WORDS)
    for chunk in range(header_of(base).chunk_count):
        code = _chunk(control, base, update, me, progress, chunk, wait, local)
        if code != DONE:
            return code
        lo, hi = bounds(base, chunk)
        values = array_at(base + buffer_of(base, progress[ROUND]), header_of(base).elements, local)
        read_chunk(values[lo:hi], local[lo:hi], last[lo:hi])
    return DONE


@inner
def _read_nothing(values, local, last):
    pass


@inner
def _commit(control, base, update, me, progress, like):
    return _go_through(control, base, update, me, progress, like, like, _read_nothing)


@inner
def _read_one(values, local, last):
    copy_into(local, values)


@kernel
def read(control: Address, base: Address, update: Address, me: Int, progress: Words, out: Data, call: Address) -> Int:
    """As ``rounds.read``."""
    code = _go_through(control, base, update, me, progress, out, out, _read_one)
    if code != DONE:
        return code
    _finish(base, me, progress, at.GETS, out.size, call)
    return DONE


@kernel
def read_rows(
    control: Address, base: Address, update: Address, me: Int, progress: Words, ids: Words, out: Data, call: Address
) -> Int:
    """As ``rounds.read_rows``."""
    code = _commit(control, base, update, me, progress, out)
    if code != DONE:
        return code
    values = array_at(base + buffer_of(base, progress[ROUND]), header_of(base).elements, out)
    copy_rows(values, header_of(base).columns, ids, out)
    _finish(base, me, progress, at.GETS, out.size, call)
    return DONE


@kernel
def exchange(
    control: Address, base: Address, update: Address, me: Int, progress: Words, local: Data, last: Data, call: Address
) -> Int:
    """As ``rounds.exchange``; the difference goes into the slot as a whole."""
    if progress[OPEN] == 0:
        if progress[STAGED]:
            stage_difference(base, me, local, last)
        else:
            subtract_into(slot_at(base, me, local), local, last)
            progress[STAGED] = 1
        progress[OPEN] = 1  # the difference is in: it is not added again when this call goes in again
    code = _go_through(control, base, update, me, progress, local, last, store_both)
    if code != DONE:
        return code
    _finish(base, me, progress, at.EXCHANGES, 2 * local.size, call)
    return DONE


@kernel
def apply_rule(
    control: Address,
    base: Address,
    update: Address,
    me: Int,
    rule: Words,
    progress: Words,
    local: Data,
    does: Int,
    call: Address,
) -> Int:
    """As ``rules.apply_rule_in_round``."""
    return step_in_round(
        control, base, update, me, rule, progress, local, does, call, values_of_round, _commit, _finish
    )


@kernel
def leave(control: Address, base: Address, me: Int, progress: Words) -> None:
    """As ``rounds.leave``: what was added since the last read is in the others' next round."""
    if progress[STAGED] == 0 or progress[OPEN] != 0:
        return
    progress[STAGED] = 0
    _publish(control, base, me, WHOLE, progress[ROUND])
    _join_round(control, base, me, progress)
