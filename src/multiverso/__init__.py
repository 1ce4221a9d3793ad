"""Shared model parameters for training processes."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from multiverso import errors, rules, updaters
from multiverso.api import (
    barrier,
    batches,
    incarnation,
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
from multiverso.runtime.discovery.restarts import restarts
from multiverso.runtime.session.current import current
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

if TYPE_CHECKING:
    from multiverso.checkpoints.checkpoint import Checkpoint, checkpoint
    from multiverso.launch.function import run

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
    "incarnation",
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

# Imported when it is first used: most workers start no others, and each pays for what it imports.
_LATER = {
    "Checkpoint": "multiverso.checkpoints.checkpoint",
    "checkpoint": "multiverso.checkpoints.checkpoint",
    "run": "multiverso.launch.function",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_LATER[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
