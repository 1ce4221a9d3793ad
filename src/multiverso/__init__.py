"""Shared model parameters for training processes."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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
    from multiverso.checkpoints.periodic import Checkpoint, checkpoint
    from multiverso.launch.function import run
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

# Imported when it is first used: the command line, the launcher and the node import this package and no table.
_MODULES = {
    "multiverso.api": (
        "barrier batches incarnation init is_master_worker live_workers load log num_workers save server_id shard "
        "shutdown stats worker_id workers_num"
    ),
    "multiverso.checkpoints": "Checkpoint checkpoint",
    "multiverso.launch.function": "run",
    "multiverso.runtime.session.current": "current",
    "multiverso.runtime.discovery.restarts": "restarts",
    "multiverso.tables": (
        "ArrayTableHandler Counter Eviction KeyedTable MatrixTableHandler ReadOnlyKeyedTable ReadOnlyTable "
        "TableHandler attach_read_only"
    ),
}
_LATER = {name: module for module, names in _MODULES.items() for name in names.split()}
_PARTS = ("errors", "rules", "updaters")
# These come first, whatever is asked for: where two threads import parts of a package (NumPy is one, too) in different
# orders, Python shows one of them a module that is not whole.
_FIRST = ("multiverso.api", "multiverso.tables")

if not TYPE_CHECKING:  # which would take any name for one of ours

    def __getattr__(name):
        if name not in _PARTS and name not in _LATER:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        if name != "errors":  # which stands on nothing
            for module in _FIRST:
                importlib.import_module(module)
        if name in _PARTS:
            return importlib.import_module(f"multiverso.{name}")
        value = globals()[name] = getattr(importlib.import_module(_LATER[name]), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
