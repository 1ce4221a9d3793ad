"""`multiverso top`: the running jobs of this user, asked of their nodes."""

import itertools
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import click

from multiverso.cli.keys import COLUMNS, HELP, View, after
from multiverso.cli.screen import draw, rows, screen
from multiverso.columns import in_columns
from multiverso.errors import StartupError
from multiverso.watching.history import History
from multiverso.watching.jobs import chosen, find_jobs
from multiverso.watching.snapshot import Observer, Snapshot, Worker
from multiverso.watching.units import duration, size

_STATE_COLOURS = {"alive": "green", "lost": "red"}
_BARS = " ▁▂▃▄▅▆▇█"
_SPARK = 16  # looks
_SUMMARY = ("worker", "operations", "op/s", "stale", "lag", "waited", "logged")
_ALL = View()


@dataclass(frozen=True)
class Job:
    """One job that is looked at again and again."""

    observer: Observer = field(default_factory=Observer)
    history: History = field(default_factory=History)

    def see(self, status: dict[str, Any]) -> "Job":
        """Looks at the job again."""
        self.history.add(self.observer.see(status))
        return self

    @property
    def now(self) -> Snapshot:
        """The last look."""
        assert self.history.now is not None
        return self.history.now

    def per_second(self, part: str, number: int | str, *counts: str) -> float:
        """Returns how quickly a worker's, a table's or a link's counts grew of late; after one look, since it began."""
        now, before = _totals(self.now, part, counts), {}
        seconds = self.now.up_seconds
        if self.history.before is not None:
            before = _totals(self.history.before, part, counts)
            seconds -= self.history.before.up_seconds
        return max(0.0, now[number] - before.get(number, 0.0)) / max(seconds, 1e-9)

    def past(self, worker_id: int) -> list[float]:
        """Returns the operations a second of a worker between the last looks."""
        points = self.history.points[-_SPARK - 1 :]
        seen = [(point.at, pace.operations) for point in points for pace in point.workers if pace.id == worker_id]
        return [max(0.0, b - a) / max(t - s, 1e-9) for (s, a), (t, b) in itertools.pairwise(seen)]


def _totals(now: Snapshot, part: str, counts: Sequence[str]) -> dict[int | str, float]:
    key = "host" if part == "links" else "id"
    return {getattr(one, key): sum(getattr(one, count) for count in counts) for one in getattr(now, part)}


def show_jobs(*, once: bool, as_json: bool, interval_seconds: float, job: str | None = None, sort: str) -> int:
    """Prints the jobs once (into a pipe always), or keeps showing them until Ctrl-C; returns the exit code."""
    if not interval_seconds > 0:
        raise StartupError(f"--interval {interval_seconds:g}: it must be more than 0 seconds.")
    if as_json:
        print(json.dumps(chosen(find_jobs(), job)))
        return 0
    if once or not sys.stdout.isatty():  # what reads us waits for our end
        click.echo(render([Job().see(status) for status in chosen(find_jobs(), job)], View(sort), job))
        return 0
    with suppress(KeyboardInterrupt):
        _keep_showing(job, interval_seconds, View(sort))
    return 0


def _keep_showing(job: str | None, interval_seconds: float, view: View | None) -> None:
    seen: dict[str, Job] = {}
    look_at = 0.0
    with screen() as key:
        while view is not None:
            if time.monotonic() >= look_at:
                found = {status["address"]: status for status in chosen(find_jobs(), job)}
                seen = {address: seen.get(address, Job()).see(status) for address, status in found.items()}
                look_at = time.monotonic() + interval_seconds
            lines = (HELP if view.help else render(list(seen.values()), view, job)).splitlines()
            view = view._replace(first=max(0, min(view.first, len(lines) - rows())))
            draw(lines[0 if view.help else view.first :], click.style(view.keys, dim=True))
            view = after(view, key(max(0.0, look_at - time.monotonic())), rows())


def render(jobs: list[Job], view: View = _ALL, wish: str | None = None) -> str:
    """Lays the jobs out, one below the other; ``wish``: which one was asked for."""
    if not jobs:
        return "No job of this user is running here." if wish is None else f"No job here is called {wish}."
    return "\n\n".join("\n".join(_render_job(job, view)) for job in jobs)


def _render_job(job: Job, view: View) -> Iterator[str]:
    now = job.now
    number = now.workers_num
    workers = f"workers: {number}" if number is not None else f"workers: {len(now.workers)}, any number"
    title = f"{now.program}  {workers}, up {duration(now.up_seconds)}"
    yield click.style(title, bold=True) + click.style(f"  {now.address}", dim=True)
    for found in (job.history.slowest, job.history.busiest):
        if found is not None:
            yield click.style(job.history.in_words(found), fg="yellow")
    yield render_workers(job, view)
    if now.tables:
        yield _render_tables(job)
    if now.publications:
        yield _render_publications(now)
    if now.links:
        yield _render_links(job)


def render_workers(job: Job, view: View = _ALL) -> str:
    """Lays the workers of one job out: what each does, how quickly, how far behind, what it says."""
    lines = []
    for cells in _cells(job):
        row = [cells[name][1] for name in COLUMNS]
        if view.only.lower() in click.unstyle("  ".join(row)).lower():
            lines.append((cells[view.column][0], row))
    lines.sort(key=lambda line: line[0])
    head = [click.style(name, reverse=True) if name == view.column else name for name in COLUMNS]
    return in_columns(head, [row for _, row in lines])


