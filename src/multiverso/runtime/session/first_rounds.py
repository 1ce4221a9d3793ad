"""When a worker in a dead one's place joins the rounds of further tables: once the others wait in those of the first.

In a synchronous job a worker takes part in a table's rounds from its constructor on. Made while the others were between
the rounds of two tables, the first would have it in the next turn of their loop, and the second still in this one: it
would wait for them in the one, and they for it in the other, for ever. Once they wait for it they are at one place of
the loop, and so is it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from multiverso.deadline import Deadline
from multiverso.runtime.session.patience import Patience
from multiverso.runtime.session.view import SessionView
from multiverso.shards.shard import Shard

_LONGEST_SECONDS = 10.0  # then they train for long between two rounds, or have no use for that table any more
_LOOK_SECONDS = 0.01
_STILL_SECONDS = (
    0.5  # so long they have to wait for the same: a worker that goes on shows its last wait for a moment
)


def await_the_others(session: SessionView, tables: Mapping[int, Shard], patience: Patience) -> None:
    """Before a second table is asked for: waits until all others wait for this worker, or ten seconds.

    Args:
        session: this worker's session.
        tables: those that it has, by number.
        patience: raises where waiting is pointless.
    """
    if not session.incarnation or not session.consistency.in_rounds:
        return
    places = (shard.progress().members.get(session.worker_id) for shard in tables.values())
    if any(place is not None and place.has_begun for place in places):
        return  # it goes through rounds already
    end = Deadline.after(patience.deadline.left(2 * _LONGEST_SECONDS) / 2)  # the table needs time of its own
    seen, since = None, 0.0
    while not end.passed:
        waits, now = session.wait_graph().waits_for_newcomers(), time.monotonic()
        if waits is None or waits != seen:
            seen, since = waits, now
        elif not waits or now - since >= _STILL_SECONDS:
            return
        patience.raise_if_over()
        time.sleep(_LOOK_SECONDS)
