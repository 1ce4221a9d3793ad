"""A node's reports of its workers to the coordinator: twenty times a second, and at once where a worker waits."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable

from msgspec.structs import replace

from multiverso.hosts.control.messages import HostFacts, Line, Note, Report, Workers
from multiverso.hosts.roster import Roster
from multiverso.runtime.job.control import Control
from multiverso.runtime.job.logged import MEMORY
from multiverso.runtime.job.processes import note_of
from multiverso.runtime.node.catalogue import Catalogue
from multiverso.runtime.several_hosts.mirror import read_lines
from multiverso.runtime.several_hosts.moving import Mover

_LOOK_SECONDS = 0.05
_NOTES_EVERY = 10  # looks
_JOIN_SECONDS = 10.0


class Reporter:
    """A thread that looks at this host's workers. Any thread may call it. Owner: `OtherHosts`.

    Args:
        roster: the job's hosts.
        control: the control segment.
        catalogue: the tables, and the memory of `mv.log`.
        report: brings a report to the coordinator.
        mover: whose node ends if this thread does.
        closing: set once everything ends.
        facts: returns what the others are to know of this host.
    """

    def __init__(
        self,
        roster: Roster,
        control: Control,
        catalogue: Catalogue,
        report: Callable[[Report], None],
        mover: Mover,
        closing: threading.Event,
        facts: Callable[[], HostFacts],
    ) -> None:
        self._facts = facts
        self._roster = roster
        self._control = control
        self._catalogue = catalogue
        self._report = report
        self._closing = closing
        self._reporting = threading.Lock()
        self._last_lines: dict[int, Line] = {}
        self._last_notes: dict[int, Note] = {}
        self._thread = mover.thread("multiverso-hosts-report", self._run)

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
        for look in itertools.count():
            if self._closing.wait(_LOOK_SECONDS):
                return
            with self._reporting:
                self._report_changes(with_notes=look % _NOTES_EVERY == 0)

    def _report_changes(self, with_notes: bool = False) -> None:
        now, shards = time.monotonic_ns(), self._catalogue.shards
        lines = read_lines(self._control, self._roster.local, shards)
        changed = {line.worker_id: line for line in lines if self._last_lines.get(line.worker_id) != line}
        # what one that has left has done is all that there will be
        with_notes |= any(not line.is_live and self._was_live(line.worker_id) for line in changed.values())
        keyed = self._catalogue.keyed_tables(self._roster.local) if with_notes else {}
        for line in lines if with_notes else ():
            worker = line.worker_id
            tables = {number: shard.statistics(worker) for number, shard in shards.items()}
            by_key = {called: table["workers"][worker] for called, table in keyed.items()}
            is_first = worker == self._roster.local[0]
            if is_first:
                by_key = {called: counts | {"rows": keyed[called]["shape"][0]} for called, counts in by_key.items()}
            known = note_of(self._control.worker(worker), self._catalogue.memory(MEMORY))
            note = Note(**known, tables=tables, keyed=by_key, host=self._facts() if is_first else None)
            if note != self._last_notes.get(worker):
                self._last_notes[worker] = note
                changed[worker] = replace(line, note=note)
        if changed:
            self._last_lines = {line.worker_id: line for line in lines}
            self._report(Workers([replace(line, read_ns=now) for line in changed.values()]))

    def _was_live(self, worker_id: int) -> bool:
        last = self._last_lines.get(worker_id)
        return last is not None and last.is_live