def summary(now: Snapshot) -> str:
    """Returns a table of what each worker of a job that is over has done, as text."""
    job = Job()
    job.history.add(now)
    rows = [[cells[name][1] for name in _SUMMARY] for cells in _cells(job)]
    return click.unstyle(in_columns(_SUMMARY, rows)) + "\n"


def _cells(job: Job) -> Iterator[dict[str, tuple[Any, str]]]:
    """Yields for each worker, by columns: by what it is sorted there, the smallest first, and what is shown."""
    now = job.now
    most = max((worker.operations for worker in now.workers), default=0.0)
    past = {worker.id: job.past(worker.id) for worker in now.workers}
    highest = max(itertools.chain(*past.values()), default=0.0)
    for worker in now.workers:
        rate = job.per_second("workers", worker.id, "operations")
        # a process may be much older than the job: what it used before says nothing
        known = job.history.before is not None and worker.state == "alive"
        cpu = job.per_second("workers", worker.id, "cpu_seconds") if known else 0.0
        needs = worker.needs if worker.waiting_for else []
        since = worker.waiting_seconds if worker.waiting_for else 0.0
        yield {
            "worker": (worker.id, str(worker.id)),
            "pid": ((worker.host, worker.pid), f"{worker.pid} on {worker.host}" if worker.host else str(worker.pid)),
            "state": (worker.state, _coloured(worker.state, _STATE_COLOURS.get(worker.state))),
            "cpu": (-cpu, f"{cpu:.0%}" if known else ""),
            "memory": (-worker.resident_bytes, size(worker.resident_bytes) if worker.resident_bytes else ""),
            "operations": (-worker.operations, f"{worker.operations:,.0f}"),
            "op/s": (-rate, f"{rate:,.0f}"),
            "past": (-sum(past[worker.id]), _sparkline(past[worker.id], highest)),
            "stale": (-worker.staleness, f"{worker.staleness:.1f}"),
            "lag": (worker.operations, f"{most - worker.operations:,.0f}"),
            "waits for": ((not worker.waiting_for, worker.waiting_for), worker.waiting_for),
            "since": (-since, duration(since) if worker.waiting_for else ""),
            "missing": (-len(needs), ", ".join(map(str, needs))),
            "waited": (-worker.waited_seconds, duration(worker.waited_seconds)),
            "cost": ((-worker.cost_seconds, rate), duration(worker.cost_seconds) if worker.cost_seconds >= 0.1 else ""),
            "logged": (-1 if worker.step is None else -worker.step - 2, _logged(worker)),
        }


def _sparkline(values: Sequence[float], highest: float) -> str:
    """Returns a bar for each value, a full one for the highest."""
    steps = len(_BARS) - 1
    return "".join(_BARS[min(steps, round(value / highest * steps))] if highest else _BARS[0] for value in values)


def _coloured(text: str, colour: str | None) -> str:
    return click.style(text, fg=colour) if colour else text


def _logged(worker: Worker) -> str:
    if worker.step is None:
        return ""
    values = " ".join(f"{name}={'nan' if value is None else f'{value:.4g}'}" for name, value in worker.values.items())
    return f"step {worker.step}: {values}"


def _render_tables(job: Job) -> str:
    columns = ("table", "shape", "updater", "adds", "gets", "exch.", "op/s", "bytes/s", "waited", "staleness")
    rows = []
    for table in job.now.tables:
        row = (
            table.name,
            table.dimensions,
            table.updater,
            *(f"{number:.0f}" for number in (table.adds, table.gets, table.exchanges)),
            f"{job.per_second('tables', table.id, 'adds', 'gets', 'exchanges'):,.0f}",
            size(job.per_second("tables", table.id, "bytes")),
            duration(table.wait_seconds),
            f"{table.staleness:.1f}",
        )
        rows.append(row)
    return in_columns(columns, rows)


def _render_publications(now: Snapshot) -> str:
    rows = []
    for one in now.publications:
        where = [one.host or ""] if now.links else []
        counts = (
            one.version,
            "" if one.step is None else one.step,
            one.readers,
            one.oldest_version or "",
            one.left_out,
        )
        rows.append((one.name, *where, *map(str, counts), size(one.sent_bytes), size(one.memory_bytes)))
    columns = ("version", "step", "readers", "oldest", "left out", "sent", "memory")
    return in_columns(["publication", *(["host"] if now.links else []), *columns], rows)


def _render_links(job: Job) -> str:
    """The ways from the host whose node answers to the others."""
    rows = []
    for link in job.now.links:
        row = (
            link.host,
            _coloured(link.state, None if link.state == "connected" else "red"),
            size(link.bytes_sent),
            size(link.bytes_received),
            *(size(job.per_second("links", link.host, count)) for count in ("bytes_sent", "bytes_received")),
            f"{job.per_second('links', link.host, 'busy_seconds'):.0%}" if job.history.before else "",
            "" if link.round_trip_seconds is None else f"{1e3 * link.round_trip_seconds:.2g} ms",
            f"{1e3 * link.behind_seconds:.0f} ms",
            f"{max(0, link.connections - 1)} times",
        )
        rows.append(row)
    columns = ("host", "link", "sent", "received", "sent/s", "received/s", "busy", "round trip", "behind (max)", "cut")
    return in_columns(columns, rows)
