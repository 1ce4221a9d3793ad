"""A job's past in bounded memory: points that grow further apart as it goes on, and what happened."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TypeVar

from msgspec import Struct

from multiverso.watching.slowest import Busiest, Slowest, busiest, slowest
from multiverso.watching.snapshot import Link, Snapshot, Worker

MOST_POINTS = 600
_MOST_EVENTS = 500
_WINDOW_SECONDS, _LATELY_SECONDS = 10.0, 3.0
_DIGITS = {"waited_seconds": 3, "cost_seconds": 3, "staleness": 2, "cpu_seconds": 2}
_DIGITS |= {"behind_seconds": 4, "busy_seconds": 3, "busy_back_seconds": 3}


class Event(Struct, frozen=True):
    """Something that happened, in words; ``bad`` where a worker or a host was lost."""

    at: float
    text: str
    bad: bool = False


class Pace(Struct, frozen=True, array_like=True):
    """A worker's figures that are drawn over time, see `Worker`; counts are totals."""

    id: int
    operations: float
    waited_seconds: float
    cost_seconds: float
    staleness: float
    cpu_seconds: float
    resident_bytes: int
    step: int | None
    values: dict[str, float | None]
    pid: int


class Way(Struct, frozen=True, array_like=True):
    """The figures of the connection to another host that are drawn over time, see `Link`."""

    bytes_sent: float
    bytes_received: float
    round_trip_seconds: float | None
    behind_seconds: float
    busy_seconds: float
    busy_back_seconds: float


_Kind = TypeVar("_Kind", Pace, Way)


class Point(Struct, frozen=True, array_like=True):
    """A moment of the past.

    Attributes:
        links: the way to each other host.
        keyed: of each keyed table its rows, how many of other hosts' were used, and how many of these came from there.
    """

    at: float
    workers: list[Pace]
    links: dict[str, Way]
    keyed: dict[str, tuple[int, int, int]]


class History:
    """Owner: one thread at a time.

    Args:
        most: how many points are kept: when there are more, every second one goes. All of them are totals, so that what
            lies between two that stay is exact.

    Attributes:
        points: the past, evenly spread over the time.
        events: the newest things that happened.
        now: the last snapshot.
        slowest: who has held the others up in the last ten seconds.
        busiest: the way to another host that was busy nearly all of that time; once the job is over, of all of it.
    """

    def __init__(self, most: int = MOST_POINTS) -> None:
        self.points: list[Point] = []
        self.events: deque[Event] = deque(maxlen=_MOST_EVENTS)
        self.now: Snapshot | None = None
        self.slowest: Slowest | None = None
        self.busiest: Busiest | None = None
        self._most = most
        self._apart = 0.0
        self._checkpoint = 0
        self._recent: deque[Snapshot] = deque()
        self._connected: list[Snapshot] = []  # the first one and the last one in which workers used a connection
        self._busiest_then: Busiest | None = None

    def add(self, now: Snapshot) -> list[Event]:
        """Takes the next snapshot; returns what has happened since the last one."""
        news = [] if now == self.now else list(_events(self.now, now, self._checkpoint))
        self._checkpoint = max(self._checkpoint, now.checkpoint)
        self.events.extend(news)
        if not self.points or round(now.at, 2) - self.points[-1].at >= self._apart or now.over:
            self.points.append(point_of(now))
        if len(self.points) > self._most:
            last, self.points = self.points[-1], self.points[::2]
            if now.over and self.points[-1] is not last:
                self.points.append(last)  # the end is kept
            self._apart = 1.5 * (self.points[-1].at - self.points[0].at) / self._most
        self._recent.append(now)
        while len(self._recent) > 2 and self._recent[1].at <= now.at - _WINDOW_SECONDS:
            self._recent.popleft()
        before = self._recent[0] if len(self._recent) > 1 else None
        lately = [one for one in self._recent if one.at <= now.at - _LATELY_SECONDS]
        self.slowest = None if now.over else slowest(before, now, lately[-1] if lately else None)
        self._look_at_links(before, now)
        self.now = now
        return news

    def _look_at_links(self, before: Snapshot | None, now: Snapshot) -> None:
        """Connections end before a job is over: of the whole job is told what was before that."""
        if now.over:
            whole = busiest(*self._connected) if len(self._connected) > 1 else None
            self.busiest = whole or self._busiest_then
            return
        self.busiest = busiest(before, now)
        if self._connected and self._connected[0].address != now.address:
            self._connected.clear()
        if any(link.state == "connected" for link in now.links) and any(one.operations for one in now.workers):
            self._busiest_then = self.busiest
            self._connected[1:] = [now]

    def in_words(self, found: Slowest | Busiest | None) -> str:
        """Returns what was found, and of which time; nothing where nothing was."""
        lately = f", in the last {_WINDOW_SECONDS:.0f} seconds"
        return "" if found is None else f"{found}{'' if self.now and self.now.over else lately}"

    @property
    def before(self) -> Snapshot | None:
        """A snapshot of some ten seconds ago, of the same start of the job; None after the first look."""
        before = self._recent[0] if self._recent else None
        return before if before and self.now and before is not self.now and before.address == self.now.address else None


