"""Nodes and sessions: who is in the job, and waiting for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from multiverso.layout.words import MAX_WORKERS
from multiverso.lazy_names import lazy_names
from multiverso.memory.segment import SharedMemory
from multiverso.runtime.collective.job_lock import JobLock
from multiverso.runtime.joining import join
from multiverso.runtime.session.observing import observe, publications_of
from multiverso.runtime.session.session import Session

if TYPE_CHECKING:
    from multiverso.runtime.collective.reducer import Reducer, all_reduce, working_dtype
    from multiverso.runtime.node.node import Node

__all__ = [
    "MAX_WORKERS",
    "JobLock",
    "Node",
    "Reducer",
    "Session",
    "SharedMemory",
    "all_reduce",
    "join",
    "observe",
    "publications_of",
    "working_dtype",
]

if not TYPE_CHECKING:
    # A worker whose node is elsewhere needs nothing of one, nor of several hosts.
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "multiverso.runtime.collective.reducer": "Reducer all_reduce working_dtype",
            "multiverso.runtime.node.node": "Node",
        },
    )
