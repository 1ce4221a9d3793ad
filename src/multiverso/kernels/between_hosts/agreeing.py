"""What keeps a host's copy of a table and its home near each other: differences to the value on which both agree.

For each chunk of a table, host and home keep the same array S (``agreed``). The host's copy is V, the home's T; both
are the values of a table as every worker has them, and each stripe is read and written under its lock::

    push    a = V - S    S += a on the host; S += a and T += a at the home      push, then serve
    answer  b = T - S    S += b at the home; S += b and V += b on the host      serve, then land
    again   V += S' - S, S = S'          the answer was lost, so the home's S itself came      catch_up
    fresh   T += a, S = T                the first push between the two; the answer is T      begin

Where a wire format leaves something out, the steps are ``differ`` (under the locks), the format's coding
(``hosts/codecs.py``), and ``advance`` (S belongs to this thread alone).

The values of a convex table, means and variances, must stay between what the hosts have (``toward`` in the place of
``move``): where two hosts both bring a variance from 1 to 0.1, the sum of the differences would make it -0.8.

Both sides do the same operations on the same numbers in the same order (``move``), so S has the same bits on both;
what an operation rounds away stays in V - S or T - S, and goes with the next frame. A difference that is no finite
number (NaN or an infinity came or goes, or two huge numbers lie apart) replaces the value instead of being added to
it; nothing else would ever bring the two together again.

A caller's record says how far a kernel is: elements done, and what it has found. After TIMED_OUT the
same call continues from there. The node is no worker: these locks are waited for in no worker's name.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,no-any-return"

from __future__ import annotations

import numpy as np

from multiverso.compiling.atomics import array_at, load64, store64
from multiverso.compiling.declaring import Address, Data, Int, Words, inner, kernel
from multiverso.kernels.codes import DONE, HELD
from multiverso.kernels.dense import version_of
from multiverso.kernels.locking import lock_stripe, unlock_stripe
from multiverso.kernels.waits import header_of
from multiverso.layout import words as at

# a caller's record, in int64 words: elements done, what was found on the way (bits of SOME and REST), and whether the
# table is convex
AGREEING_DONE, AGREEING_FOUND, AGREEING_CONVEX = 0, 8, 16
SOME = 1  # a difference was not zero
REST = 2  # S is not the value itself now: rounding has left something for the next frame
_TOUCHED = 4  # of a stripe: this side's values have changed

_PART = 1024  # numbers


# -- one number ------------------------------------------------------------------------------------------------


@inner
def difference(value, agreed, one):
    """What brings ``agreed`` to ``value`` by ``move``: at once, or in a few frames."""
    x = value - agreed
    if x - x != 0:  # never for integers
        if value == agreed or (value != value and agreed != agreed):
            x = one - one
        elif value == 0:  # a zero would say that nothing has changed
            x = one
        else:
            x = value
    return x


@inner
def move(value, x):
    """``value + x``; but what is no finite number is replaced by ``x``, unless that is zero."""
    if value - value != 0 and x != 0:
        return x
    return value + x


@inner
def toward(value, theirs, x):
    """``value + x``, but not beyond the other side's value: what both have moved alike is moved once."""
    moved = move(value, x)
    if moved < value and moved < theirs:
        return min(value, theirs)
    if moved > value and moved > theirs:
        return max(value, theirs)
    return moved


# -- one stripe's part of a chunk: returns what was found ------------------------------------------------------
#
# A branch for each number costs three quarters of the time. So a part that stays in the first cache is first looked
# through: where all that will be computed is finite, ``difference`` and ``move`` are a subtraction and an addition.


@inner
def _in_parts(values, agreed, frame, one, convex, is_finite, do_finite, do_any):
    found = 0
    for a in range(0, values.size, _PART):
        v, s, f = values[a : a + _PART], agreed[a : a + _PART], frame[a : a + _PART]
        if not convex and is_finite(v, s, f):
            found |= do_finite(v, s, f)
        else:
            found |= do_any(v, s, f, one, convex)
    return found


@inner
def _push(values, agreed, frame, one, convex):
    # what is taken is the same in a convex table
    return _in_parts(values, agreed, frame, one, False, _is_finite, _push_finite, _push_any)


@inner
def _is_finite(values, agreed, frame):
    odd = np.int32(0)
    for i in range(values.size):
        x = values[i] - agreed[i]
        odd = np.int32(odd | np.int32(x - x != 0))
    return odd == 0


@inner
def _push_finite(values, agreed, frame):
    some, rest = np.int32(0), np.int32(0)
    for i in range(values.size):
        value = values[i]
        x = value - agreed[i]
        ours = agreed[i] + x
        frame[i] = x
        agreed[i] = ours
        some = np.int32(some | np.int32(x != 0))
        rest = np.int32(rest | np.int32(ours != value))
    return some | rest << 1


@inner
def _push_any(values, agreed, frame, one, convex):
    some, rest = 0, 0
    for i in range(values.size):
        value = values[i]
        x = difference(value, agreed[i], one)
        ours = move(agreed[i], x)
        frame[i] = x
        agreed[i] = ours
        some |= x != 0
        rest |= ours != value
    return some | rest << 1


@inner
def _serve(values, agreed, frame, one, convex):
    return _in_parts(values, agreed, frame, one, convex, _are_sums_finite, _serve_finite, _serve_any)


@inner
def _are_sums_finite(values, agreed, frame):
    odd = np.int32(0)
    for i in range(values.size):
        x = (values[i] + frame[i]) - (agreed[i] + frame[i])
        odd = np.int32(odd | np.int32(x - x != 0))
    return odd == 0


