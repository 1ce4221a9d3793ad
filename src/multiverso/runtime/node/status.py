"""A node's status of its job, as JSON can carry it."""

from __future__ import annotations

import time
from typing import Any

from multiverso.layout import words as at
from multiverso.runtime.job.logged import MEMORY
from multiverso.runtime.job.processes import note_of
from multiverso.runtime.node.hosts import Hosts
from multiverso.runtime.node.membership import Membership

_LIVENESS = {at.ALIVE: "alive", at.LOST: "lost"}
_UNKNOWN = {"program": "", "cpu_seconds": 0.0, "resident_bytes": 0, "logged": None}


def status_of(address: str, began: float, members: Membership, hosts: Hosts) -> dict[str, Any]:
    """Returns the job's workers, their waits, the tables with each worker's statistics, and the ways to other hosts.

    Args:
        address: of the node.
        began: when it did (``time.monotonic()``).
        members: who is in the job.
        hosts: those of the job.
    """
    control, catalogue = members.control, members.catalogue
    remote, notes = hosts.remote_statistics(), hosts.remote_notes()
    graph = catalogue.wait_graph()
    now = time.monotonic_ns()
    logged = catalogue.memory(MEMORY)
    workers = []
    for worker in graph.workers.values():
        wait = worker.wait
        workers.append(
            {
                "id": worker.worker_id,
                "pid": worker.pid,
                "host": worker.host or None,
                "state": "left" if worker.has_left else _LIVENESS.get(worker.liveness, "free"),
                "waiting_for": graph.name_of(wait) if wait else None,
                "waiting_seconds": (now - wait.since_ns) / 1e9 if wait else 0.0,
                "needs": graph.missing(wait) if wait else [],
                "waited_seconds": control.waited_seconds(worker.worker_id),
                "incarnation": worker.incarnation,
                "checkpoint": control.checkpoint(worker.worker_id),
                **(note_of(worker, logged) if worker.host == control.here else notes.get(worker.worker_id, _UNKNOWN)),
            }
        )
    tables = [
        {
            "id": table_id,
            "name": shard.spec.name,
            "kind": shard.spec.kind,
            "shape": list(shard.spec.shape),
            "dtype": shard.spec.dtype,
            "updater": shard.spec.updater,
            "rounds": shard.committed,
            "workers": {i: shard.statistics(i) for i in sorted(graph.workers) if i < shard.workers}
            | dict(remote.get(table_id, {})),
        }
        for table_id, shard in catalogue.shards.items()
        if shard.spec.part_of is None
    ]
    for called, table in catalogue.keyed_tables(sorted(graph.workers)).items():
        there = {worker: dict(counts) for worker, counts in remote.get(called, {}).items()}
        rows, columns = table["shape"]
        shape = [rows + sum(int(counts.pop("rows", 0)) for counts in there.values()), columns]
        tables.append(table | {"shape": shape, "workers": table["workers"] | there})
    return {
        "address": address,
        "host": control.here or None,
        "job": hosts.job,
        "leads": hosts.leads,
        "workers_num": members.workers_num,
        "up_seconds": time.monotonic() - began,
        "memory_bytes": members.memory_bytes,
        "lost": control.lost(),
        "workers": workers,
        "tables": tables,
        "links": hosts.links(),
        "publications": hosts.remote_publications(),
    }
