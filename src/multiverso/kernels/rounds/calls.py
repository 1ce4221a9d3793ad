"""Synchronous rounds, as they are called: adds are staged in the worker's slot, a read or an exchange ends a round.

``steps.py`` describes how a round is agreed on and gone through.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,no-any-return"

from __future__ import annotations

from multiverso.compiling.atomics import array_at, compare_swap64, load64, store32, store64
from multiverso.compiling.declaring import Address, Data, Int, Words, inner, kernel
from multiverso.kernels.codes import DONE
from multiverso.kernels.dense import add_into, copy_into, end_call, record_operation
from multiverso.kernels.rounds.folding import (
    CHUNKED,
    NOTHING,
    WHOLE,
    buffer_of,
    fold,
    push_pull_to,
    slot_at,
    step_of,
    weigh,
)
from multiverso.kernels.rounds.steps import (
    OPEN,
    ROUND,
    STAGED,
    begin_alone,
    end_alone,
    finish,
    go_through,
    members_in,
    move_to_next_round,
    read_both,
    step_in,
)
from multiverso.kernels.waits import header_of, line_of
from multiverso.layout import words as at


@kernel
def stage(base: Address, me: Int, progress: Words, delta: Data, weight: Int, call: Address) -> None:
    """Puts a delta into this worker's slot, as the round's first or added to what is there; ``weight``: see `weigh`."""
    weigh(base, me, progress[STAGED], weight)
    slot = slot_at(base, me, delta)
    if progress[STAGED]:
        add_into(slot, delta)
    else:
        copy_into(slot, delta)
    progress[STAGED] = 1
    record_operation(base, me, at.ADDS, delta.size)
    end_call(call)


@inner
def stage_difference(base, me, local, last):
    """Adds a difference to what is in this worker's slot."""
    slot = slot_at(base, me, local)
    for i in range(slot.size):
        slot[i] += local[i] - last[i]


@kernel
def stage_rows(base: Address, me: Int, progress: Words, ids: Words, delta: Data, weight: Int, call: Address) -> Int:
    """Returns the position of a bad row id, or -1 once the rows are in the slot."""
    head = header_of(base)
    columns, elements = head.columns, head.elements
    for i in range(ids.size):
        if ids[i] < 0 or ids[i] >= elements // columns:
            return i
    weigh(base, me, progress[STAGED], weight)
    slot = slot_at(base, me, delta)
    if progress[STAGED] == 0:
        for i in range(slot.size):
            slot[i] = 0
    for i in range(ids.size):
        lo = ids[i] * columns
        add_into(slot[lo : lo + columns], delta[i * columns : (i + 1) * columns])
    progress[STAGED] = 1
    record_operation(base, me, at.ADDS, delta.size)
    end_call(call)
    return -1


@inner
def commit(control, base, update, me, progress, like):
    """Goes through a round with what is in this worker's slot, or with nothing."""
    source = WHOLE if progress[STAGED] else NOTHING
    return go_through(control, base, update, me, source, progress, like, like, like, fold)


@inner
def copy_rows(values, columns, ids, out):
    for i in range(ids.size):
        lo = ids[i] * columns
        copy_into(out[i * columns : (i + 1) * columns], values[lo : lo + columns])


@kernel
def read(control: Address, base: Address, update: Address, me: Int, progress: Words, out: Data, call: Address) -> Int:
    """A ``get``: goes through a round, whose result is in ``out`` afterwards; DONE, or why it stopped."""
    code = commit(control, base, update, me, progress, out)
    if code != DONE:
        return code
    copy_into(out, array_at(base + buffer_of(base, progress[ROUND]), out.size, out))
    finish(base, me, progress, at.GETS, out.size, call)
    return DONE


@kernel
def read_rows(
    control: Address, base: Address, update: Address, me: Int, progress: Words, ids: Words, out: Data, call: Address
) -> Int:
    """A ``get`` of rows, whose ids were checked; DONE, or why it stopped."""
    code = commit(control, base, update, me, progress, out)
    if code != DONE:
        return code
    values = array_at(base + buffer_of(base, progress[ROUND]), header_of(base).elements, out)
    copy_rows(values, header_of(base).columns, ids, out)
    finish(base, me, progress, at.GETS, out.size, call)
    return DONE


@kernel
def exchange(
    control: Address, base: Address, update: Address, me: Int, progress: Words, local: Data, last: Data, call: Address
) -> Int:
    """A round of ``local - last``, whose result is in both arrays afterwards; DONE, or why it stopped.

    Where something was added before, the difference joins that in the slot; otherwise it goes through in chunks, or,
    at once where no other worker is in the round and there is no updater.
    """
    staged, number = progress[STAGED], progress[ROUND]
    if staged == 0 and update == 0 and progress[OPEN] == 0 and begin_alone(control, base, me, number):
        new = array_at(base + buffer_of(base, number), local.size, local)
        push_pull_to(new, array_at(base + buffer_of(base, number - 1), local.size, local), local, last)
        finish(base, me, progress, at.EXCHANGES, 2 * local.size, call)
        end_alone(base, me, number)
        return DONE
    if staged and progress[OPEN] == 0:
        stage_difference(base, me, local, last)
        progress[OPEN] = 1  # the difference is in: it is not added again when this call goes in again
    source = WHOLE if staged else CHUNKED
    code = go_through(control, base, update, me, source, progress, local, last, local, fold)
    if code != DONE:
        return code
    if staged:
        read_both(base, progress[ROUND], 0, local.size, local, last)
    finish(base, me, progress, at.EXCHANGES, 2 * local.size, call)
    return DONE


@kernel
def leave(control: Address, base: Address, me: Int, progress: Words) -> None:
    """Publishes what was added since the last read, for the others' next round, before a worker leaves.

    Its leaving wakes the others, who look at it then.
    """
    if progress[STAGED] == 0 or progress[OPEN] != 0:
        return
    progress[STAGED] = 0
    number = progress[ROUND]
    store32(line_of(base, me) + at.SOURCES + 4 * (number & 1), WHOLE)
    store64(line_of(base, me) + at.STAGED, step_of(base, number, header_of(base).chunk_count - 1))
    while True:
        first = step_of(base, progress[ROUND], 0)
        decision = base + at.DECISIONS + 8 * (first & 1)
        seen = load64(decision)
        if step_in(seen) < first:
            # A latecomer that the round in flight does not know of is not waited for: a decision that was collected
            # before this slot was ready must fail, and is made again.
            touched = (seen & ~0xFF00) | ((seen + 0x100) & 0xFF00)
            if compare_swap64(decision, seen, touched) == seen:
                break
        elif (members_in(base, seen, first) >> me) & 1:
            break
        else:
            move_to_next_round(base, me, progress)


@kernel
def committed_copy(base: Address, number: Int, out: Data) -> None:
    """Copies the values after a round, which must be one of the last two."""
    values = array_at(base + buffer_of(base, number), out.size, out)
    copy_into(out, values)


@kernel
def committed_put(base: Address, number: Int, source: Data) -> None:
    """Overwrites the values after a round."""
    values = array_at(base + buffer_of(base, number), source.size, source)
    copy_into(values, source)


@kernel
def committed_rows(base: Address, number: Int, ids: Words, out: Data) -> None:
    """Copies rows as they are after a round."""
    values = array_at(base + buffer_of(base, number), header_of(base).elements, out)
    copy_rows(values, header_of(base).columns, ids, out)
