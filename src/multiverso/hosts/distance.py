"""How much is under way to another host at a time: as much as the way is long, and no more.

What is under way is kept until it is answered, and memory that is used again before it has left the processor's cache
costs half of what fresh memory does. Two hosts of two cores took 1.1 to 1.4 seconds of the processor for a gigabyte of
frames with two megabytes under way, 1.5 to 1.9 with eight; ten million floats in synchronous rounds took 166 ms instead
of 200. On a long way the connection would be idle with so little.
"""

from __future__ import annotations

FAR = float("inf")  # where nobody knows
_EACH_SECONDS = 0.0005  # another megabyte for each of these: a way of 3 ms has as much as any


def megabytes_for(seconds: float) -> int:
    """Returns how many megabytes keep a connection busy where an answer takes so long at least: 2 to 8."""
    return 2 + int(min(seconds / _EACH_SECONDS, 6))
