"""What a node tells about its job, as JSON can carry it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from multiverso import layout as at

if TYPE_CHECKING:
    from multiverso.runtime.catalogue import Catalogue
    from multiverso.runtime.control import Control

_FATES = {at.ALIVE: "alive", at.LOST: "lost", at.GONE: "left"}


def status_of(
    address: str,
    workers_num: int | None,
    control: Control,
    catalogue: Catalogue,
    memory_bytes: int,
    began: float,
) -> dict[str, Any]:
    """Returns the job's workers, their waits and the tables with each worker's statistics."""
    picture = catalogue.picture()
    now = time.monotonic_ns()
    workers = []
    for worker in picture.workers.values():
        wait = worker.wait
        workers.append(
            {
                "id": worker.worker_id,
                "pid": worker.pid,
                "state": "left" if worker.state == at.LEFT else _FATES.get(worker.fate, "free"),
                "waiting_for": picture.name_of(wait) if wait else None,
                "waiting_seconds": (now - wait.since_ns) / 1e9 if wait else 0.0,
                "needs": picture.missing(wait) if wait else [],
                "waited_seconds": control.waited_seconds(worker.worker_id),
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
            "workers": {i: shard.statistics(i) for i in sorted(shard.membership().members)},
        }
        for table_id, shard in catalogue.shards.items()
    ]
    return {
        "address": address,
        "workers_num": workers_num,
        "up_seconds": time.monotonic() - began,
        "memory_bytes": memory_bytes,
        "workers": workers,
        "tables": tables,
    }
