"""`multiverso top`: the running jobs of this user, asked of their nodes."""

import io
import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from multiverso.errors import MultiversoError, StartupError
from multiverso.runtime import observe
from multiverso.wire.messages import node_addresses

Status = dict[str, Any]

_ANSWER_SECONDS = 2.0
_STATE_STYLES = {"alive": "green", "lost": "red", "left": "dim"}


def find_jobs() -> list[Status]:
    """Asks every node of this user for its status; those that do not answer are left out."""
    jobs = []
    for address in node_addresses():
        try:
            jobs.append(observe(address, _ANSWER_SECONDS))
        except MultiversoError:  # another user's, or just over
            continue
    return jobs


def chosen(jobs: list[Status], wish: str | None) -> list[Status]:
    """Returns the jobs that are meant: by a part of the address, a worker's pid, or its script."""
    if wish is None:
        return jobs
    return [
        job
        for job in jobs
        if wish in job["address"] or any(wish in (str(worker["pid"]), worker["program"]) for worker in job["workers"])
    ]


def show_jobs(*, once: bool, as_json: bool, interval_seconds: float, job: str | None = None) -> int:
    """Prints the jobs once (into a pipe always), or keeps showing them until Ctrl-C; returns the exit code."""
    if not interval_seconds > 0:
        raise StartupError(f"--interval {interval_seconds:g}: it must be more than 0 seconds.")
    if as_json:
        print(json.dumps(chosen(find_jobs(), job)))
        return 0
    console = Console()
    if not console.is_terminal:
        console, once = Console(width=160), True  # what reads us waits for our end
    if once:
        console.print(render(chosen(find_jobs(), job), {}))
        return 0
    rates: dict[str, Rates] = {}
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                jobs = chosen(find_jobs(), job)
                rates = {one["address"]: rates.get(one["address"], Rates()).seen(one) for one in jobs}
                live.update(render(jobs, rates), refresh=True)
                time.sleep(interval_seconds)
    except KeyboardInterrupt:
        return 0


@dataclass(frozen=True)
class Rates:
    """How fast a job's tables are used, from two looks at its counters."""

    at_seconds: float = 0.0
    counters: Mapping[Any, tuple[float, float]] = field(default_factory=dict)
    per_second: Mapping[Any, tuple[float, float]] = field(default_factory=dict)

    def seen(self, job: Status) -> "Rates":
        """Looks at the job's counters again."""
        now = float(job["up_seconds"])
        counters: dict[Any, tuple[float, float]] = {table["id"]: _work(table) for table in job["tables"]}
        for worker in job.get("workers", ()):
            counters["worker", worker["id"]] = _work_of(job, worker["id"])
        for link in job.get("links", ()):
            counters["link", link["host"]] = link["bytes_sent"], link["bytes_received"]
        elapsed = now - self.at_seconds
        per_second = {
            table: ((operations - self.counters[table][0]) / elapsed, (size - self.counters[table][1]) / elapsed)
            for table, (operations, size) in counters.items()
            if table in self.counters and elapsed > 0
        }
        return Rates(now, counters, per_second)


def render(jobs: list[Status], rates: Mapping[str, Rates]) -> RenderableType:
    """Lays the jobs out, one below the other."""
    if not jobs:
        return Text("No job of this user is running here.")
    return Group(*(part for job in jobs for part in _render_job(job, rates.get(job["address"], Rates()))))


def _render_job(job: Status, rates: Rates) -> Iterator[RenderableType]:
    number = job["workers_num"]
    workers = f"workers: {number}" if number is not None else f"workers: {len(job['workers'])}, any number"
    programs = ", ".join(sorted({worker["program"] for worker in job["workers"] if worker["program"]}))
    title = f"{programs or 'no program'}  {workers}, up {_duration(job['up_seconds'])}"
    yield Text.assemble((title, "bold"), (f"  {job['address']}", "dim"))
    yield render_workers(job, rates)
    if job["tables"]:
        yield _render_tables(job["tables"], rates)
    if job.get("links"):
        yield _render_links(job["links"], rates)
    yield Text()


def render_workers(job: Status, rates: Rates) -> Table:
    """Lays the workers of one job out: what each does, how quickly, how far behind, what it says."""
    columns = ("worker", "pid", "state", "memory", "op/s", "stale", "lag", "waits for", "since", "missing", "waited")
    table = Table(*columns, "logged", box=None, pad_edge=False)
    done = {worker["id"]: _work_of(job, worker["id"])[0] for worker in job["workers"]}
    for worker in job["workers"]:
        waiting, alive = worker["waiting_for"], worker["state"] == "alive"
        per_second = rates.per_second.get(("worker", worker["id"]), (None, None))[0]
        if per_second is None and job["up_seconds"] > 0:
            per_second = done[worker["id"]] / job["up_seconds"]
        table.add_row(
            str(worker["id"]),
            f"{worker['pid']} on {worker['host']}" if worker.get("host") else str(worker["pid"]),
            Text(worker["state"], style=_STATE_STYLES.get(worker["state"], "")),
            _resident(worker["pid"]) if alive and worker.get("host") == job.get("host") else "",
            "" if per_second is None else f"{per_second:,.0f}",
            f"{_staleness_of(job, worker['id']):.1f}",
            f"{max(done.values()) - done[worker['id']]:,.0f}",
            waiting or "",
            _duration(worker["waiting_seconds"]) if waiting else "",
            ", ".join(map(str, worker["needs"])) if waiting else "",
            _duration(worker["waited_seconds"]),
            _logged(worker.get("logged")),
        )
    return table


