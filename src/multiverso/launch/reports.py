"""How `multiverso run` reports what happens to a job: to a person, or to a program."""

import sys
import urllib.parse
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, BinaryIO

from multiverso.launch.on_nodes import Watcher
from multiverso.launch.options import RunOptions
from multiverso.launch.output import Output
from multiverso.launch.place import Place
from multiverso.launch.restarting import Replacements, Starts
from multiverso.launch.results import JobResult, WorkerExit
from multiverso.launch.sinks import Sink, json_sink, prefix_sink, write_event
from multiverso.watching.snapshot import Observer, Snapshot


class _Noticing(Watcher):
    """A watcher that writes between the lines of the workers' output, once there is what reads it."""

    output: Output | None = None

    def _notice(self, write: Callable[[], None]) -> None:
        if self.output:
            self.output.notice(write)
        else:
            write()


class TextReport(_Noticing):
    """Tells a person what happens: output to where it belongs, our own words to standard error.

    Args:
        options: what was asked for.

    Attributes:
        output: what reads the workers' output, once there is one; our own words come between its lines.
        sink: where that output goes.
        says_more: whether somebody reads a first line and a last one: on a terminal, or who has asked for more.
    """

    def __init__(self, options: RunOptions) -> None:
        self.says_more = options.page or options.summary is not None or sys.stderr.isatty()
        self._going_on = options.on_failure == "continue"
        self._timeout_seconds = options.timeout_seconds
        self.sink = prefix_sink(sys.stdout, sys.stderr)

    def warn(self, text: str) -> None:
        """Says what the user should know and may want to change."""
        self._notice(lambda: self.sink.say(f"multiverso: {text}\n"))

    def begins(self, workers: str, place: Place, address: str | None) -> None:
        """The job is about to begin: so many workers, where, and the page's address."""
        roster = place.other_hosts.roster if place.other_hosts else None
        where = ", ".join(roster.names) if roster else "this host"
        reach = ""
        if address and roster and not roster.rehearsal:
            port = urllib.parse.urlsplit(address).port
            reach = f" (on {place.name}; from elsewhere: ssh -L {port}:127.0.0.1:{port} {place.name})"
        self.warn(f"{workers} on {where}" + (f"; page: {address}{reach}" if address else ""))

    def ends(self, words: str) -> None:
        """The job is over: what it was, in a line."""
        self.warn(f"{words}.")

    def summarise(self, status: dict[str, Any], text_of: Callable[[Snapshot], str]) -> None:
        """Shows the job's last status."""
        self.sink.say(text_of(Observer().see(status)))

    def ended(self, end: WorkerExit) -> None:
        """A worker's process has ended, and none comes in its place."""
        if end.failed and self._going_on:
            self.warn(f"{end}; the others continue.")

    def restarting(self, starts: Starts) -> None:
        """The job is about to be started again."""
        self.warn(starts.words())

    def replacing(self, end: WorkerExit, replacements: Replacements, seconds: float) -> None:
        """A worker's process has ended, and another one is about to take its place."""
        self.warn(replacements.words(end, seconds))

    def finished(self, result: JobResult) -> None:
        """The job, or this host's part of it, is over."""
        if result.culprit and result.reason in ("failed", "finished"):
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
            self.warn(f"{first}{result.failures}{ended}.{f' Its last line: {said}' if said else ''}")
        elif result.reason == "timeout":
            self.warn(f"the job took longer than {self._timeout_seconds:g} s and was ended.")
        elif result.reason == "signal":
            self.warn(f"ended by a signal after {result.seconds:.1f} s.")


class JsonReport(_Noticing):
    """Tells a program what happens: one JSON object a line on standard output.

    Args:
        stdout: where to.
        host: the name of this host, in a job on several; each event has it.

    Attributes:
        output: what reads the workers' output, once there is one; our own words come between its lines.
        sink: where that output goes.
    """

    def __init__(self, stdout: BinaryIO, host: str = "") -> None:
        self.sink: Sink = json_sink(stdout)
        self._stdout = stdout
        self._of = {"host": host} if host else {}

    says_more = False

    def warn(self, text: str) -> None:
        """Says what the user should know and may want to change."""
        self._write("warning", text=text)

    def begins(self, workers: str, place: Place, address: str | None) -> None:
        """The job is about to begin, and has a page."""
        self._write("page", address=address)

    def ends(self, words: str) -> None:
        """The job is over: the summary says more."""

    def started(self, worker_id: int, pid: int) -> None:
        """A worker's process has begun."""
        self._write("start", worker=worker_id, pid=pid)

    def summarise(self, status: dict[str, Any], text_of: Callable[[Snapshot], str]) -> None:
        """Shows the job's last status."""
        self._write("status", status=status)

    def ended(self, end: WorkerExit) -> None:
        """A worker's process has ended, and none comes in its place."""
        self._write("exit", **_exit_fields(end))

    def restarting(self, starts: Starts) -> None:
        """The job is about to be started again."""
        self._write("restart", number=starts.restarts, most=starts.most)

    def replacing(self, end: WorkerExit, replacements: Replacements, seconds: float) -> None:
        """A worker's process has ended, and another one is about to take its place."""
        self._write("exit", **_exit_fields(end))
        self._write("replace", worker=end.worker_id, number=replacements.done, most=replacements.most)

    def finished(self, result: JobResult) -> None:
        """The job, or this host's part of it, is over."""
        self._write(
            "summary",
            reason=result.reason,
            exit_code=result.exit_code,
            failed_worker=result.culprit.worker_id if result.culprit else None,
            left_without_shutdown=result.deserter.worker_id if result.deserter else None,
            seconds=round(result.seconds, 3),
            workers=[_exit_fields(end) for end in result.exits],
        )

    def _write(self, event: str, **fields: object) -> None:
        self._notice(lambda: write_event(self._stdout, event, **self._of, **fields))


def _exit_fields(end: WorkerExit) -> dict[str, object]:
    fields = asdict(end)
    del fields["host"]  # the event has it
    return {"worker": fields.pop("worker_id"), **fields, "seconds": round(end.seconds, 3)}


Report = TextReport | JsonReport
