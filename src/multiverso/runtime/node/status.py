"""A node's status of its job, as JSON can carry it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from multiverso.layout import words as at
from multiverso.runtime.job.logged import MEMORY, read
from multiverso.runtime.node.hosts import Hosts
from multiverso.runtime.node.membership import Membership

_LIVENESS = {at.ALIVE: "alive", at.LOST: "lost", at.GONE: "left"}


def status_of(address: str, began: float, members: Membership, hosts: Hosts) -> dict[str, Any]:
    """Returns the job's workers, their waits, the tables with each worker's statistics, and the ways to other hosts.

    Args:
        address: of the node.
        began: when it did (``time.monotonic()``).
        members: who is in the job.
        hosts: those of the job.
    """
    control, catalogue = members.control, members.catalogue
    remote = hosts.remote_statistics()
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
                "program": _program(worker.pid) if worker.host == control.here else "",
                "state": "left" if worker.participation == at.LEFT else _LIVENESS.get(worker.liveness, "free"),
                "waiting_for": graph.name_of(wait) if wait else None,
                "waiting_seconds": (now - wait.since_ns) / 1e9 if wait else 0.0,
                "needs": graph.missing(wait) if wait else [],
                "waited_seconds": control.waited_seconds(worker.worker_id),
                "logged": None if logged is None else read(logged, worker.worker_id),
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
    ]
    return {
        "address": address,
        "host": control.here or None,
        "workers_num": members.workers_num,
        "up_seconds": time.monotonic() - began,
        "memory_bytes": members.memory_bytes,
        "workers": workers,
        "tables": tables,
        "links": hosts.links(),
    }


def _program(pid: int) -> str:
    """The script that a process runs, as a person would name it; empty when the process is gone."""
    try:
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "replace").split("\0")[:-1]
    except OSError:
        return ""
    if not arguments:
        return ""
    program, *rest = arguments
    if "python" not in Path(program).name:
        return Path(program).name
    while rest and rest[0].startswith("-") and rest[0] not in ("-m", "-c"):
        rest = rest[2:] if rest[0] in ("-W", "-X") else rest[1:]
    if not rest:
        return Path(program).name
    if rest[0] == "-c":
        return "python -c"
    if rest[0] == "-m" and len(rest) > 1:
        return rest[1]
    return "a function" if rest[0].endswith("/multiverso/launch/_call.py") else Path(rest[0]).name
