"""A line of progress now and then, from what a job's first node knows of all workers."""

from __future__ import annotations

import time
from typing import Any

from multiverso.saying import say

_EVERY_SECONDS = 10.0
_MOST_VALUES = 4


class Progress:
    """Owner: the thread that waits for the workers."""

    def __init__(self) -> None:
        self._said_at = time.monotonic()
        self._last = ""

    def show(self, status: dict[str, Any]) -> None:
        """Writes a line to standard error if something has changed, every ten seconds at most."""
        now = time.monotonic()
        if now - self._said_at < _EVERY_SECONDS:
            return
        line = line_of(status)
        if line != self._last:
            say(line)
        self._said_at, self._last = now, line


def line_of(status: dict[str, Any]) -> str:
    """Returns a job's progress in a line: who works, who waits, what was done, what workers have logged."""
    workers = status["workers"]
    states = [worker["state"] for worker in workers]
    hosts = {worker["host"] for worker in workers if worker["state"] == "alive"}
    parts = [f"{states.count('alive')} of {status['workers_num'] or len(workers)} workers"]
    if len(hosts) > 1:
        parts[0] += f" on {len(hosts)} hosts"
    for state, words in (("left", "done"), ("lost", "lost")):
        if state in states:
            parts.append(f"{states.count(state)} {words}")
    waiting = [worker["id"] for worker in workers if worker["waiting_seconds"] > 1]
    if waiting:
        parts.append(f"{len(waiting)} waiting")
    pushes = sum(line["adds"] + line["exchanges"] for table in status["tables"] for line in table["workers"].values())
    parts.append(f"{pushes:g} pushes")
    logged = [worker["logged"] for worker in workers if worker["logged"]]
    if logged:
        latest = max(logged, key=lambda note: note["step"])
        values = list(latest["values"].items())[-_MOST_VALUES:]
        parts.append(f"step {latest['step']}: " + " ".join(f"{name} {value:.4g}" for name, value in values))
    return ", ".join(parts)
