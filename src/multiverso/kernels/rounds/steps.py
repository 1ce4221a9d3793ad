"""The steps of synchronous rounds: every worker's slot is folded in worker order into the other of two buffers.

A round goes through a table in steps, a chunk of 512 KiB each, so that what is exchanged stays in the cache. Two
words say how far a worker is: the last step of which its slot is ready (STAGED), and the last of which its part
is folded (FOLDED). Only it writes them, there is no counter and no lock, so a death leaves nothing half-updated.
The first worker that sees all live ones at a step fixes its members by one compare-and-swap; the lowest live
member folds the part of one that is gone (from the old buffer into the new, so doing it twice is harmless).
Every element is ``((t + d0) + d1) + ...`` whatever the partition: the same bits in every worker and every run.

What was added with ``add`` is in the worker's slot as a whole before the round begins; an ``exchange`` puts chunk
after chunk into two small slots. A worker that dies in the middle of an exchange may so have contributed to the
first chunks only: to the same ones in all survivors.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,no-any-return,assignment"

from __future__ import annotations

import numpy as np

from multiverso.compiling.atomics import array_at, compare_swap64, load32, load64, store32, store64, words
from multiverso.compiling.declaring import inner
from multiverso.kernels.codes import DONE, LOST_SOMEONE
from multiverso.kernels.dense import PART, end_call, store_both, subtract_into
from multiverso.kernels.rounds.folding import CHUNKED, bounds, buffer_of, part_of, small_slot_at, step_of
from multiverso.kernels.waits import (
    NOT_READY,
    READY,
    WAIT_WORDS,
    end_table_wait,
    header_of,
    is_live,
    is_lost,
    line_of,
    notify,
    pause,
    restart,
    tell_watchers,
)
from multiverso.layout import words as at

# the words of an unfinished round; members of each chunk follow
OPEN, CHUNK, ROUND, STAGE, STAGED, MEMBERS = (
    at.ROUND_OPEN,
    at.ROUND_CHUNK,
    at.ROUND_NUMBER,
    at.ROUND_STAGE,
    at.ROUND_STAGED,
    at.ROUND_MEMBERS,
)


@inner
def takes_part(control, base, worker, step):
    """Returns whether others have to wait for a worker at a step."""
    line = line_of(base, worker)
    return load32(line + at.ENROLLED) == 1 and load64(line + at.FIRST_STEP) <= step and is_live(control, worker)


@inner
def _collect(control, base, step, among):
    """(state, members) of a step: have all live workers of the table, ``among`` these, their slots ready?

    Each must have folded the step before, too: then it has read that step's decision, whose place is used again
    two steps later. After a round's first step it is among the members of the step before: a latecomer that the
    first went ahead without may have its slot ready for all of them, and is in the next round instead.
    """
    continues = load32(control + at.CONTINUE_WITHOUT_LOST)
    members = np.int64(0)
    state = READY
    for worker in range(header_of(base).node_line):
        line = line_of(base, worker)
        if load32(line + at.ENROLLED) != 1:
            continue
        if is_lost(control, worker) and continues == 0:
            return LOST_SOMEONE, members
        if not (among >> worker) & 1:
            continue
        staged = load64(line + at.STAGED) >= step
        if takes_part(control, base, worker, step) and (not staged or load64(line + at.FOLDED) < step - 1):
            state = NOT_READY
        if staged and load64(line + at.FIRST_STEP) <= step:
            # a worker that died or left after its slot was ready is a member like the others
            members |= np.int64(1) << worker
    return state, members


@inner
def begin_alone(control, base, me, number):
    """Fixes a round whose only member is this worker, before its first step: whether it is. Others may be in it: not.

    A latecomer finds what it always finds when the others go ahead without it.
    """
    first = step_of(base, number, 0)
    decision = base + at.DECISIONS + 8 * (first & 1)
    seen = load64(decision)
    mine = np.int64(1) << me
    if step_in(seen) >= first:
        return False
    state, others = _collect(control, base, first, ~mine)
    if state != READY or others != 0:
        return False
    store64(line_of(base, me) + at.PROPOSALS + 8 * (first & 1), mine)
    if compare_swap64(decision, seen, (first << 16) | (me + 1)) != seen:
        return False
    notify(control)  # a latecomer that waits for this round has to be in the next one
    return True


@inner
def end_alone(base, me, number):
    """Says that a round that was begun alone is over."""
    line, last = line_of(base, me), step_of(base, number, header_of(base).chunk_count - 1)
    store64(line + at.FOLDED, last)
    store64(line + at.STAGED, last)


@inner
def step_in(decision):
    """The step of a decision: (step << 16) | (how often it was touched, modulo 256, << 8) | proposer + 1."""
    return decision >> 16


@inner
def members_in(base, decision, step):
    """The members that a decision fixes for a step; none when it is of a later one."""
    if step_in(decision) != step:
        return np.int64(0)
    return load64(line_of(base, (decision & 0xFF) - 1) + at.PROPOSALS + 8 * (step & 1))


@inner
def publish_folded(control, base, worker, step, members):
    """Says that a worker's part of a step is folded; the last one wakes the others."""
    store64(line_of(base, worker) + at.FOLDED, step)
    for other in range(header_of(base).node_line):
        if (members >> other) & 1 and load64(line_of(base, other) + at.FOLDED) < step:
            return
    notify(control)


