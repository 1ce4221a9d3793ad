"""How `multiverso run` reports what happens to a job: to a person, or to a program."""

import sys
import urllib.parse
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

from multiverso.launch.on_nodes import Watcher
from multiverso.launch.options import RunOptions
from multiverso.launch.output import Output
from multiverso.launch.place import Place
from multiverso.launch.restart_policy import Replacements, Starts
from multiverso.launch.results import JobResult, WorkerExit
from multiverso.launch.sinks import Sink, json_sink, prefix_sink, unbuffered, write_event
from multiverso.watching.snapshot import Observer, Snapshot


class Report(Watcher):
    """Tells a person what happens: output to where it belongs, our own words to standard error.

    Or tells a program, with ``--json``: one JSON object a line on standard output.

    Args:
        options: what was asked for.
        host: the name of this host, in a job on several; each event has it.

    Attributes:
        output: what reads the workers' output, once there is one; our own words come between its lines.
        sink: where that output goes.
        says_more: whether somebody reads a first line and a last one: on a terminal, or who has asked for more.
    """

    output: Output | None = None

    def __init__(self, options: RunOptions, host: str = "") -> None:
        self._options = options
        self._of = {"host": host} if host else {}
        self._lines = prefix_sink(sys.stdout, sys.stderr)
        self._stdout = unbuffered(sys.stdout)
        self.sink: Sink = json_sink(self._stdout) if options.json else self._lines
        self.says_more = not options.json and (options.page or options.summary is not None or sys.stderr.isatty())

    def _tell(self, event: str, words: str = "", **fields: object) -> None:
        """Writes an event, or words where there are any, between the lines of the workers' output."""
        if self._options.json:
            write: Callable[[], None] = partial(write_event, self._stdout, event, **self._of, **fields)
        elif words:
            write = partial(self._lines.say, f"multiverso: {words}\n")
        else:
            return
        if self.output:
            self.output.notice(write)
        else:
            write()

    def warn(self, text: str) -> None:
        """Says what the user should know and may want to change."""
        self._tell("warning", text, text=text)

    def begins(self, workers: str, place: Place, address: str | None) -> None:
        """The job is about to begin: so many workers, where, and the page's address."""
        roster = place.other_hosts.roster if place.other_hosts else None
        where = ", ".join(roster.names) if roster else "this host"
        reach = ""
        if address and roster and not roster.rehearsal:
            port = urllib.parse.urlsplit(address).port
            reach = f" (on {place.name}; from elsewhere: ssh -L {port}:127.0.0.1:{port} {place.name})"
        words = f"{workers} on {where}" + (f"; page: {address}{reach}" if address else "")
        self._tell("page", words, address=address)

    def ends(self, words: str) -> None:
        """The job is over: what it was, in a line; of which a program's summary says more."""
        if not self._options.json:
            self.warn(f"{words}.")

    def started(self, worker_id: int, pid: int) -> None:
        """A worker's process has begun."""
        self._tell("start", worker=worker_id, pid=pid)

    def summarise(self, status: dict[str, Any], text_of: Callable[[Snapshot], str]) -> None:
        """Shows the job's last status."""
        if self._options.json:
            self._tell("status", status=status)
        else:
            self._lines.say(text_of(Observer().see(status)))

    def ended(self, end: WorkerExit) -> None:
        """A worker's process has ended, and none comes in its place."""
        is_news = end.failed and self._options.on_failure == "continue"
        self._tell("exit", f"{end}; the others continue." if is_news else "", **_exit_fields(end))

    def restarting(self, starts: Starts) -> None:
        """The job is about to be started again."""
        self._tell("restart", starts.words(), number=starts.restarts, most=starts.most)

    def replacing(self, end: WorkerExit, replacements: Replacements, seconds: float) -> None:
        """A worker's process has ended, and another one is about to take its place."""
        self._tell("exit", "", **_exit_fields(end))
        words = replacements.words(end, seconds)
        self._tell("replace", words, worker=end.worker_id, number=replacements.done, most=replacements.most)

    def finished(self, result: JobResult) -> None:
        """The job, or this host's part of it, is over."""
        self._tell(
            "summary",
            self._words_of(result),
            reason=result.reason,
            exit_code=result.exit_code,
            failed_worker=result.culprit.worker_id if result.culprit else None,
            left_without_shutdown=result.deserter.worker_id if result.deserter else None,
            seconds=round(result.seconds, 3),
            workers=[_exit_fields(end) for end in result.exits],
        )

    def _words_of(self, result: JobResult) -> str:
        if result.reason == "timeout":
            return f"the job took longer than {self._options.timeout_seconds:g} s and was ended."
        if result.reason == "signal":
            return f"ended by a signal after {result.seconds:.1f} s."
        if not result.culprit or result.reason not in ("failed", "finished"):
            return ""
        # Its traceback stands above, perhaps far above: its last line says which one to look for.
        said = self.output.last_words(result.culprit.worker_id) if self.output else ""
        others = len(result.exits) > 1 + len(result.later)
        ended = "; the others were ended" if result.reason == "failed" and others else ""
        first = ""
        if result.deserter:
            first = (
                f"worker {result.deserter.worker_id} (pid {result.deserter.pid}) ended with exit code 0 and "
                "without multiverso.shutdown(), while others needed it; then "
            )
        return f"{first}{result.failures}{ended}.{f' Its last line: {said}' if said else ''}"


def _exit_fields(end: WorkerExit) -> dict[str, object]:
    fields = asdict(end)
    del fields["host"]  # the event has it
    return {"worker": fields.pop("worker_id"), **fields, "seconds": round(end.seconds, 3)}