def point_of(now: Snapshot) -> Point:
    """Returns what is kept of a snapshot."""
    keyed = [one for one in now.tables if one.kind == "keyed"]
    return Point(
        round(now.at, 2),
        [_kept(Pace, one) for one in now.workers],
        {link.host: _kept(Way, link) for link in now.links},
        {one.name: (one.shape[0], one.copies_used, one.copies_fetched) for one in keyed},
    )


def _kept(kind: type[_Kind], one: Worker | Link) -> _Kind:
    """Returns what is drawn of a worker, or of the way to a host; nobody sees more digits."""
    values = {name: getattr(one, name) for name in kind.__struct_fields__}
    values |= {name: round(values[name], digits) for name, digits in _DIGITS.items() if name in values}
    if isinstance(one, Worker):
        values["values"] = {name: value and float(f"{value:.6g}") for name, value in one.values.items()}
    return kind(**values)


def _events(before: Snapshot | None, now: Snapshot, newest: int) -> Iterator[Event]:
    """What has happened between two snapshots of a job; ``newest``: the checkpoint of which it was said last."""
    if before is not None and before.restarts != now.restarts:
        yield Event(now.at, "the job was started again", bad=True)
        before = None
    past: dict[int, Worker] = {} if before is None else {worker.id: worker for worker in before.workers}
    anew = [
        one
        for one in now.workers
        if one.id in past and one.pid != past[one.id].pid and past[one.id].state in ("alive", "lost")
    ]
    for one in anew:
        if past[one.id].state == "alive":  # its death lies between the two looks
            yield Event(now.at, f"{name_of(past[one.id])} was lost", bad=True)
        yield Event(now.at, f"{name_of(one)} has taken the place of the one that was lost")
    changed = [one for one in now.workers if one not in anew and one.state != _state(past.get(one.id))]
    begins = before is not None or now.up_seconds < _WINDOW_SECONDS
    for state, words in (("alive", "joined" if begins else "joined before this was watched"), ("left", "left")):
        ids = [one.id for one in changed if one.state == state]
        if ids:
            yield Event(now.at, f"{_names(ids)} {'have' if len(ids) > 1 else 'has'} {words}")
    lost = {worker_id: place for place, worker_id in enumerate(now.lost)}
    gone = sorted((one for one in changed if one.state == "lost"), key=lambda one: lost.get(one.id, len(lost)))
    for place, one in enumerate(gone):
        first = " first" if place == 0 and len(gone) > 1 else ""
        yield Event(now.at, f"{name_of(one)} was lost{first}", bad=True)
    ways: dict[str, Link] = {} if before is None else {link.host: link for link in before.links}
    at_work = {one.host for one in now.workers if one.state == "alive"}  # where nobody is, the connection ends so
    for link in now.links:
        if link.state == "cut" and link.host not in at_work:
            continue
        if link.host in ways and link.state not in (ways[link.host].state, "not yet connected"):
            words = {"lost": "host {} was lost", "cut": "the connection to {} was cut", "ended": "{} has ended"}.get(
                link.state, "{} is connected"
            )
            yield Event(now.at, words.format(link.host), bad=link.state in ("lost", "cut"))
    if now.checkpoint > newest:
        yield Event(now.at, f"checkpoint {now.checkpoint} is written by all workers")
    if now.over and not (before and before.over):
        yield Event(now.at, now.over, bad=now.well is False)


def _state(worker: Worker | None) -> str:
    return "free" if worker is None else worker.state


def name_of(worker: Worker) -> str:
    """Returns "worker 3 (pid 123 on host-1)"."""
    where = f" on {worker.host}" if worker.host else ""
    return f"worker {worker.id}" + (f" (pid {worker.pid}{where})" if worker.pid else where)  # it had not come


def _names(ids: list[int]) -> str:
    """Returns "worker 3", or "workers 0 to 3, 5"."""
    runs: list[list[int]] = []
    for number in ids:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    words = [f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return f"worker{'s' if len(ids) > 1 else ''} {', '.join(words)}"
