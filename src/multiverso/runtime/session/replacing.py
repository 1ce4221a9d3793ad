"""What differs for a worker whose process has taken the place of one that died: the others are ahead of it."""

from __future__ import annotations

import sys

from multiverso.runtime.session.session import Session


def is_behind(session: Session) -> bool:
    """Returns whether the others have passed this worker's next barrier: it has taken the place of one that died."""
    if not session.incarnation:
        return False
    if session.hosts:
        return session.control.released > session.barriers
    others = (session.control.worker(i) for i in session.live_workers() if i != session.worker_id)
    return any(other.barrier > session.barriers + 1 for other in others)


def leaves_values(session: Session, what: str, steps: int = 0) -> bool:
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
    sys.stderr.write(
        f"multiverso: worker {session.worker_id} has taken the place of one that died: {what} keeps the values of "
        "now, and is not loaded\n"
    )
    return True
