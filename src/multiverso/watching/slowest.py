"""Which worker holds the others up, or whether the network does, by what lies between two snapshots."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

from msgspec import Struct

from multiverso.watching.snapshot import Snapshot, Worker
from multiverso.watching.units import duration

_LEAST_SHARE = 0.05  # of the others' time, that is worth a word
_MUCH_SLOWER = 0.7  # of what the others do
_MOST_WAITS = 3
_LEAST_SECONDS = 0.05  # of a kind of wait, that are worth a word
_FEWEST = 10  # operations, from which a pace can be told
_BUSY = 0.8  # of the time, from which a connection has little room left
_LEAST_WINDOW = 2.0  # seconds, in which a connection that is busy for a moment does not look so for all of the time
_MOSTLY = 0.5  # of the time: who waits so much is not who is waited for


class Slowest(Struct, frozen=True):
    """The worker that holds the others up.

    Attributes:
        worker: its number.
        share: of the others' time, that they spent waiting for it.
        pace: of what the others do in a second, on average, what it does; 1 where that is not why it is named.
    """

    worker: int
    share: float
    pace: float = 1.0

    def __str__(self) -> str:
        if self.share >= _LEAST_SHARE:
            return (
                f"worker {self.worker} is the slowest: the others spend {self.share:.0%} of their time waiting for it"
            )
        return f"worker {self.worker} is the slowest: it does {self.pace:.0%} of what the others do"


class Busiest(Struct, frozen=True):
    """The way to or from another host that is busy nearly all the time, so that more would take longer.

    Attributes:
        host: the other one.
        share: of the time; of both ways together where workers mostly wait, as rounds use one after the other.
        way: "to", "from" or "with".
    """

    host: str
    share: float
    way: str = "to"

    def __str__(self) -> str:
        return f"the network is the limit: the connection {self.way} {self.host} is busy {self.share:.0%} of the time"


def busiest(before: Snapshot | None, now: Snapshot) -> Busiest | None:
    """Returns the busiest way to another host between two snapshots, or None: each has room left."""
    if before is None or before.address != now.address or now.at - before.at < _LEAST_WINDOW:
        return None
    past, seconds = {link.host: link for link in before.links}, now.at - before.at
    live, _, _, since = _since(before, now)
    waits = live and sum(since(worker, "waited_seconds") for worker in live) > _MOSTLY * seconds * len(live)
    found = []
    for link in now.links:
        if link.host in past and link.state == "connected":
            to = min(1.0, (link.busy_seconds - past[link.host].busy_seconds) / seconds)
            back = min(1.0, max(0.0, link.busy_back_seconds - past[link.host].busy_back_seconds) / seconds)
            both = min(1.0, to + back) if waits else 0.0
            found += [Busiest(link.host, to, "to"), Busiest(link.host, back, "from"), Busiest(link.host, both, "with")]
    busy = [one for one in found if one.share >= _BUSY]
    return busy[0] if busy else None


def slowest(before: Snapshot | None, now: Snapshot, lately: Snapshot | None = None) -> Slowest | None:
    """Returns the worker that held the others up between two snapshots of a job, or None: no one does.

    Of workers that wait for each other it is the one that the others waited for most; of those that do not, one that
    does much less than they do, if both have been there all the time and have done enough to tell.

    Args:
        before: the earlier one; None for the job's beginning.
        now: the later one.
        lately: one between them, from which on the workers' paces are compared where they have done enough since.
    """
    return _waited_for(before, now) or (lately and _behind(lately, now)) or _behind(before, now)


def _since(
    before: Snapshot | None, now: Snapshot
) -> tuple[list[Worker], dict[int, Worker], float, Callable[[Worker, str], float]]:
    """Returns the workers that count, what they were before, the seconds since, and by what a counter has grown."""
    begins = before is None or before.restarts != now.restarts or all(one.state == "free" for one in before.workers)
    past = {} if before is None or begins else {one.id: one for one in before.workers}
    seconds = now.up_seconds - (before.up_seconds if past and before else 0.0)
    # nothing is said of one that failed, whether the others went on or not
    live = _in_state(now, "alive") or _in_state(now, "left", "ended")

    def since(worker: Worker, name: str) -> float:
        earlier = getattr(past[worker.id], name) if worker.id in past else 0.0
        return max(0.0, float(getattr(worker, name)) - float(earlier))

    return live if len(live) > 1 and seconds > 0 else [], past, seconds, since


def _waited_for(before: Snapshot | None, now: Snapshot) -> Slowest | None:
    live, _, seconds, since = _since(before, now)
    others = len(live)
    live = [worker for worker in live if since(worker, "waited_seconds") < _MOSTLY * seconds]
    if not live:
        return None
    worst = max(live, key=lambda worker: since(worker, "cost_seconds"))
    share = min(1.0, since(worst, "cost_seconds") / (seconds * (others - 1)))
    return Slowest(worst.id, share) if share >= _LEAST_SHARE else None


def _behind(before: Snapshot | None, now: Snapshot) -> Slowest | None:
    live, past, _, since = _since(before, now)

    def was_there(worker: Worker) -> bool:
        return past[worker.id].pid == worker.pid if worker.id in past else not past and not worker.incarnation

    there = list(filter(was_there, live))
    # steps, where all say them: they may use tables differently
    logs = all(one.step is not None and one.id in past and past[one.id].step for one in there)
    counted = "step" if logs else "operations"
    done = {worker.id: since(worker, counted) for worker in there}
    begun = [worker for worker in there if worker.operations >= _FEWEST]
    if len(there) < 2 or not begun:
        return None
    last = min(begun, key=lambda worker: done[worker.id])
    others = median(number for worker_id, number in done.items() if worker_id != last.id)
    pace = done[last.id] / others if others >= _FEWEST else 1.0
    return Slowest(last.id, 0.0, pace) if pace < _MUCH_SLOWER else None


def _in_state(now: Snapshot, *states: str) -> list[Worker]:
    return [worker for worker in now.workers if worker.state in states]


def ending(now: Snapshot) -> str:
    """Returns a line about a job that is over: how long it ran, its slowest worker, what was waited for."""
    if not any(one.pid for one in now.workers):
        return "no worker has called multiverso.init(), so there is nothing to show"
    parts = [f"{len(now.workers)} worker{'s' * (len(now.workers) != 1)} ran for {duration(now.up_seconds)}"]
    found = slowest(None, now)
    if found is not None:
        parts.append(str(found))
    elif len(_in_state(now, "alive", "left", "ended")) > 1:
        parts.append("no worker held the others up")
    waits = sorted((wait for wait in now.waited_for.items() if wait[1] >= _LEAST_SECONDS), key=lambda wait: -wait[1])
    if waits:
        parts.append(
            "waited for, over all workers: "
            + ", ".join(f"{kind} {duration(seconds)}" for kind, seconds in waits[:_MOST_WAITS])
        )
    return "; ".join(parts)
