"""What `multiverso run --hosts --json` writes: the hosts' events as those of one job."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, BinaryIO

from multiverso.launch.results import JobResult, WorkerExit
from multiverso.launch.sinks import Stream, write_all, write_event


class HostEvents:
    """Passes on what the hosts' launchers write, which are events already, and adds what concerns all of them.

    Args:
        names: the hosts'.
        stdout: where to, one JSON object a line.
    """

    def __init__(self, names: Sequence[str], stdout: BinaryIO) -> None:
        self._names, self._stdout = names, stdout
        self._ends: dict[int, dict[str, Any]] = {}  # of workers, the last one of each
        self._summaries: dict[int, dict[str, Any]] = {}  # of hosts

    def __call__(self, worker_id: int, stream: Stream, lines: bytes, begun: bytes) -> None:
        """Writes whole lines; what are workers to this launcher are hosts."""
        for line in lines.splitlines():
            event = _event_of(line) if stream == "stdout" else None
            if event is None:  # of ssh, or of an interpreter that has not begun
                text = line.decode("utf-8", "backslashreplace")
                write_event(self._stdout, "line", host=self._names[worker_id], stream=stream, text=text)
            elif event["event"] == "summary":
                self._summaries[worker_id] = event
            else:
                if event["event"] == "exit":
                    self._ends[event["worker"]] = {name: event[name] for name in event if name != "event"}
                write_all(self._stdout, line + b"\n")

    def say(self, text: str) -> None:
        """Says what concerns all hosts."""
        write_event(self._stdout, "warning", text=text)

    def folded(self) -> list[str]:
        """Returns nothing: every line was shown."""
        return []

    def finished(self, result: JobResult, code: int, culprit: WorkerExit | None) -> None:
        """The job is over: what one on one host writes, and how each host's launcher has ended."""
        first = [] if culprit is None else [culprit.worker_id]
        said = [self._summaries[host] for host in (*first, *self._summaries) if host in self._summaries]
        blamed = next((one for one in said if one["failed_worker"] is not None), {})
        write_event(
            self._stdout,
            "summary",
            reason=result.reason,
            exit_code=code,
            failed_worker=blamed.get("failed_worker"),
            left_without_shutdown=blamed.get("left_without_shutdown"),
            seconds=round(result.seconds, 3),
            workers=[self._ends[worker] for worker in sorted(self._ends)],
            hosts=[self._launcher(end) for end in result.exits],
        )

    def _launcher(self, end: WorkerExit) -> dict[str, Any]:
        fields = asdict(end) | {"host": self._names[end.worker_id], "seconds": round(end.seconds, 3)}
        del fields["worker_id"]
        return fields


def _event_of(line: bytes) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and isinstance(event.get("event"), str) else None
