"""One record of a job at a moment, made from its node's answer: what `multiverso top`, the page and `/metrics` show."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping
from typing import Any

from msgspec import Struct, convert

_PHASES, _DONE, _CLOSED = 8, 2, 4  # of a worker's word of its checkpoints, see checkpoints/board.py
_KINDS = (  # of waits, as `WaitGraph.name_of` calls them
    (re.compile(r"^(barrier|round|tick) \d+"), r"\1"),
    (re.compile(r"^step \d+ of a reduction by \d+ workers$"), "a reduction"),
    (re.compile(r"^the creation of table number \d+$"), "the creation of a table"),
    (re.compile(r" that process \d+ holds$"), ""),
)


class Worker(Struct, frozen=True):
    """A worker. Counts, bytes and seconds are totals since its process began, over all tables.

    Attributes:
        state: "alive", "left", "lost", or "free" for a place that nobody has taken; once the job is over also "failed",
            of the worker that ended it, and "ended", of others that were lost because of the end.
        incarnation: how many processes had its number before.
        waiting_for: what it waits for now, in words; empty when it does not wait.
        needs: the workers that it waits for.
        waited_seconds: in all waits, this one included.
        cost_seconds: how long others have waited for this one, as far as it was seen.
        staleness: how many pushes of others on its host came between its last reads, on average.
        checkpoint: the number of the last one that it has written its part of.
        step: of its last `mv.log`, which gave it these values; None: it has logged nothing.
    """

    id: int
    pid: int
    host: str
    program: str
    state: str
    incarnation: int
    waiting_for: str
    waiting_seconds: float
    needs: list[int]
    waited_seconds: float
    cost_seconds: float
    adds: float
    gets: float
    exchanges: float
    bytes: float
    staleness: float
    cpu_seconds: float
    resident_bytes: int
    checkpoint: int
    step: int | None
    values: dict[str, float | None]

    @property
    def operations(self) -> float:
        """Adds, gets and exchanges."""
        return self.adds + self.gets + self.exchanges


class Table(Struct, frozen=True):
    """A table.

    Attributes:
        shape: of one by key: keys that have a row, and numbers in a row; on several hosts as far as they have said it.
        copies: of rows that live on other hosts, how many this one has.
        copies_used: how many rows were read there, or added to.
        copies_fetched: how many of these had to come first.
    """

    id: int
    name: str
    kind: str
    shape: list[int]
    dtype: str
    updater: str
    rounds: int
    adds: float
    gets: float
    exchanges: float
    bytes: float
    wait_seconds: float
    staleness: float
    copies: int = 0
    copies_used: int = 0
    copies_fetched: int = 0

    @property
    def dimensions(self) -> str:
        """Its shape and dtype, and copies, as people read them."""
        found = f"{'x'.join(map(str, self.shape))} {self.dtype}"
        if not self.copies_used:
            return found
        return f"{found}, {self.copies} copies ({self.copies_fetched / self.copies_used:.1%} fetched)"


class Link(Struct, frozen=True):
    """The way from the host whose node answers to another one.

    Attributes:
        busy_seconds: for how long in all something that was sent had not arrived.
        busy_back_seconds: the same of what that host has sent to the one to which it sent most.
        behind_seconds: how old at most what reads on either see of the other one's adds is.
        round_trip_seconds: the newest, smoothed as the system does it.
    """

    host: str
    state: str
    connections: int
    bytes_sent: float
    bytes_received: float
    busy_seconds: float = 0.0
    busy_back_seconds: float = 0.0
    behind_seconds: float = 0.0
    round_trip_seconds: float | None = None


class Published(Struct, frozen=True):
    """A publication of a process on a host of the job, or one that is followed there.

    Attributes:
        host: where, in a job on several.
        version: the newest; 0 before the first.
        step: of the training, if its publisher says one.
        readers: processes there.
        left_out: versions that were not published, as readers kept every slot.
        memory_bytes: what its slots take there.
        sent_bytes: how many went from there to other hosts.
        oldest_version: what the reader there holds that is furthest behind; 0: none holds any.
        oldest_pid: that reader's process.
    """

    name: str
    version: int
    step: int | None
    readers: int
    left_out: int
    memory_bytes: int
    host: str | None = None
    sent_bytes: int = 0
    oldest_version: int = 0
    oldest_pid: int = 0


class Snapshot(Struct, frozen=True):
    """A job at a moment.

    Attributes:
        at: the moment, in seconds since 1970.
        address: of the node that answered.
        host: that node's, in a job on several.
        workers_num: how many workers there are to be; None for any number.
        checkpoint: the newest one that all live workers have written.
        waited_for: seconds that workers have spent in each kind of wait, as far as it was seen.
        restarts: how often the job has been started again since it is watched.
        lost: the workers that were lost, in the order in which the node has seen it.
        over: why it is over; empty while it runs.
        well: once it is over: whether it ended well; None where nobody knows.
    """

    at: float
    address: str
    host: str
    workers_num: int | None
    up_seconds: float
    memory_bytes: int
    checkpoint: int
    workers: list[Worker]
    tables: list[Table]
    links: list[Link]
    waited_for: dict[str, float]
    publications: list[Published] = []
    restarts: int = 0
    lost: list[int] = []
    over: str = ""
    well: bool | None = None

    @property
    def in_order_of_loss(self) -> list[Worker]:
        """The workers that were lost, the first one first."""
        workers = {worker.id: worker for worker in self.workers}
        return [workers[worker_id] for worker_id in self.lost if worker_id in workers]

    @property
    def program(self) -> str:
        """What its workers run."""
        return ", ".join(sorted({worker.program for worker in self.workers if worker.program})) or "no program"


# what nodes of older versions do not say
_UNKNOWN = {"incarnation": 0, "checkpoint": 0, "cpu_seconds": 0.0, "resident_bytes": 0}


class Observer:
    """Makes snapshots of one job's statuses, and adds up who was waited for. Owner: one thread at a time.

    How long a worker has waited between two looks is known exactly; for whom and for what, from what it waits for when
    it is looked at: waits that have ended by then count for what was waited for in its last one that was seen.

    Args:
        restarts: how often the job was started again before.
    """

    def __init__(self, restarts: int = 0) -> None:
        self.last: Snapshot | None = None
        self._needs: dict[int, tuple[list[int], str]] = {}
        self._cost: dict[int, float] = {}
        self._waited_for: dict[str, float] = {}
        self._restarts = restarts
        self._logged: dict[int, Any] = {}  # by worker, as it was seen last
        self._log_of_dead: dict[int, Any] = {}  # the last of the one that had its place before
        self._stale: dict[int, tuple[float, float, float]] = {}  # pushes and reads so far, and by the last look
        self._lines: dict[tuple[int, int], Mapping[str, float]] = {}  # of a table and a worker, the last one
        self._gone: dict[int, dict[str, float]] = {}  # by table: what those did whose places others have

    def see(self, status: Mapping[str, Any], at: float | None = None) -> Snapshot:
        """Returns the job as a node's status shows it.

        Args:
            status: what `multiverso.runtime.observe` or ``Node.status`` returned.
            at: when, in seconds since 1970; now by default.
        """
        if self.last is not None and self.last.address != status["address"]:
            self._restarts += 1
            self.last = None
            self._needs.clear()
            self._lines.clear()
            self._gone.clear()
            self._log_of_dead.clear()
        past = {} if self.last is None else {worker.id: worker for worker in self.last.workers}
        seen_workers = [_with_what_is_gone(_UNKNOWN | seen, past.get(seen["id"])) for seen in status["workers"]]
        seen_workers = [self._without_the_dead_ones_log(seen, past.get(seen["id"])) for seen in seen_workers]
        for seen in seen_workers:
            self._count(seen, past[seen["id"]].waited_seconds if seen["id"] in past else 0.0)
        work = _work(status["tables"])
        stale = {seen["id"]: self._staleness(seen["id"], work.get(seen["id"], {})) for seen in seen_workers}
        workers = [_worker(seen, work.get(seen["id"], {}), self._cost, stale[seen["id"]]) for seen in seen_workers]
        live = [_checkpoint(seen) for seen in seen_workers if seen["state"] == "alive"]
        self.last = Snapshot(
            at=time.time() if at is None else at,
            host=status["host"] or "",
            **{name: status[name] for name in ("address", "workers_num", "up_seconds", "memory_bytes")},
            checkpoint=min(live, default=0),
            workers=workers,
            tables=[_table(table, self._done_before(table)) for table in status["tables"]],
            links=convert(status["links"], list[Link]),
            waited_for=dict(self._waited_for),
            publications=convert(status.get("publications", []), list[Published]),
            restarts=self._restarts,
            lost=status.get("lost", []),
        )
        return self.last

    def _without_the_dead_ones_log(self, seen: dict[str, Any], last: Worker | None) -> dict[str, Any]:
        """A process in another one's place finds there what that one has logged, until it logs something itself."""
        worker_id, logged = seen["id"], seen["logged"]
        if last is not None and last.pid != seen["pid"]:
            self._log_of_dead[worker_id] = self._logged.get(worker_id)
        self._logged[worker_id] = logged
        is_dead_ones = logged is not None and logged == self._log_of_dead.get(worker_id)
        return seen | {"logged": None} if is_dead_ones else seen

    def _staleness(self, worker_id: int, work: Mapping[str, float]) -> float:
        """Returns the staleness of a worker's reads since the last look; where there were none, as before."""
        pushes, reads = work.get("stale_pushes", 0.0), work.get("stale_reads", 0.0)
        pushes_before, reads_before, last = self._stale.get(worker_id, (0.0, 0.0, 0.0))
        if reads < reads_before:  # another process in its place counts from 0
            pushes_before = reads_before = 0.0
        if reads > reads_before:
            last = max(0.0, pushes - pushes_before) / (reads - reads_before)
        self._stale[worker_id] = pushes, reads, last
        return last

    def _done_before(self, table: Mapping[str, Any]) -> Mapping[str, float]:
        """Returns what processes did with a table in whose places there are others, which count from 0."""
        gone = self._gone.setdefault(table["id"], dict.fromkeys(_TOTALS, 0.0))
        for worker_id, line in table["workers"].items():
            last = self._lines.get((table["id"], int(worker_id)), line)
            for name in _TOTALS:
                gone[name] += last[name] if line[name] < last[name] else 0.0  # some counts go on in the next one
            self._lines[table["id"], int(worker_id)] = line
        return gone

    def _count(self, seen: Mapping[str, Any], before: float) -> None:
        if seen["waiting_for"]:
            self._needs[seen["id"]] = [i for i in seen["needs"] if i != seen["id"]], kind_of(seen["waiting_for"])
        needs, kind = self._needs.get(seen["id"], ([], ""))
        waited = seen["waited_seconds"] + seen["waiting_seconds"] - before
        if waited <= 0 or not kind:  # another process in its place counts from 0
            return
        self._waited_for[kind] = self._waited_for.get(kind, 0.0) + waited
        for worker_id in needs:
            self._cost[worker_id] = self._cost.get(worker_id, 0.0) + waited / len(needs)


