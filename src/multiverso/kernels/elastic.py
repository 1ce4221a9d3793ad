"""Elastic averaging of a worker's array and a table, one stripe after another, each under its lock."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

from __future__ import annotations

from numba import njit

from multiverso import layout as at
from multiverso.kernels.atomics import add64, load64
from multiverso.kernels.dense import array_at, count, line_of, note_read, own_stripe, stripe_mutex
from multiverso.kernels.locking import lock, unlock


@njit(nogil=True)
def _draw_together(table, local, alpha):
    for i in range(table.size):
        # one difference for both, so that their sum stays to the last rounding
        difference = alpha * (local[i] - table[i])
        local[i] -= difference
        table[i] += difference


def elastic(base, me, local, alpha, progress):
    """``d = alpha (local - table); local -= d; table += d``; ``alpha`` has the table's dtype."""
    values = array_at(base + load64(base + at.BUFFER_0), local.size, local)
    stripes, length = load64(base + at.STRIPES), load64(base + at.STRIPE)
    for done in range(progress, stripes):
        stripe = own_stripe(base, me, done)
        mutex = stripe_mutex(base, stripe)
        code = lock(mutex)
        if code != 0:
            if code != 130:
                return (done << 16) | code
            add64(line_of(base, me) + at.RECOVERED, 1)
        lo = stripe * length
        hi = min(local.size, lo + length)
        _draw_together(values[lo:hi], local[lo:hi], alpha)
        unlock(mutex)
    note_read(base, count(base, me, at.EXCHANGES, 2 * local.size))
    return 0
