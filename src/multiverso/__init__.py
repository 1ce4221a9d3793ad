"""Shared model parameters for training processes."""

from __future__ import annotations

from multiverso import errors, rules, updaters
from multiverso.api import (
    barrier,
    batches,
    init,
    is_master_worker,
    live_workers,
    load,
    log,
    num_workers,
    save,
    server_id,
    shard,
    shutdown,
    stats,
    worker_id,
    workers_num,
)
from multiverso.checkpoints.beside import Checkpoint, checkpoint
from multiverso.launch import run
from multiverso.runtime.current import current
from multiverso.runtime.restarts import restarts
from multiverso.tables import (
    ArrayTableHandler,
    Counter,
    Eviction,
    KeyedTable,
    MatrixTableHandler,
    ReadOnlyKeyedTable,
    ReadOnlyTable,
    TableHandler,
    attach_read_only,
)

__version__ = "1.0.0.dev0"

__all__ = [
    "ArrayTableHandler",
    "Checkpoint",
    "Counter",
    "Eviction",
    "KeyedTable",
    "MatrixTableHandler",
    "ReadOnlyKeyedTable",
    "ReadOnlyTable",
    "TableHandler",
    "attach_read_only",
    "barrier",
    "batches",
    "checkpoint",
    "current",
    "errors",
    "init",
    "is_master_worker",
    "live_workers",
    "load",
    "log",
    "num_workers",
    "restarts",
    "rules",
    "run",
    "save",
    "server_id",
    "shard",
    "shutdown",
    "stats",
    "updaters",
    "worker_id",
    "workers_num",
]