@inner
def _serve_finite(values, agreed, frame):
    some, rest, touched = np.int32(0), np.int32(0), np.int32(0)
    for i in range(values.size):
        touched = np.int32(touched | np.int32(frame[i] != 0))
        mine, ours = values[i] + frame[i], agreed[i] + frame[i]
        b = mine - ours
        ours = ours + b
        values[i] = mine
        frame[i] = b
        agreed[i] = ours
        some = np.int32(some | np.int32(b != 0))
        rest = np.int32(rest | np.int32(ours != mine))
    return some | rest << 1 | touched << 2


@inner
def _serve_any(values, agreed, frame, one, convex):
    some, rest, touched = 0, 0, 0
    for i in range(values.size):
        x = frame[i]
        touched |= x != 0
        ours = move(agreed[i], x)
        mine = toward(values[i], ours, x) if convex else move(values[i], x)
        values[i] = mine
        b = difference(mine, ours, one)
        ours = move(ours, b)
        frame[i] = b
        agreed[i] = ours
        some |= b != 0
        rest |= ours != mine
    return some | rest << 1 | touched << 2


@inner
def _land(values, agreed, frame, one, convex):
    return _in_parts(values, agreed, frame, one, convex, _are_sums_finite, _land_finite, _land_any)


@inner
def _land_finite(values, agreed, frame):
    touched = np.int32(0)
    for i in range(values.size):
        touched = np.int32(touched | np.int32(frame[i] != 0))
        values[i] += frame[i]
        agreed[i] += frame[i]
    return touched << 2


@inner
def _land_any(values, agreed, frame, one, convex):
    touched = 0
    for i in range(values.size):
        x = frame[i]
        touched |= x != 0
        theirs = move(agreed[i], x)
        values[i] = toward(values[i], theirs, x) if convex else move(values[i], x)
        agreed[i] = theirs
    return touched << 2


@inner
def _catch_up(values, agreed, frame, one, convex):
    touched = 0
    for i in range(values.size):
        x = difference(frame[i], agreed[i], one)
        touched |= x != 0
        values[i] = toward(values[i], frame[i], x) if convex else move(values[i], x)
        agreed[i] = frame[i]
    return touched << 2


@inner
def _begin(values, agreed, frame, one, convex):
    touched = 0
    for i in range(values.size):
        touched |= frame[i] != 0
        value = move(values[i], frame[i])
        values[i] = value
        agreed[i] = value
        frame[i] = value
    return SOME | touched << 2


@inner
def _differ(values, agreed, frame, one, convex):
    some = 0
    for i in range(values.size):
        x = difference(values[i], agreed[i], one)
        frame[i] = x
        some |= x != 0
    return some


# -- a chunk: elements ``low`` and following, as many as ``agreed`` and ``frame`` have -------------------------


@inner
def _each_block(control, base, low, agreed, frame, record, do):
    node = header_of(base).node_line
    one, convex = frame.dtype.type(1), load64(record + AGREEING_CONVEX) != 0
    length, size = header_of(base).stripe_size, frame.size
    values = array_at(base + header_of(base).buffer_0, low + size, frame)
    a = load64(record + AGREEING_DONE)
    while a < size:
        block = (low + a) // length
        b = min(size, (block + 1) * length - low)
        code = lock_stripe(control, base, node, block)
        if code != HELD:
            return code
        found = do(values[low + a : low + b], agreed[a:b], frame[a:b], one, convex)
        if found & (SOME | REST):
            store64(record + AGREEING_FOUND, load64(record + AGREEING_FOUND) | (found & (SOME | REST)))
        store64(record + AGREEING_DONE, b)
        unlock_stripe(base, node, block, found & _TOUCHED)
        a = b
    return DONE


@kernel
def push(control: Address, base: Address, low: Int, agreed: Data, frame: Data, record: Address) -> Int:
    """The host takes what has changed in its copy: into ``frame``, and into S."""
    return _each_block(control, base, low, agreed, frame, record, _push)


@kernel
def serve(control: Address, base: Address, low: Int, agreed: Data, frame: Data, record: Address) -> Int:
    """The home takes what was pushed, and leaves its answer in ``frame``."""
    return _each_block(control, base, low, agreed, frame, record, _serve)


@kernel
def land(control: Address, base: Address, low: Int, agreed: Data, frame: Data, record: Address) -> Int:
    """What the other side has sent goes into this side's values and S."""
    return _each_block(control, base, low, agreed, frame, record, _land)


@kernel
def catch_up(control: Address, base: Address, low: Int, agreed: Data, frame: Data, record: Address) -> Int:
    """``frame`` is the home's S itself: V goes as far as that is from ours, which it replaces."""
    return _each_block(control, base, low, agreed, frame, record, _catch_up)


@kernel
def begin(control: Address, base: Address, low: Int, agreed: Data, frame: Data, record: Address) -> Int:
    """The home takes the first push of a host; S and the answer in ``frame`` are its values themselves."""
    return _each_block(control, base, low, agreed, frame, record, _begin)


@kernel
def differ(control: Address, base: Address, low: Int, agreed: Data, frame: Data, record: Address) -> Int:
    """The difference of this side's values to S, which stays as it is: for a wire format that leaves something out."""
    return _each_block(control, base, low, agreed, frame, record, _differ)


@kernel
def advance(agreed: Data, frame: Data) -> None:
    """S goes as far as what was sent: S is this side's own."""
    for i in range(agreed.size):
        agreed[i] = move(agreed[i], frame[i])


@kernel
def versions(bases: Words, out: Words) -> None:
    """How often each table has been changed by this host's workers."""
    for i in range(bases.size):
        out[i] = version_of(bases[i]) + load64(bases[i] + at.WRITTEN)