def _with_what_is_gone(seen: dict[str, Any], last: Worker | None) -> dict[str, Any]:
    """Adds what was known of a process that has ended, which nobody can ask any more."""
    if last is None or last.pid != seen["pid"] or seen["state"] == "alive":
        return seen
    return seen | {"program": seen["program"] or last.program, "cpu_seconds": seen["cpu_seconds"] or last.cpu_seconds}


def kind_of(wait: str) -> str:
    """Returns what a wait is for without its numbers: "round of weights" for round 17 of weights."""
    for pattern, kind in _KINDS:
        wait = pattern.sub(kind, wait)
    return wait


def _worker(seen: Mapping[str, Any], work: Mapping[str, float], cost: Mapping[int, float], staleness: float) -> Worker:
    step, values = _logged(seen["logged"])
    same = ("id", "pid", "program", "state", "incarnation", "waiting_seconds", "needs", "cpu_seconds", "resident_bytes")
    known: dict[str, Any] = {name: seen[name] for name in same} | {name: work.get(name, 0.0) for name in _COUNTS}
    return Worker(
        **known,
        host=seen["host"] or "",
        waiting_for=seen["waiting_for"] or "",
        waited_seconds=seen["waited_seconds"] + seen["waiting_seconds"],
        cost_seconds=cost.get(seen["id"], 0.0),
        staleness=staleness,
        checkpoint=_checkpoint(seen),
        step=step,
        values=values,
    )


