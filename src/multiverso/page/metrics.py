"""A snapshot in Prometheus' text format (version 0.0.4). Counters begin anew where a worker's process does."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from multiverso.watching.snapshot import Snapshot

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_WORKER_COUNTERS = {
    "adds": "Adds that a worker has made, in all tables.",
    "gets": "Reads that a worker has made, in all tables.",
    "exchanges": "Exchanges that a worker has made, in all tables.",
    "bytes": "Bytes that a worker's calls have moved in its host's memory.",
    "waited_seconds": "Seconds that a worker has waited for others.",
    "cost_seconds": "Seconds that others have waited for a worker.",
    "cpu_seconds": "Processor time of a worker's process.",
}
_WORKER_GAUGES = {
    "resident_bytes": "Memory of a worker's process.",
    "staleness": "Pushes of others between a worker's reads, on average.",
    "waiting_seconds": "How long a worker has waited in the wait that it is in; 0: it does not wait.",
    "incarnation": "How many processes had a worker's number before.",
    "step": "The step of a worker's last mv.log.",
}
_TABLE_COUNTERS = {
    "adds": "Adds of all workers to a table.",
    "gets": "Reads of all workers of a table.",
    "exchanges": "Exchanges of all workers with a table.",
    "bytes": "Bytes that calls have moved in a table.",
    "wait_seconds": "Seconds that workers have waited in a table's calls.",
}
_COPIES_COUNTERS = {
    "copies_used": "Rows of other hosts that were read or added to.",
    "copies_fetched": "Copies of rows that came from other hosts.",
}
_COPIES_GAUGES = {"copies": "Copies of rows that live on other hosts."}
_PUBLICATION_GAUGES = {
    "version": "The newest version of a publication.",
    "readers": "Processes on a host that read a publication.",
    "memory_bytes": "Memory of a publication on a host.",
    "oldest_version": "What the reader holds that is furthest behind; 0: none holds a version.",
}
_PUBLICATION_COUNTERS = {
    "left_out": "Versions for which readers left no slot.",
    "sent_bytes": "Bytes of a publication that went to other hosts.",
}
_LINK_COUNTERS = {
    "bytes_sent": "Bytes of values, rows and messages sent to a host.",
    "bytes_received": "Bytes of values, rows and messages received from a host.",
    "busy_seconds": "Seconds for which something that was sent to a host was on its way.",
    "connections": "Connections made to a host: the first one, and one after each cut.",
}
_LINK_GAUGES = {
    "round_trip_seconds": "How long a packet takes to a host and back, newest and smoothed.",
    "behind_seconds": "How old a host's adds are before reads here see them, at most.",
}
_STATES = ("alive", "left", "lost")
_Sample = tuple[dict[str, str], float | None]


def metrics_of(now: Snapshot | None) -> str:
    """Returns the metrics of a job at a moment; only that there is none, before the first."""
    return "".join(_families(now))


def _families(now: Snapshot | None) -> Iterator[str]:
    yield _family("up", "gauge", "1 while the job runs.", [({}, now is not None and not now.over)])
    if now is None:
        return
    workers = [({"worker": str(worker.id), "host": worker.host}, worker) for worker in now.workers]
    tables = [({"table": table.name}, table) for table in now.tables]
    links = [({"to": link.host}, link) for link in now.links]
    states = [worker.state for worker in now.workers]
    yield _family("job_up_seconds", "gauge", "Age of the job's node.", [({}, now.up_seconds)])
    yield _family("job_restarts_total", "counter", "Restarts of the job.", [({}, now.restarts)])
    yield _family("checkpoint", "gauge", "The newest checkpoint that all have written.", [({}, now.checkpoint)])
    yield _family("memory_bytes", "gauge", "Memory of the job's tables on this host.", [({}, now.memory_bytes)])
    yield _family("workers", "gauge", "Workers by state.", [({"state": one}, states.count(one)) for one in _STATES])
    rows: list[_Sample] = [(labels, one.shape[0]) for labels, one in tables if one.kind == "keyed"]
    yield _family("table_rows", "gauge", "Keys that have a row in a keyed table.", rows)
    connected: list[_Sample] = [(labels, one.state == "connected") for labels, one in links]
    yield _family("link_connected", "gauge", "1 while the connection to a host is there.", connected)
    spread = [(labels, one) for labels, one in tables if one.copies_used]
    published = [({"publication": one.name, "host": one.host or ""}, one) for one in now.publications]
    everything: tuple[tuple[str, Sequence[tuple[dict[str, str], Any]], dict[str, str], dict[str, str]], ...] = (
        ("worker", workers, _WORKER_COUNTERS, _WORKER_GAUGES),
        ("table", tables, _TABLE_COUNTERS, {}),
        ("table", spread, _COPIES_COUNTERS, _COPIES_GAUGES),
        ("publication", published, _PUBLICATION_COUNTERS, _PUBLICATION_GAUGES),
        ("link", links, _LINK_COUNTERS, _LINK_GAUGES),
    )
    for what, labelled, counters, gauges in everything:
        for names, kind, end in ((counters, "counter", "_total"), (gauges, "gauge", "")):
            for name, text in names.items():
                yield _family(
                    f"{what}_{name}{end}", kind, text, [(labels, getattr(one, name)) for labels, one in labelled]
                )
    logged: list[_Sample] = [
        ({**labels, "name": name}, value) for labels, one in workers for name, value in one.values.items()
    ]
    yield _family("worker_logged", "gauge", "The last value that a worker gave to mv.log.", logged)


def _family(name: str, kind: str, text: str, samples: Iterable[_Sample]) -> str:
    lines = [f"multiverso_{name}{_labels(labels)} {float(value)!r}\n" for labels, value in samples if value is not None]
    head = f"# HELP multiverso_{name} {text}\n# TYPE multiverso_{name} {kind}\n"
    return head + "".join(lines) if lines else ""


def _labels(labels: dict[str, str]) -> str:
    pairs = [f'{name}="{_escaped(value)}"' for name, value in labels.items() if value]
    return f"{{{','.join(pairs)}}}" if pairs else ""


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
