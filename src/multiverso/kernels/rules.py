"""Rules: a worker's local_state parameters and the table move each other, by loops that are called by address.

One cached kernel serves every rule. The parts are small enough that push, updater and pull of one find it in
the cache, so that a step costs one pass over the memory.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,no-any-return"

from __future__ import annotations

from multiverso.compiling.atomics import array_at, call_pull, call_push, scratch
from multiverso.compiling.declaring import Address, Data, Int, Words, inner, kernel
from multiverso.kernels.codes import DONE
from multiverso.kernels.dense import (
    PART,
    add_into,
    add_with,
    change_stripes,
    end_add,
    end_call,
    end_read,
    record_operation,
)
from multiverso.kernels.rounds.calls import commit
from multiverso.kernels.rounds.folding import buffer_of, slot_at
from multiverso.kernels.rounds.steps import OPEN, ROUND, STAGED, finish
from multiverso.kernels.waits import header_of
from multiverso.layout import words as at


@inner
def _apply_to_stripe(base, lo, hi, what):
    """The elements from ``lo`` to ``hi``, which only this worker touches meanwhile."""
    update, push, pull, local_state, hyper, values, local, delta = what
    head = header_of(base)
    itemsize, stride = head.itemsize, head.elements
    for a in range(lo, hi, PART):
        b = min(hi, a + PART)
        centre, mine = values[a:b].ctypes.data, local[a:b].ctypes.data
        arrays = local_state + a * itemsize
        if push != 0:
            call_push(push, centre, mine, arrays, stride, hyper, delta.ctypes.data, b - a)
            add_with(base, update, a, values[a:b], delta[: b - a])
        if pull != 0:
            call_pull(pull, centre, mine, arrays, stride, hyper, b - a)
    return push != 0


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
    local: Data,
    reads: Int,
    ticks: Int,
    call: Address,
) -> Int:
    """At once: stripe after stripe, each under its word. ``push`` or ``pull`` may be 0."""
    values = array_at(base + header_of(base).buffer_0, local.size, local)
    what = update, push, pull, local_state, hyper, values, local, scratch(PART, local)
    code = change_stripes(control, base, me, local.size, call, _apply_to_stripe, what)
    if code != 0:
        return code
    if reads == 0:
        end_add(control, base, me, local.size)
    elif push == 0:
        end_read(control, base, me, at.GETS, local.size, ticks)
    else:
        end_read(control, base, me, at.EXCHANGES, 2 * local.size, ticks)
    end_call(call)
    return 0


@inner
def stage_push(base, push, me, local_state, hyper, progress, local, centre):
    """A push in a round: its contribution goes into this worker's slot, as the first or added to the rest.

    ``centre`` is where the values lie that this worker has read last.
    """
    head = header_of(base)
    itemsize, stride = head.itemsize, head.elements
    slot = slot_at(base, me, local)
    delta = scratch(PART, local)
    for a in range(0, local.size, PART):
        b = min(local.size, a + PART)
        skip = a * itemsize
        target = delta.ctypes.data if progress[STAGED] else slot[a:b].ctypes.data
        call_push(push, centre + skip, local[a:b].ctypes.data, local_state + skip, stride, hyper, target, b - a)
        if progress[STAGED]:
            add_into(slot[a:b], delta[: b - a])
    progress[STAGED] = 1


@inner
def pull_round(base, pull, local_state, hyper, local, centre):
    """The end of a round: the pull from the new values."""
    head = header_of(base)
    itemsize, stride = head.itemsize, head.elements
    for a in range(0, local.size, PART):
        b = min(local.size, a + PART)
        skip = a * itemsize
        call_pull(pull, centre + skip, local[a:b].ctypes.data, local_state + skip, stride, hyper, b - a)


@inner
def step_in_round(
    control, base, update, push, pull, me, local_state, hyper, progress, local, reads, call, values_at, commit, finish
):
    """Pushes into this worker's slot; if the step ``reads``, goes through the round and pulls.

    Args:
        values_at: ``values_at(base, progress, before)`` is where the values lie that the round before has left (1), or
            this one, once it is gone through (0).
        commit, finish: as those of ``kernels/rounds``: what goes through the round, and what ends it for this worker.
    """
    if push != 0 and progress[OPEN] == 0:
        stage_push(base, push, me, local_state, hyper, progress, local, base + values_at(base, progress, 1))
    if reads == 0:
        record_operation(base, me, at.ADDS, local.size)
        end_call(call)
        return DONE
    code = commit(control, base, update, me, progress, local)
    if code != DONE:
        return code
    if pull != 0:
        pull_round(base, pull, local_state, hyper, local, base + values_at(base, progress, 0))
    if push != 0:
        finish(base, me, progress, at.EXCHANGES, 2 * local.size, call)
    else:
        finish(base, me, progress, at.GETS, local.size, call)
    return DONE


@inner
def values_of_round(base, progress, before):
    """Where the values after this worker's round lie, or after the one that is ``before`` it."""
    return buffer_of(base, progress[ROUND] - before)


@kernel
def apply_rule_in_round(
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
    """In rounds: pushes into this worker's slot; if it ``reads``, goes through the round and pulls."""
    return step_in_round(
        control, base, update, push, pull, me, local_state, hyper, progress, local, reads, call,
        values_of_round, commit, finish,
    )  # fmt: skip
