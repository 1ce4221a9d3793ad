"""A load in a job on several hosts: whose values count, and that all take part where each host has its own."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from multiverso.errors import SnapshotError
from multiverso.runtime.collective.agreement import all_gather
from multiverso.runtime.session.session import Session
from multiverso.tables.convert import Array


def is_first(session: Session, number: int, claimed: int | None) -> bool:
    """Returns whether this worker is the one, of all that load the same table between two barriers, that writes.

    Differences of all hosts add up, so only one may make them.

    Args:
        session: of a job on several hosts.
        number: of the table.
        claimed: the barrier at which this worker was it last.
    """
    if claimed == session.barriers:
        return True
    what = f"load of table {number} at barrier {session.barriers}"
    question = {"about": "count", "name": what, "amount": 1}
    return session.node.ask_hosts(question, session.start_deadline(), f"the {what}").get("before") == 0


def check_all(session: Session, what: str, arrays: Iterable[Array]) -> None:
    """Waits until all workers load the same: each host has states of its own to be overwritten.

    Raises:
        SnapshotError: they do not; nothing was changed.
        WaitTimeoutError, DeadlockError, WorkerLostError: not everyone came.
    """
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(array.tobytes())
    digests = all_gather(session, digest.hexdigest())
    others = sorted(worker for worker, theirs in digests.items() if theirs != digest.hexdigest())
    if others:
        raise SnapshotError(
            f"{what} is loaded by all workers of all hosts, and workers {', '.join(map(str, others))} load something "
            "else; nothing was changed"
        )
