"""A node's reports of its workers to the coordinator: twenty times a second, and at once where a worker waits."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable

from msgspec.structs import replace

from multiverso.hosts.control.messages import HostFacts, Line, Note, Report, Workers
from multiverso.runtime.job.logged import MEMORY
from multiverso.runtime.job.processes import note_of
from multiverso.runtime.several_hosts.mirror import read_lines
from multiverso.runtime.several_hosts.this_host import ThisHost

_LOOK_SECONDS = 0.05
_NOTES_EVERY = 10  # looks


class Reporter:
    """Looks at this host's workers. Any thread may call it. Owner: `OtherHosts`.

    Args:
        here: this host.
        facts: returns what the others are to know of it.
    """

    def __init__(self, here: ThisHost, facts: Callable[[], HostFacts]) -> None:
        self._here, self._facts = here, facts
        self._reporting = threading.Lock()
        self._last_lines: dict[int, Line] = {}
        self._last_notes: dict[int, Note] = {}

    def report(self, *messages: Report) -> None:
        """Reports what this host's workers have done so far, and then something else to the coordinator."""
        with self._reporting:
            self._report_changes()
            for message in messages:
                self._here.tell(message)

    def run(self) -> None:
        """Looks until everything ends, in a thread of its own."""
        for look in itertools.count():
            if self._here.closing.wait(_LOOK_SECONDS):
                return
            with self._reporting:
                self._report_changes(with_notes=look % _NOTES_EVERY == 0)

    def _report_changes(self, with_notes: bool = False) -> None:
        control, catalogue, local = self._here.control, self._here.catalogue, self._here.roster.local
        now, shards = time.monotonic_ns(), catalogue.shards
        lines = read_lines(control, local, shards)
        changed = {line.worker_id: line for line in lines if self._last_lines.get(line.worker_id) != line}
        # what one that has left has done is all that there will be
        with_notes |= any(not line.is_live and self._was_live(line.worker_id) for line in changed.values())
        keyed = catalogue.keyed_tables() if with_notes else {}
        for line in lines if with_notes else ():
            worker = line.worker_id
            tables = {number: shard.statistics(worker) for number, shard in shards.items()}
            by_key = {called: table["workers"][worker] for called, table in keyed.items()}
            is_first = worker == local[0]
            if is_first:
                by_key = {called: counts | {"rows": keyed[called]["shape"][0]} for called, counts in by_key.items()}
            known = note_of(control.worker(worker), catalogue.memory(MEMORY), control.index.of(worker))
            note = Note(**known, tables=tables, keyed=by_key, host=self._facts() if is_first else None)
            if note != self._last_notes.get(worker):
                self._last_notes[worker] = note
                changed[worker] = replace(line, note=note)
        if changed:
            self._last_lines = {line.worker_id: line for line in lines}
            self._here.tell(Workers([replace(line, read_ns=now) for line in changed.values()]))

    def _was_live(self, worker_id: int) -> bool:
        last = self._last_lines.get(worker_id)
        return last is not None and last.is_live
