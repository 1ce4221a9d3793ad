"""Rounds that do not wait for the slowest: one is closed when all have come, or enough have and their grace is over.

A worker may stop anywhere and continue twenty rounds later, so nothing that others need may wait for it, and nothing
that it does late may reach them:

- ``STAGED``: the one round that this worker's slot is ready for. It is changed only once that round is closed.
- ``DECISIONS``, by compare-and-swap: who closed the round that is open; who was ready then is in its ``PROPOSALS``.
- Whoever sees a closed round may fold it, the whole of it, into a buffer of its own. The one that closed it does;
  others do when it is gone or takes too long. They all come to the same bits.
- ``COMMITTED``, by compare-and-swap from the round before: the round, and whose buffer holds its values. Who comes
  second has folded in vain, perhaps what was overwritten meanwhile, and nobody sees it.
- ``INCLUDED``: before that swap, each member is told that its slot was in. One that finds its round finished and is not
  told so was late: the same slot is ready for the round that is open now.
- ``LATE_FOR``: what a late worker waits for. The other tables' rounds are closed without it: it comes to none of them
  before that round is finished, and those who have to come to it may be the ones that would wait here.

A slot and a buffer are overwritten only by their owner, after COMMITTED is past what they were good for. So who reads
one looks at COMMITTED again afterwards.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,no-any-return"

from __future__ import annotations

import numpy as np

from multiverso.compiling.atomics import (
    array_at,
    compare_swap64,
    fence_acquire,
    fence_release,
    load32,
    load64,
    monotonic_ns,
    store32,
    store64,
    words,
)
from multiverso.compiling.declaring import Address, Data, Int, Words, inner, kernel
from multiverso.kernels.codes import DONE, LOST_SOMEONE
from multiverso.kernels.dense import copy_into, end_call, record_operation, store_both, subtract_into
from multiverso.kernels.rounds.calls import stage_difference
from multiverso.kernels.rounds.folding import NOTHING, WHOLE, fold_between, slot_address, slot_at
from multiverso.kernels.rounds.steps import OPEN, ROUND, STAGE, STAGED, takes_part
from multiverso.kernels.rules import step_in_round
from multiverso.kernels.waits import (
    FOREVER,
    NOT_READY,
    READY,
    WAIT_WORDS,
    block_of,
    end_table_wait,
    header_of,
    is_live,
    is_lost,
    line_of,
    notify,
    pause,
    pause_until,
)
from multiverso.layout import words as at

# where the values are that this worker has read last; of which round; how many it has read
VALUES, READ, READS = at.ROUND_VALUES, at.ROUND_READ, at.ROUND_READS
# how many have to come, of how many (0: so many); nanoseconds of grace; when they had come, and a close was seen
NEEDED, OF, GRACE, REACHED, DECIDED = at.ROUND_NEEDED, at.ROUND_OF, at.ROUND_GRACE, at.ROUND_REACHED, at.ROUND_DECIDED
# of a replay: the round whose values this worker reads; when a round that enough have come to may be closed; how much
# later than expected this worker has come
GETS, UNTIL, LATENESS = at.ROUND_GETS, at.ROUND_UNTIL, at.ROUND_LATENESS
# nanoseconds that who has closed a round has for folding it, and for each element
_FOLDING, _FOLDING_EACH = 10_000_000, 8


@inner
def round_in(word):
    """The round of COMMITTED: (round << 16) | (worker + 1) << 1 | which of its buffers; of a decision, as in rounds."""
    return word >> 16


@inner
def late_for(base, number):
    """What LATE_FOR is while a worker waits for this round of this table."""
    return (number << 20) | ((header_of(base).table_id + 1) & 0xFFFFF)


@inner
def waits_elsewhere(control, base, worker):
    """Whether a worker came late to another table's round, and waits for the next one there."""
    round_and_table = load64(block_of(control, worker) + at.LATE_FOR)
    return round_and_table != 0 and (round_and_table ^ late_for(base, 0)) & 0xFFFFF != 0


@inner
def expected_until(line, now, lateness):
    """Until when a worker that has not come is expected: FOREVER where nobody knows, 0 if it is not expected now.

    Where this one is late itself, others are expected to be as late: a step may be longer for all of them.
    """
    begin, end = load64(line + at.EXPECTED), load64(line + at.EXPECTED + 8)
    if end == 0:
        return FOREVER
    return end + lateness if begin <= now < end + lateness else 0


