"""A node's reports of its workers to the coordinator: twenty times a second, and at once where a worker waits."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from multiverso.hosts.control.messages import Line, Note, Progress, Report, Statistics, Workers
from multiverso.hosts.roster import Roster
from multiverso.runtime.job.control import Control
from multiverso.runtime.job.processes import note_of
from multiverso.runtime.several_hosts.mirror import read_lines, read_progress
from multiverso.shards.shard import Shard

_LOOK_SECONDS = 0.05
_STATISTICS_EVERY = 10  # looks
_JOIN_SECONDS = 10.0


class Reporter:
    """A thread that looks at this host's workers. Any thread may call it. Owner: `OtherHosts`.

    Args:
        roster: the job's hosts.
        control: the control segment.
        shards: returns the tables by number.
        logged: returns the memory of `mv.log`, or None.
        report: brings a report to the coordinator.
        closing: set once everything ends.
    """

    def __init__(
        self,
        roster: Roster,
        control: Control,
        shards: Callable[[], Mapping[int, Shard]],
        logged: Callable[[], Any],
        report: Callable[[Report], None],
        closing: threading.Event,
    ) -> None:
        self._roster = roster
        self._control = control
        self._shards = shards
        self._logged = logged
        self._report = report
        self._closing = closing
        self._reporting = threading.Lock()
        self._last_lines: dict[int, Line] = {}
        self._last_progress: dict[int, dict[int, list[int]]] = {}
        self._thread = threading.Thread(target=self._run, name="multiverso-hosts-report", daemon=True)

    def begin(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def join(self) -> None:
        """Waits for its end, for ten seconds at most, once ``closing`` is set."""
        if self._thread.ident is not None:
            self._thread.join(_JOIN_SECONDS)

    def report(self, message: Report) -> None:
        """Reports something to the coordinator, after what this host's workers have done so far."""
        with self._reporting:
            self._report_changes()
            self._report(message)

    def report_changes(self) -> None:
        """Reports what this host's workers do, without waiting for the next regular look."""
        with self._reporting:
            self._report_changes()

    def _run(self) -> None:
        reported = Statistics({})
        for look in itertools.count():
            if self._closing.wait(_LOOK_SECONDS):
                return
            self.report_changes()
            if look % _STATISTICS_EVERY == 0:
                found = self._statistics()
                if found != reported:
                    reported = found
                    self._report(found)

    def _statistics(self) -> Statistics:
        local, logged = self._roster.local, self._logged()
        workers = [worker for worker in map(self._control.worker, local) if worker.pid]
        return Statistics(
            {number: {i: shard.statistics(i) for i in local} for number, shard in self._shards().items()},
            {worker.worker_id: msgspec.convert(note_of(worker, logged), Note) for worker in workers},
        )

    def _report_changes(self) -> None:
        now = time.monotonic_ns()
        lines = {line.worker_id: line for line in read_lines(self._control, self._roster.local, self._shards())}
        changed = [line for worker_id, line in lines.items() if self._last_lines.get(worker_id) != line]
        lines_of_tables = self._progress()
        if lines_of_tables:
            self._report(Progress(lines_of_tables))
        if changed:
            self._last_lines = lines
            self._report(Workers(changed, now))

    def _progress(self) -> dict[int, dict[int, list[int]]]:
        """How far this host's workers are in the rounds and clocks of tables, where that has changed."""
        found = {
            number: read_progress(shard, self._roster.local)
            for number, shard in self._shards().items()
            if shard.consistency.in_rounds
        }
        changed = {number: lines for number, lines in found.items() if lines != self._last_progress.get(number)}
        self._last_progress = found
        return changed
