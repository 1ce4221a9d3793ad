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

# the words of a rule: addresses of its loops, PULL_LOOP may be 0; of this worker's own arrays; of its hyperparameters
PUSH_LOOP, PULL_LOOP, LOCAL_STATE, HYPER = range(4)
# what a step does: both or one of these
PUSHES, PULLS = 1, 2


@inner
def _push(base, rule, a, centre, local, delta):
    """The push of a part that begins ``a`` elements in, from the values at ``centre``, into what is at ``delta``."""
    arrays = rule[LOCAL_STATE] + a * header_of(base).itemsize
    mine, stride = local.ctypes.data, header_of(base).elements
    call_push(rule[PUSH_LOOP], centre, mine, arrays, stride, rule[HYPER], delta, local.size)


@inner
def _pull(base, rule, a, centre, local):
    """The pull of a part that begins ``a`` elements in, from the values at ``centre``, if the rule has one."""
    if rule[PULL_LOOP] != 0:
        arrays = rule[LOCAL_STATE] + a * header_of(base).itemsize
        mine, stride = local.ctypes.data, header_of(base).elements
        call_pull(rule[PULL_LOOP], centre, mine, arrays, stride, rule[HYPER], local.size)


@inner
def _apply_to_stripe(base, lo, hi, what):
    """The elements from ``lo`` to ``hi``, which only this worker touches meanwhile."""
    update, rule, does, values, local, delta = what
    for a in range(lo, hi, PART):
        b = min(hi, a + PART)
        if does & PUSHES:
            _push(base, rule, a, values[a:b].ctypes.data, local[a:b], delta.ctypes.data)
            add_with(base, update, a, values[a:b], delta[: b - a])
        if does & PULLS:
            _pull(base, rule, a, values[a:b].ctypes.data, local[a:b])
    return does & PUSHES != 0


@kernel
def apply_rule(
    control: Address,
    base: Address,
    update: Address,
    me: Int,
    rule: Words,
    local: Data,
    does: Int,
    ticks: Int,
    call: Address,
) -> Int:
    """A step at once: stripe after stripe, each under its word."""
    values = array_at(base + header_of(base).buffer_0, local.size, local)
    what = update, rule, does, values, local, scratch(PART, local)
    code = change_stripes(control, base, me, local.size, call, _apply_to_stripe, what)
    if code != 0:
        return code
    if does & PULLS == 0:
        end_add(control, base, me, local.size)
    elif does & PUSHES == 0:
        end_read(control, base, me, at.GETS, local.size, ticks)
    else:
        end_read(control, base, me, at.EXCHANGES, 2 * local.size, ticks)
    end_call(call)
    return 0


@inner
def _stage_push(base, me, rule, progress, local, centre):
    """A push in a round: its contribution goes into this worker's slot, as the first or added to the rest.

    ``centre`` is where the values lie that this worker has read last.
    """
    slot = slot_at(base, me, local)
    delta = scratch(PART, local)
    for a in range(0, local.size, PART):
        b = min(local.size, a + PART)
        target = delta.ctypes.data if progress[STAGED] else slot[a:b].ctypes.data
        _push(base, rule, a, centre + a * header_of(base).itemsize, local[a:b], target)
        if progress[STAGED]:
            add_into(slot[a:b], delta[: b - a])
    progress[STAGED] = 1


@inner
def step_in_round(control, base, update, me, rule, progress, local, does, call, values_at, commit, finish):
    """A step in rounds: pushes into this worker's slot; if it pulls, goes through the round first.

    Args:
        values_at: ``values_at(base, progress, before)`` is where the values lie that the round before has left (1), or
            this one, once it is gone through (0).
        commit, finish: as those of ``kernels/rounds``: what goes through the round, and what ends it for this worker.
    """
    if does & PUSHES and progress[OPEN] == 0:
        _stage_push(base, me, rule, progress, local, base + values_at(base, progress, 1))
    if does & PULLS == 0:
        record_operation(base, me, at.ADDS, local.size)
        end_call(call)
        return DONE
    code = commit(control, base, update, me, progress, local)
    if code != DONE:
        return code
    centre = base + values_at(base, progress, 0)
    for a in range(0, local.size, PART):
        _pull(base, rule, a, centre + a * header_of(base).itemsize, local[a : a + PART])
    if does & PUSHES:
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
    me: Int,
    rule: Words,
    progress: Words,
    local: Data,
    does: Int,
    call: Address,
) -> Int:
    """As `step_in_round`."""
    return step_in_round(control, base, update, me, rule, progress, local, does, call, values_of_round, commit, finish)
