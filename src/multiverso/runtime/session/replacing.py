"""Brings a worker in a dead one's place to where the others are."""

from __future__ import annotations

import time
from collections.abc import Mapping

from multiverso.deadline import Deadline
from multiverso.runtime.session.view import SessionView
from multiverso.runtime.session.waiting import Patience
from multiverso.saying import say
from multiverso.shards.shard import Shard

_LONGEST_SECONDS = 10.0  # then they train for long between two rounds, or have no use for that table any more
_LOOK_SECONDS = 0.01
_STILL_SECONDS = 0.5  # they have to wait for the same so long: one that continues shows its last wait for a moment


def is_behind(session: SessionView) -> bool:
    """Returns whether the others have passed this worker's next barrier: it has taken the place of one that died."""
    if not session.incarnation:
        return False
    if session.hosts:
        return session.control.released > session.barriers
    others = (session.control.worker(i) for i in session.live_workers() if i != session.worker_id)
    return any(other.barrier > session.barriers + 1 for other in others)


def leaves_values(session: SessionView, what: str, steps: int = 0) -> bool:
    """Returns whether a load is to change nothing, and says so.

    A dead worker's program begins again here: what it loads at its start the others have trained on since. What all
    have to load together they load now, if they have not passed it: then they wait for this worker, too.

    Args:
        session: whose load it is.
        what: what would be loaded, as the beginning of half a sentence.
        steps: how many barriers all pass for it, where they load it together.
    """
    if not session.incarnation or (steps and not is_behind(session)):
        return False
    session.count_barriers(session.barriers + steps)
    taken = f"worker {session.worker_id} has taken the place of one that died"
    say(f"{taken}: {what} keeps the values of now, and is not loaded")
    return True


def await_the_others(session: SessionView, tables: Mapping[int, Shard], patience: Patience) -> bool:
    """Before a replacement asks for a further table: waits until all others wait for it, or ten seconds.

    In a synchronous job a worker takes part in a table's rounds from its constructor on. If both tables were made while
    the others were between the rounds of the two, it would begin the first in the next turn of their loop and the
    second in this one: each would wait for the other forever. Once the others wait for it they are at one place of the
    loop, and so is it. They never wait for it in a table that nobody reads in rounds.

    Args:
        session: this worker's session.
        tables: those that it has, by number.
        patience: raises where waiting is pointless.

    Returns:
        Whether it is at their place now, and need not wait again.
    """
    if not session.incarnation or not session.consistency.in_rounds or session.consistency.by_quorum:
        return True  # no round waits for one that is late when enough have come
    begun = {
        worker_id
        for shard in tables.values()
        for worker_id, place in shard.progress().members.items()
        if place.has_begun
    }
    if session.worker_id in begun:
        return True
    if not begun and not any(shard.committed for shard in tables.values()):
        return False  # the first round of each of them will wait for it
    end = Deadline.after(patience.deadline.left(2 * _LONGEST_SECONDS) / 2)  # the table needs time of its own
    seen, since = None, 0.0
    while not end.passed:
        waits, now = session.wait_graph().waits_for_newcomers(), time.monotonic()
        if waits is None or waits != seen:
            seen, since = waits, now
        elif not waits or now - since >= _STILL_SECONDS:
            return True
        patience.raise_if_over()
        time.sleep(_LOOK_SECONDS)
    return False