def summary(job: Status) -> str:
    """Returns a table of what each worker of a job that is over has done, as text."""
    columns = ("worker", "operations", "op/s", "stale", "lag", "waited", "logged")
    table = Table(*columns, box=None, pad_edge=False)
    done = {worker["id"]: _work_of(job, worker["id"])[0] for worker in job["workers"]}
    for worker in job["workers"]:
        table.add_row(
            str(worker["id"]),
            f"{done[worker['id']]:,.0f}",
            f"{done[worker['id']] / max(job['up_seconds'], 1e-9):,.0f}",
            f"{_staleness_of(job, worker['id']):.1f}",
            f"{max(done.values()) - done[worker['id']]:,.0f}",
            _duration(worker["waited_seconds"]),
            _logged(worker["logged"]),
        )
    console = Console(width=160, file=io.StringIO())
    console.print(table)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


def _logged(note: Status | None) -> str:
    if note is None:
        return ""
    values = " ".join(f"{name}={value:.4g}" for name, value in note["values"].items())
    return f"step {note['step']}: {values}"


def _work_of(job: Status, worker_id: int) -> tuple[float, float]:
    """Returns a worker's operations and bytes in all tables; an answer that came as JSON has text for numbers."""
    lines = [line for table in job["tables"] if (line := _line(table, worker_id))]
    operations = sum(line["adds"] + line["gets"] + line["exchanges"] for line in lines)
    return operations, sum(line["bytes"] for line in lines)


def _staleness_of(job: Status, worker_id: int) -> float:
    """Returns how many pushes of others came between this worker's reads, on the average over its tables."""
    lines = [line for table in job["tables"] if (line := _line(table, worker_id))]
    return sum(float(line["staleness_mean"]) for line in lines) / max(1, len(lines))


def _line(table: Status, worker_id: int) -> Status | None:
    lines = table["workers"]
    found: Status | None = lines.get(worker_id, lines.get(str(worker_id)))
    return found


def _render_tables(tables: list[Status], rates: Rates) -> Table:
    columns = ("table", "shape", "updater", "adds", "gets", "exch.", "op/s", "bytes/s", "waited", "staleness")
    shown = Table(*columns, box=None, pad_edge=False)
    for table in tables:
        lines = table["workers"].values()
        operations, size = rates.per_second.get(table["id"], (None, None))
        staleness = [line["staleness_mean"] for line in lines if line["gets"] + line["exchanges"]]
        shown.add_row(
            table["name"] or f"#{table['id']}",
            f"{'x'.join(map(str, table['shape']))} {table['dtype']}",
            _updater(table["updater"]),
            *(f"{sum(line[name] for line in lines):.0f}" for name in ("adds", "gets", "exchanges")),
            "" if operations is None else f"{operations:,.0f}",
            "" if size is None else _size(size),
            _duration(sum(line["wait_seconds"] for line in lines)),
            f"{sum(staleness) / max(1, len(staleness)):.1f}",
        )
    return shown


def _render_links(links: list[Status], rates: Rates) -> Table:
    """The ways from the host whose node answers to the others."""
    shown = Table("host", "link", "sent", "received", "sent/s", "received/s", "cut", box=None, pad_edge=False)
    for link in links:
        sent, received = rates.per_second.get(("link", link["host"]), (None, None))
        shown.add_row(
            link["host"],
            Text(link["state"], style="" if link["state"] == "connected" else "red"),
            _size(link["bytes_sent"]),
            _size(link["bytes_received"]),
            "" if sent is None else _size(sent),
            "" if received is None else _size(received),
            f"{max(0, link['connections'] - 1)} times",
        )
    return shown


def _work(table: Status) -> tuple[float, float]:
    lines = table["workers"].values()
    operations = sum(line["adds"] + line["gets"] + line["exchanges"] for line in lines)
    return operations, sum(line["bytes"] for line in lines)


def _updater(updater: Any) -> str:
    return str(updater.get("name", updater)) if isinstance(updater, dict) else str(updater)


def _resident(pid: int) -> str:
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return ""
    return _size(pages * os.sysconf("SC_PAGE_SIZE"))


def _size(number: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000 or unit == "GB":
            break
        number /= 1000
    return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"
