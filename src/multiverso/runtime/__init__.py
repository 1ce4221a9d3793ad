"""Nodes and sessions: the only place with threads, timers and processes."""

from __future__ import annotations

from multiverso.memory.shared import SharedMemory
from multiverso.runtime.joining import join, observe
from multiverso.runtime.node import Node
from multiverso.runtime.session import Session

__all__ = ["Node", "Session", "SharedMemory", "join", "observe"]
