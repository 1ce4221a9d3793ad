"""Nodes and sessions: who is in the job, and waiting for them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from multiverso.layout import MAX_WORKERS
from multiverso.memory.shared import SharedMemory
from multiverso.runtime.collective.job_lock import JobLock
from multiverso.runtime.joining import join, observe
from multiverso.runtime.session.session import Session

if TYPE_CHECKING:
    from multiverso.runtime.collective.reducer import Reducer, working_dtype
    from multiverso.runtime.node.node import Node

__all__ = [
    "MAX_WORKERS",
    "JobLock",
    "Node",
    "Reducer",
    "Session",
    "SharedMemory",
    "join",
    "observe",
    "working_dtype",
]

# Imported when it is first used: a worker whose node is elsewhere needs nothing of one, nor of several hosts.
_LATER = {
    "Node": "multiverso.runtime.node.node",
    "Reducer": "multiverso.runtime.collective.reducer",
    "working_dtype": "multiverso.runtime.collective.reducer",
}


if not TYPE_CHECKING:  # which would take any name for one of ours

    def __getattr__(name):
        if name not in _LATER:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(importlib.import_module(_LATER[name]), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
