"""All workers reduce an array together, through shared slots, in rank order.

Shared memory holds a line for each worker (its phase, and what it is reducing) and slots. A phase word has
one writer and only grows; a barrier is "everyone's phase is at least this". Every element is
``((x0 op x1) op x2) op ...`` whatever the partition: the same bits in every worker and in every run.

Small arrays: everyone reduces everything, one barrier. Larger ones go through in chunks, one barrier each: in
its part of a chunk each worker reduces, and while it does, the chunk before is gathered. Three buffers
suffice: a writer of a buffer has passed a barrier since the last reader was done with it.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,no-any-return"

from __future__ import annotations

from multiverso.compiling.atomics import array_at, load32, load64, store64, words
from multiverso.compiling.declaring import Address, Data, Int, Words, inner, kernel
from multiverso.kernels.codes import DONE, LOST_SOMEONE, MISMATCH
from multiverso.kernels.dense import add_into, copy_into
from multiverso.kernels.waits import WAIT_WORDS, block_of, end_wait, is_lost, notify, pause
from multiverso.layout import words as at

SUM, PRODUCT, MAXIMUM, MINIMUM, AVERAGE = range(5)
# progress words of one call, kept by the caller so that it can be taken up again
PHASE, CHUNK, STEP, COMPLETE = 0, 1, 2, 3
BUFFERS = 3
LINES = at.REDUCTION_STRIDE * at.MAX_WORKERS
_BLOCK = 4096


@inner
def _multiply_into(a, b):
    for i in range(a.size):
        a[i] *= b[i]


@inner
def _maximum_into(a, b):
    for i in range(a.size):
        # a NaN stays, as in NumPy's maximum
        a[i] = a[i] if (a[i] > b[i] or a[i] != a[i]) else b[i]


@inner
def _minimum_into(a, b):
    for i in range(a.size):
        a[i] = a[i] if (a[i] < b[i] or a[i] != a[i]) else b[i]


@inner
def _add_both(out, a, b):
    for i in range(out.size):
        out[i] = a[i] + b[i]


@inner
def _combine(op, a, b):
    if op in (SUM, AVERAGE):
        add_into(a, b)
    elif op == PRODUCT:
        _multiply_into(a, b)
    elif op == MAXIMUM:
        _maximum_into(a, b)
    else:
        _minimum_into(a, b)


@inner
def _part(size, worker, elements):
    """The part [lo, hi) of a worker, in whole cache lines."""
    length = (elements + size - 1) // size
    length = (length + 15) // 16 * 16
    return min(elements, worker * length), min(elements, (worker + 1) * length)


@inner
def _line(base, worker):
    return base + at.REDUCTION_STRIDE * worker


@inner
def _publish(control, base, me, size, phase):
    store64(_line(base, me) + at.PHASE, phase)
    for worker in range(size):
        if load64(_line(base, worker) + at.PHASE) < phase:
            return
    notify(control)


@inner
def _is_behind(base, worker, phase):
    return load64(_line(base, worker) + at.PHASE) < phase


@inner
def _is_gone(control, worker):
    return is_lost(control, worker) or load32(block_of(control, worker) + at.PARTICIPATION) == at.LEFT


@inner
def _wait(control, base, memory, me, size, phase):
    """Waits until every worker has reached a phase: DONE, or LOST_SOMEONE, EINTR, TIMED_OUT."""
    wait = words(WAIT_WORDS)
    while True:
        event = load32(control + at.EVENT)
        ready = True
        for worker in range(size):
            if _is_behind(base, worker, phase):
                ready = False
                if _is_gone(control, worker) and _is_behind(base, worker, phase):
                    # asked again: between the two it may have come and left in order
                    end_wait(control, me)
                    return LOST_SOMEONE
        if ready:
            end_wait(control, me)
            return DONE
        code = pause(control, me, wait, event, at.FOR_REDUCTION, memory, size, phase)
        if code != DONE:
            return code


@inner
def _sign(base, me, phase, signature):
    store64(_line(base, me) + at.SIGNATURES + 8 * (phase & 1), signature)


@inner
def _agreed(base, size, phase, signature):
    for worker in range(size):
        if load64(_line(base, worker) + at.SIGNATURES + 8 * (phase & 1)) != signature:
            return False
    return True


@inner
def _slot(slots, buffer, size, worker, stride, count, like):
    return array_at(slots + (buffer * size + worker) * stride, count, like)


@inner
def _end(op, size, out, progress):
    """The call is complete, in one step with its result: when it goes in again it has nothing left to do."""
    if op == AVERAGE:
        number = out.dtype.type(size)
        for i in range(out.size):
            out[i] = out[i] / number
    progress[COMPLETE] = 1


@kernel
def reduce_small(
    control: Address,
    base: Address,
    memory: Int,
    slots: Address,
    stride: Int,
    me: Int,
    size: Int,
    op: Int,
    signature: Int,
    source: Data,
    out: Data,
    progress: Words,
) -> Int:
    """Reduces an array that fits into a small slot; ``out`` may be ``source``."""
    n = source.size
    if progress[COMPLETE]:
        return DONE
    if progress[STEP] == 0:
        phase = progress[PHASE] + 1
        copy_into(_slot(slots, phase & 1, size, me, stride, n, source), source)
        _sign(base, me, phase, signature)
        progress[PHASE] = phase
        progress[STEP] = 1
        _publish(control, base, me, size, phase)
    phase = progress[PHASE]
    code = _wait(control, base, memory, me, size, phase)
    if code != DONE:
        return code
    progress[STEP] = 0
    if not _agreed(base, size, phase, signature):
        return MISMATCH
    copy_into(out, _slot(slots, phase & 1, size, 0, stride, n, source))
    for worker in range(1, size):
        _combine(op, out, _slot(slots, phase & 1, size, worker, stride, n, source))
    _end(op, size, out, progress)
    return DONE


@inner
def _reduce_part(slots, buffer, stride, me, size, op, lo, hi, count, source, out):
    """Reduces elements [lo, hi) of a chunk into ``out`` and into this worker's slot."""
    mine = _slot(slots, buffer, size, me, stride, count, source)
    for a in range(lo, hi, _BLOCK):
        b = min(hi, a + _BLOCK)
        result = mine[a:b]
        first = source[a:b] if me == 0 else _slot(slots, buffer, size, 0, stride, count, source)[a:b]
        if size == 2 and op == SUM:
            second = source[a:b] if me == 1 else _slot(slots, buffer, size, 1, stride, count, source)[a:b]
            _add_both(result, first, second)
        else:
            copy_into(result, first)
            for worker in range(1, size):
                if worker == me:
                    _combine(op, result, source[a:b])
                else:
                    _combine(op, result, _slot(slots, buffer, size, worker, stride, count, source)[a:b])
        copy_into(out[a:b], result)


