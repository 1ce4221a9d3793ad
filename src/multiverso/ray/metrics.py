"""A node's metrics for Ray: they stand on its dashboard, and where Prometheus collects them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

from ray.util.metrics import Gauge

_EVERY_SECONDS = 5.0
_TOTALS = {
    "adds": "Adds and pushes that a worker has made to a table.",
    "gets": "Reads that a worker has made of a table.",
    "exchanges": "Exchanges that a worker has made with a table.",
    "bytes": "Bytes that a worker's calls have moved in its host's memory.",
    "wait_seconds": "Seconds that a worker has waited in a table's calls.",
    "staleness_max": "The most pushes of others that a worker's value has missed.",
}


class Publisher:
    """A thread that publishes a node's status every few seconds. Owner: the node's actor; ``close`` ends it.

    Args:
        host: the host's name, a tag of each figure.
        status: returns the node's status; from any thread.
    """

    def __init__(self, host: str, status: Callable[[], dict[str, Any]]) -> None:
        self._host, self._status = host, status
        tags = ("host", "table", "worker")
        self._gauges = {
            name: Gauge(f"multiverso_{name}", description=text, tag_keys=tags) for name, text in _TOTALS.items()
        }
        self._workers = Gauge(
            "multiverso_workers", description="A job's workers on a host, by state.", tag_keys=("host", "state")
        )
        self._memory = Gauge("multiverso_memory_bytes", description="Memory of a host's tables.", tag_keys=("host",))
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="multiverso-ray-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Publishes once more, and ends."""
        self._closing.set()
        self._thread.join(_EVERY_SECONDS)

    def _run(self) -> None:
        while not self._closing.wait(_EVERY_SECONDS):
            with contextlib.suppress(Exception):  # a figure that is missing must not end a job
                self.publish(self._status())
        with contextlib.suppress(Exception):
            self.publish(self._status())

    def publish(self, status: dict[str, Any]) -> None:
        """Publishes the figures of this host's workers."""
        here = {worker["id"] for worker in status["workers"] if worker["host"] == status["host"]}
        states = [worker["state"] for worker in status["workers"] if worker["id"] in here]
        for state in ("alive", "left", "lost"):
            self._workers.set(states.count(state), {"host": self._host, "state": state})
        self._memory.set(status["memory_bytes"], {"host": self._host})
        for table in status["tables"]:
            for worker_id, line in table["workers"].items():
                if worker_id in here:
                    tags = {"host": self._host, "table": str(table["name"] or table["id"]), "worker": str(worker_id)}
                    for name, gauge in self._gauges.items():
                        gauge.set(line[name], tags)
