"""Shared model parameters for training processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from multiverso import errors
from multiverso.lazy_names import lazy_names

if TYPE_CHECKING:
    from multiverso import rules, updaters
    from multiverso.api import (
        all_reduce,
        barrier,
        batches,
        incarnation,
        init,
        is_master_worker,
        live_workers,
        load,
        log,
        num_workers,
        rank,
        save,
        server_id,
        shard,
        shutdown,
        size,
        stats,
        worker_id,
        workers_num,
    )
    from multiverso.checkpoints.periodic import Checkpoint, checkpoint
    from multiverso.launch.function import run
    from multiverso.publications import Publication, Snapshot, Subscription, subscribe
    from multiverso.runtime.discovery.restarts import restarts
    from multiverso.runtime.session.current import current
    from multiverso.tables import (
        ArrayTableHandler,
        Counter,
        Eviction,
        KeyedTable,
        MatrixTableHandler,
        ReadOnlyKeyedTable,
        TableHandler,
        attach_read_only,
        keys,
    )

__version__ = "1.0.0.dev0"

# The job, its workers and what they do together; tables; what others read of them; what lasts; modules.
__all__ = ["current", "incarnation", "init", "restarts", "run", "shutdown"]
__all__ += ["is_master_worker", "live_workers", "num_workers", "rank", "server_id", "size", "worker_id", "workers_num"]
__all__ += ["all_reduce", "barrier", "batches", "log", "shard", "stats"]
__all__ += ["ArrayTableHandler", "Counter", "Eviction", "KeyedTable", "MatrixTableHandler", "TableHandler", "keys"]
__all__ += ["Publication", "ReadOnlyKeyedTable", "Snapshot", "Subscription"]
__all__ += ["attach_read_only", "subscribe"]
__all__ += ["Checkpoint", "checkpoint", "load", "save"]
__all__ += ["errors", "rules", "updaters"]

if not TYPE_CHECKING:
    # The command line, the launcher and the node import this package and no table.
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "multiverso.api": (
                "all_reduce barrier batches incarnation init is_master_worker live_workers load log num_workers rank "
                "save server_id shard shutdown size stats worker_id workers_num"
            ),
            "multiverso.checkpoints": "Checkpoint checkpoint",
            "multiverso.launch.function": "run",
            "multiverso.publications": "Publication Snapshot Subscription subscribe",
            "multiverso.runtime.session.current": "current",
            "multiverso.runtime.discovery.restarts": "restarts",
            "multiverso.tables": (
                "ArrayTableHandler Counter Eviction KeyedTable MatrixTableHandler ReadOnlyKeyedTable TableHandler "
                "attach_read_only keys"
            ),
        },
        parts=("rules", "updaters"),
        first=("multiverso.api", "multiverso.tables"),
    )