@kernel
def reduce_chunks(
    control: Address,
    base: Address,
    memory: Int,
    slots: Address,
    stride: Int,
    me: Int,
    size: Int,
    op: Int,
    signature: Int,
    source: Data,
    out: Data,
    progress: Words,
    chunk: Int,
) -> Int:
    """Reduces an array of any size; ``out`` may be ``source``, and is not whole before the end."""
    n = source.size
    chunks = (n + chunk - 1) // chunk
    if progress[COMPLETE]:
        return DONE
    while progress[CHUNK] <= chunks:
        t = progress[CHUNK]
        a, b = t * chunk, min(n, (t + 1) * chunk)
        lo, hi = _part(size, me, max(0, b - a))
        if progress[STEP] == 0:
            phase = progress[PHASE] + 1
            if t < chunks:
                mine = _slot(slots, phase % BUFFERS, size, me, stride, b - a, source)
                copy_into(mine[:lo], source[a : a + lo])
                copy_into(mine[hi:], source[a + hi : b])
            if t == 0:
                _sign(base, me, phase, signature)
            progress[PHASE] = phase
            progress[STEP] = 1
            _publish(control, base, me, size, phase)
        phase = progress[PHASE]
        code = _wait(control, base, memory, me, size, phase)
        if code != DONE:
            return code
        if t == 0 and not _agreed(base, size, phase, signature):
            return MISMATCH
        if t < chunks:
            _reduce_part(slots, phase % BUFFERS, stride, me, size, op, lo, hi, b - a, source[a:b], out[a:b])
        if t > 0:
            before = a - chunk
            count = min(n, a) - before
            for worker in range(size):
                if worker != me:
                    lo, hi = _part(size, worker, count)
                    theirs = _slot(slots, (phase - 1) % BUFFERS, size, worker, stride, count, source)
                    copy_into(out[before + lo : before + hi], theirs[lo:hi])
        progress[CHUNK] = t + 1
        progress[STEP] = 0
    progress[CHUNK] = 0
    _end(op, size, out, progress)
    return DONE
