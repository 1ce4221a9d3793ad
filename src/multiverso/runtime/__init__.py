"""Nodes and sessions: who is in the job, and waiting for them."""

from __future__ import annotations

from multiverso.layout import MAX_WORKERS
from multiverso.memory.shared import SharedMemory
from multiverso.runtime.joblock import JobLock
from multiverso.runtime.joining import join, observe
from multiverso.runtime.node import Node
from multiverso.runtime.reduce import Reducer, working_dtype
from multiverso.runtime.session import Session

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