@inner
def include(control, base, worker, number):
    """Tells a worker that its slot is in a round, before that is committed."""
    included = line_of(base, worker) + at.INCLUDED
    known = load64(included)
    while known < number and compare_swap64(included, known, number) != known:
        known = load64(included)
    compare_swap64(block_of(control, worker) + at.LATE_FOR, late_for(base, number), 0)


@inner
def _is_mine(word, me):
    return (word & 0xFFFF) >> 1 == me + 1


@inner
def own_buffer(base, worker, which):
    """Where one of a worker's two buffers lies: values, then the updater's arrays."""
    head = header_of(base)
    small = head.small_slots
    return slot_address(base, worker) - base + small + which * ((head.slot_stride - small) // 2)


@inner
def next_buffer(before, me):
    """Which of its own buffers one writes to who folds the round after the one that COMMITTED names."""
    return 1 - (before & 1) if _is_mine(before, me) else 0


@inner
def place_of(base, word):
    """Where the values lie that COMMITTED names."""
    if word & 0xFFFF == 0:
        return header_of(base).buffer_0
    return own_buffer(base, ((word & 0xFFFF) >> 1) - 1, word & 1)


# -- coming, closing, folding ------------------------------------------------------------------------------------


@inner
def _come(control, base, me, source, progress, number):
    """Says that this worker's slot is ready for a round."""
    line = line_of(base, me)
    progress[ROUND], progress[REACHED], progress[DECIDED] = number, 0, 0
    expected = load64(line + at.EXPECTED + 8)
    progress[LATENESS] = max(0, monotonic_ns() - expected) if expected != 0 else 0
    for i in range(3):  # NEEDED, OF, GRACE
        store64(line + at.ASKS + 8 * i, progress[NEEDED + i])
    store32(line + at.SOURCES + 4 * (number & 1), source)
    late = number > progress[READ] + 1 and progress[GETS] == 0  # a replay knows who comes
    # also if not: a late read of another table may have been given up
    store64(block_of(control, me) + at.LATE_FOR, late_for(base, number) if late else 0)
    store64(line + at.STAGED, number)
    notify(control)  # those who sleep may have enough now, and until when is theirs to watch


@inner
def _is_held(control, worker, barrier):
    """Whether a worker is in a barrier beyond this one; who is in a dead one's place has been in fewer."""
    block = block_of(control, worker)
    reached = load64(block + at.BARRIER)
    return reached > barrier and reached > load64(block + at.PASSED)


@inner
def _collect(control, base, me, number, progress):
    """(state, members) of the round that is open: may it be closed? On several hosts the members are not asked for.

    Who is in a barrier that this worker has not reached is not coming, it waits there for this one, and nor is who is
    late for another table's round. The grace is for those that may come just now.
    """
    barrier, stops = load64(block_of(control, me) + at.BARRIER), load32(control + at.CONTINUE_WITHOUT_LOST) == 0
    members, came, there, elsewhere = np.int64(0), 0, 0, 0
    now, until = monotonic_ns(), np.int64(0)
    for worker in range(header_of(base).table_workers):
        line = line_of(base, worker)
        if load32(line + at.ENROLLED) != 1:
            continue
        if stops and is_lost(control, worker):
            return LOST_SOMEONE, members
        if load64(line + at.STAGED) == number:
            # a worker that died or left after its slot was ready is a member like the others
            members |= np.int64(1) << worker
            came += 1
            there += 1
        elif takes_part(control, base, worker, number) and not _is_held(control, worker, barrier):
            there += 1
            if waits_elsewhere(control, base, worker):
                elsewhere += 1
            else:
                until = max(until, expected_until(line, now, progress[LATENESS]))
    needed = progress[NEEDED]
    if progress[OF] != 0:
        needed = (needed * there + progress[OF] - 1) // progress[OF]
    if came == there - elsewhere:
        return READY, members
    if came < needed:
        progress[REACHED] = 0
        return NOT_READY, members
    if progress[REACHED] == 0:
        progress[REACHED] = now
    progress[UNTIL] = min(until, progress[REACHED] + progress[GRACE])
    return READY if now >= progress[UNTIL] else NOT_READY, members


@inner
def _fold(control, base, update, me, number, before, decision, like):
    """Folds a closed round, from the values that COMMITTED named before it; in vain where another one was quicker.

    The members may be a later round's then. That harms none: their slots are ready for that round, and to be told that
    they were in an earlier one changes nothing for them.
    """
    members = load64(line_of(base, (decision & 0xFF) - 1) + at.PROPOSALS)
    which = next_buffer(before, me)
    old, new = place_of(base, before), own_buffer(base, me, which)
    elements = header_of(base).elements
    whole = elements * header_of(base).itemsize
    fence_release()  # who reads the new values there finds that COMMITTED no longer names the old ones
    places = old, new, old + whole, new + whole
    fold_between(base, update, number, 0, members, 0, elements, like, places)
    for worker in range(header_of(base).node_line):
        if (members >> worker) & 1:
            include(control, base, worker, number)
    fence_acquire()
    if compare_swap64(base + at.COMMITTED, before, (number << 16) | ((me + 1) << 1) | which) == before:
        notify(control)


@inner
def _keep(control, base, me, word, progress, like):
    """Whether the values that COMMITTED names are kept for this worker; not if there are newer ones by now.

    They stay where they are in a buffer of its own, and are copied to one otherwise.
    """
    elements = header_of(base).elements
    place = place_of(base, word)
    if not _is_mine(word, me):
        copy, place = place, own_buffer(base, me, 0)
        fence_release()
        copy_into(array_at(base + place, elements, like), array_at(base + copy, elements, like))
        fence_acquire()
        if load64(base + at.COMMITTED) != word:
            return False
    line = line_of(base, me)
    if progress[ROUND] > progress[READ] + 1:
        store64(line + at.LATE, load64(line + at.LATE) + 1)
    progress[VALUES], progress[READ] = place, round_in(word)
    store64(line + at.FOLDED, round_in(word))
    return True


@inner
def _close(control, base, update, me, progress, before, wait, event, like):
    """Closes the round that this worker has come to, or folds it, or waits: DONE to look again, or why it stopped."""
    number = progress[ROUND]
    decision = load64(base + at.DECISIONS)
    until, stage = FOREVER, 1
    if round_in(before) != number - 1:
        stage = 0  # a replay, which waits for the values of another one
    elif round_in(decision) < number:
        state, members = _collect(control, base, me, number, progress)
        if state == LOST_SOMEONE:
            return LOST_SOMEONE
        if state == READY:
            # a worker that leaves an add makes a decision fail that was collected before its slot was ready
            store64(line_of(base, me) + at.PROPOSALS, members)
            mine = (number << 16) | (me + 1)
            if compare_swap64(base + at.DECISIONS, decision, mine) == decision:
                notify(control)  # how long folding may take is the others' to watch
                _fold(control, base, update, me, number, before, mine, like)
            return DONE
        stage = 1 if progress[REACHED] != 0 else 0
        until = progress[UNTIL] if stage else FOREVER
    else:
        now = monotonic_ns()
        if progress[DECIDED] == 0:
            progress[DECIDED] = now
        until = progress[DECIDED] + _FOLDING + _FOLDING_EACH * header_of(base).elements
        if now >= until or not is_live(control, (decision & 0xFF) - 1):
            _fold(control, base, update, me, number, before, decision, like)
            return DONE
    return pause_until(control, me, wait, event, at.FOR_ROUND, header_of(base).table_id, stage, number, until)


@inner
def _await_nodes(control, base, me, progress, wait, event):
    """As ``_close``, on several hosts: their nodes close the round and fold it, see ``between_hosts/quorum.py``."""
    number = progress[ROUND]
    state, _ = _collect(control, base, me, number, progress)
    if state == LOST_SOMEONE:
        return LOST_SOMEONE
    decided = state == READY or progress[REACHED] != 0 or round_in(load64(base + at.DECISIONS)) >= number
    return pause(control, me, wait, event, at.FOR_ROUND, header_of(base).table_id, 1 if decided else 0, number)


@inner
def take_part(control, base, update, me, progress, like):
    """Goes through a round with what is in this worker's slot; its values, or newer ones, are kept at VALUES then."""
    wait, line = words(WAIT_WORDS), line_of(base, me)
    source = WHOLE if progress[STAGED] else NOTHING
    if progress[STAGE] == 0:
        progress[OPEN], progress[STAGE] = 1, 1
        _come(control, base, me, source, progress, round_in(load64(base + at.COMMITTED)) + 1)
    while True:
        event = load32(control + at.EVENT)
        committed = load64(base + at.COMMITTED)
        closed, number = round_in(committed), progress[ROUND]
        if closed >= number and load64(line + at.INCLUDED) != number:
            _come(control, base, me, source, progress, closed + 1)
        elif closed >= max(number, progress[GETS]):
            if _keep(control, base, me, committed, progress, like):
                end_table_wait(control, base, me)
                return DONE
        else:
            if load32(control + at.SPANS_HOSTS) == 0:
                code = _close(control, base, update, me, progress, committed, wait, event, like)
            else:
                code = _await_nodes(control, base, me, progress, wait, event)
            if code != DONE:
                return code


@inner
def finish(base, me, progress, what, size, call):
    """The read is over for this worker, which has what it read."""
    progress[OPEN], progress[STAGE], progress[STAGED] = 0, 0, 0
    store64(line_of(base, me) + at.WEIGHT, 0)
    progress[READS] += 1
    record_operation(base, me, what, size)
    end_call(call)


# -- as they are called ------------------------------------------------------------------------------------------


@kernel
def keep(control: Address, base: Address, me: Int, progress: Words, like: Data) -> None:
    """Before this worker's first read: keeps the values as they are now, which a rule's first push is relative to."""
    while not _keep(control, base, me, load64(base + at.COMMITTED), progress, like):
        pass


@kernel
def read(control: Address, base: Address, update: Address, me: Int, progress: Words, out: Data, call: Address) -> Int:
    """As ``rounds.read``."""
    code = take_part(control, base, update, me, progress, out)
    if code != DONE:
        return code
    copy_into(out, array_at(base + progress[VALUES], out.size, out))
    finish(base, me, progress, at.GETS, out.size, call)
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
    code = take_part(control, base, update, me, progress, local)
    if code != DONE:
        return code
    store_both(array_at(base + progress[VALUES], local.size, local), local, last)
    finish(base, me, progress, at.EXCHANGES, 2 * local.size, call)
    return DONE


@inner
def _values_read(base, progress, before):
    return progress[VALUES]


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
    return step_in_round(control, base, update, me, rule, progress, local, does, call, _values_read, take_part, finish)


@kernel
def leave(control: Address, base: Address, me: Int, progress: Words) -> Int:
    """As ``rounds.leave``: what is in this worker's slot is in the others' next round; returns its number, or 0."""
    if progress[STAGED] == 0:
        return 0
    # a read that was interrupted has come to its round
    number = progress[ROUND] if progress[OPEN] else round_in(load64(base + at.COMMITTED)) + 1
    _come(control, base, me, WHOLE, progress, number)
    while True:
        decision = load64(base + at.DECISIONS)
        if round_in(decision) < number:
            # a decision that was collected before this slot was ready must fail, and is made again
            touched = (decision & ~0xFF00) | ((decision + 0x100) & 0xFF00)
            if compare_swap64(base + at.DECISIONS, decision, touched) == decision:
                break
            continue
        members = load64(line_of(base, (decision & 0xFF) - 1) + at.PROPOSALS)
        closed = round_in(load64(base + at.COMMITTED))
        inside = load64(line_of(base, me) + at.INCLUDED) == number
        if inside or (closed < number and (members >> me) & 1):  # it is not finished: these are its members
            break
        number = max(number, closed) + 1
        _come(control, base, me, WHOLE, progress, number)
    progress[OPEN] = 0
    progress[STAGED] = 0
    return number


@kernel
def again(base: Address, progress: Words, out: Data) -> None:
    """Copies what this worker has read last."""
    copy_into(out, array_at(base + progress[VALUES], out.size, out))


@kernel
def committed_copy(base: Address, out: Data) -> Int:
    """Copies the values after the last finished round; returns whether no other was finished meanwhile."""
    word = load64(base + at.COMMITTED)
    copy_into(out, array_at(base + place_of(base, word), out.size, out))
    fence_acquire()
    return 1 if load64(base + at.COMMITTED) == word else 0


@kernel
def committed_put(base: Address, source: Data) -> None:
    """Overwrites the values after the last finished round, and what the workers have read of it."""
    copy_into(array_at(base + place_of(base, load64(base + at.COMMITTED)), source.size, source), source)
    slots = min(header_of(base).node_line + 1, header_of(base).table_workers)  # the node has one on several hosts
    for worker in range(slots):
        for which in range(2):
            copy_into(array_at(base + own_buffer(base, worker, which), source.size, source), source)