@inner
def move_to_next_round(base, me, progress):
    """This worker joined too late for the round: it takes part from the next one on."""
    line = line_of(base, me)
    number = progress[ROUND] + 1
    source = load32(line + at.SOURCES + 4 * ((number - 1) & 1))
    store32(line + at.SOURCES + 4 * (number & 1), source)
    first = step_of(base, number, 0)
    staged = load64(line + at.STAGED) + header_of(base).chunk_count
    store64(line + at.FIRST_STEP, first)
    store64(line + at.FOLDED, first - 1)
    store64(line + at.STAGED, staged)
    progress[ROUND] = number


@inner
def _last_round_is_over(control, base, update, me, number, like, fold_part):
    """Returns whether round ``number - 1`` is finished, which only a worker that joined in the middle of it has to ask.

    When all who took part in it are gone before anyone had its result, the lowest of those that are left ends it:
    as one in which nothing was added, where the values before it are there still.
    """
    if load64(base + at.COMMITTED) >= number - 1:
        return True
    first = step_of(base, number, 0)
    lowest = -1
    for worker in range(header_of(base).node_line):
        if takes_part(control, base, worker, first):
            if load64(line_of(base, worker) + at.FIRST_STEP) < first:
                return False
            if lowest < 0:
                lowest = worker
    if lowest != me:
        return False
    if load64(base + at.COMMITTED) >= number - 1:
        return True  # looked at again once all others are gone: one may have finished it, and left after that
    if fold_part(base, update, number - 1, 0, np.int64(0), 0, header_of(base).elements, like) != DONE:
        return False
    store64(base + at.COMMITTED, number - 1)
    return True


@inner
def _decide(control, base, update, me, progress, wait, like, fold_part):
    """Fixes or learns the members of the step: DONE, or why it has to wait or stop."""
    while True:
        event = load32(control + at.EVENT)
        step = step_of(base, progress[ROUND], progress[CHUNK])
        decision = base + at.DECISIONS + 8 * (step & 1)
        seen = load64(decision)
        if step_in(seen) >= step:
            members = members_in(base, seen, step)
            if (members >> me) & 1:
                progress[MEMBERS + progress[CHUNK]] = members
                return DONE
            move_to_next_round(base, me, progress)
            notify(control)  # another latecomer may wait for this one to be through with the round
            continue
        among = progress[MEMBERS + progress[CHUNK] - 1] if progress[CHUNK] > 0 else np.int64(-1)
        state, members = _collect(control, base, step, among)
        if state == LOST_SOMEONE:
            return LOST_SOMEONE
        number = progress[ROUND]
        if progress[CHUNK] == 0 and not _last_round_is_over(control, base, update, me, number, like, fold_part):
            state = NOT_READY
        if state == READY:
            # a worker that leaves an add makes a decision fail that was collected before its slot was ready
            store64(line_of(base, me) + at.PROPOSALS + 8 * (step & 1), members)
            compare_swap64(decision, seen, (step << 16) | (me + 1))
            notify(control)
            continue
        code = pause(control, me, wait, event, at.FOR_ROUND, header_of(base).table_id, 0, step)
        if code != DONE:
            return code