def _logged(note: Any) -> tuple[int | None, dict[str, float | None]]:
    """Returns what a worker has logged, of which nobody knows what it wrote there."""
    try:
        step, values = int(note["step"]), dict(note["values"])
        return step, {name: value if math.isfinite(value) else None for name, value in values.items()}
    except (TypeError, KeyError, ValueError):
        return None, {}


_COUNTS = ("adds", "gets", "exchanges", "bytes")
_TOTALS = (*_COUNTS, "wait_seconds")


def _work(tables: list[Mapping[str, Any]]) -> dict[int, dict[str, float]]:
    """Returns what each worker has done in all tables; an answer that came as JSON has text for numbers."""
    found: dict[int, dict[str, float]] = {}
    for table in tables:
        for worker_id, line in table["workers"].items():
            work = found.setdefault(int(worker_id), dict.fromkeys((*_COUNTS, "stale_pushes", "stale_reads"), 0.0))
            for name in _COUNTS:
                work[name] += line[name]
            reads = line.get("staleness_reads", line["gets"] + line["exchanges"])  # an older node does not count them
            work["stale_reads"] += reads
            work["stale_pushes"] += line["staleness_mean"] * reads
    return found


def _checkpoint(seen: Mapping[str, Any]) -> int:
    number, phase = divmod(seen["checkpoint"], _PHASES)
    return int(number if phase in (_DONE, _CLOSED) else max(0, number - 1))


def _table(table: Mapping[str, Any], before: Mapping[str, float]) -> Table:
    lines = list(table["workers"].values())
    reads = [line["staleness_mean"] for line in lines if line["gets"] + line["exchanges"]]
    updater = table["updater"]
    return Table(
        id=table["id"],
        name=table["name"] or f"#{table['id']}",
        kind=table["kind"],
        shape=table["shape"],
        dtype=table["dtype"],
        updater=str(updater.get("name", updater) if isinstance(updater, dict) else updater),
        rounds=table["rounds"],
        **{name: before[name] + sum(line[name] for line in lines) for name in _TOTALS},
        staleness=sum(reads) / len(reads) if reads else 0.0,
        **{name: count for name, count in (table.get("copies") or {}).items() if name in Table.__struct_fields__},
    )