@inner
def gather(control, base, update, me, number, chunk, members, wait, like, fold_part):
    """Waits until every part of a chunk is folded; folds the parts of members that are gone, as ``fold_part`` does."""
    step = step_of(base, number, chunk)
    lo, hi = bounds(base, chunk)
    continues = load32(control + at.CONTINUE_WITHOUT_LOST)
    while True:
        event = load32(control + at.EVENT)
        ready, gone = True, False
        lowest = -1
        for worker in range(header_of(base).node_line):
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
            return DONE
        if gone and lowest == me:
            for worker in range(header_of(base).node_line):
                # gone first, then not folded: the other way round it may fold, continue and leave between the two, and
                # its slot would be read when it holds the next round's
                gone = (members >> worker) & 1 and not is_live(control, worker)
                if gone and load64(line_of(base, worker) + at.FOLDED) < step:
                    a, b = part_of(members, worker, lo, hi)
                    code = fold_part(base, update, number, chunk, members, a, b, like)
                    if code != DONE:
                        return code
                    publish_folded(control, base, worker, step, members)
            continue
        code = pause(control, me, wait, event, at.FOR_ROUND, header_of(base).table_id, 1, step)
        if code != DONE:
            return code


@inner
def read_both(base, number, lo, hi, local, last):
    """Copies [lo, hi) of the values after a round to both arrays of an exchange."""
    values = array_at(base + buffer_of(base, number), local.size, local)
    store_both(values[lo:hi], local[lo:hi], last[lo:hi])


@inner
def go_through(control, base, update, me, source, progress, local, last, like, fold_part):
    """Goes through the chunks of a round, one behind with what the others fold: DONE, or why it stopped.

    The stages of a chunk: 0 stage it, 1 gather the chunk before, 2 decide and fold, with ``fold_part``: `fold`, or what
    takes the same arguments, may be called again, and returns DONE or why it stopped.
    """
    wait = words(WAIT_WORDS)
    chunks = header_of(base).chunk_count
    while True:
        chunk, number = progress[CHUNK], progress[ROUND]
        if progress[STAGE] == 0:
            if chunk == 0:
                progress[OPEN] = 1
                store32(line_of(base, me) + at.SOURCES + 4 * (number & 1), source)
            if chunk < chunks and source == CHUNKED:
                a, b = bounds(base, chunk)
                subtract_into(small_slot_at(base, me, chunk, like)[: b - a], local[a:b], last[a:b])
                step = step_of(base, number, chunk)
                store64(line_of(base, me) + at.STAGED, step)
            elif chunk == 0:
                store64(line_of(base, me) + at.STAGED, step_of(base, number, chunks - 1))
            progress[STAGE] = 1
        if progress[STAGE] == 1:
            if chunk > 0:
                members = progress[MEMBERS + chunk - 1]
                code = gather(control, base, update, me, number, chunk - 1, members, wait, like, fold_part)
                if code != DONE:
                    return code
                if source == CHUNKED:
                    a, b = bounds(base, chunk - 1)
                    lo, hi = part_of(members, me, a, b)  # its own part was read when it was folded
                    read_both(base, number, a, lo, local, last)
                    read_both(base, number, hi, b, local, last)
            if chunk == chunks:
                end_table_wait(control, base, me)
                return DONE
            progress[STAGE] = 2
        if progress[STAGE] == 2:
            code = _decide(control, base, update, me, progress, wait, like, fold_part)
            if code != DONE:
                return code
            end_table_wait(control, base, me)
            number = progress[ROUND]
            a, b = bounds(base, chunk)
            members = progress[MEMBERS + chunk]
            lo, hi = part_of(members, me, a, b)
            if source == CHUNKED:
                for a in range(lo, hi, PART):
                    b = min(hi, a + PART)
                    fold_part(base, update, number, chunk, members, a, b, like)
                    read_both(base, number, a, b, local, last)
            else:
                code = fold_part(base, update, number, chunk, members, lo, hi, like)
                if code != DONE:
                    return code
            publish_folded(control, base, me, step_of(base, number, chunk), members)
            progress[CHUNK] = chunk + 1
            progress[STAGE] = 0
            restart(wait)


@inner
def finish(base, me, progress, what, size, call):
    """The round is over for this worker, which has what it read."""
    store64(base + at.COMMITTED, progress[ROUND])
    line = line_of(base, me)
    store64(line + what, load64(line + what) + 1)
    store64(line + at.WEIGHT, 0)
    store64(line + at.BYTES, load64(line + at.BYTES) + size * header_of(base).itemsize)
    progress[OPEN] = 0
    progress[CHUNK] = 0
    progress[STAGE] = 0
    progress[STAGED] = 0
    progress[ROUND] += 1
    tell_watchers(base)
    end_call(call)
