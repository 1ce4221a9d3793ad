"""Reads who waits for whom from shared memory: the control segment, the tables, and what waits point to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from multiverso import layout as at
from multiverso.consistency.waiting import Picture, Wait, WorkerState
from multiverso.memory.mutex import owner_pid
from multiverso.memory.words import load64

if TYPE_CHECKING:
    from multiverso.runtime.control import Control
    from multiverso.shards.shard import Shard


def read_picture(control: Control, shards: Mapping[int, Shard], memories: Mapping[int, range]) -> Picture:
    """Returns who is there, how far each is, and what each waits for.

    Args:
        control: the job's control segment.
        shards: the tables that this process has mapped, by number.
        memories: the addresses of the shared memories that it has mapped, by number (below 0).
    """
    shards = dict(shards)
    mapped = {**memories, **{number: shard.addresses for number, shard in shards.items()}}
    workers = {worker.worker_id: _resolved(worker, mapped) for worker in control.workers()}
    return Picture(workers, {number: shard.membership() for number, shard in shards.items()})


def _resolved(worker: WorkerState, mapped: Mapping[int, range]) -> WorkerState:
    """Adds what a wait points to: who holds the lock, how far the others are."""
    wait = worker.wait
    memory = mapped.get(wait.table) if wait is not None else None
    if wait is None or memory is None:
        return worker
    return replace(worker, wait=_look_at(wait, memory))


def _look_at(wait: Wait, memory: range) -> Wait:
    if wait.kind == at.FOR_LOCK and 0 <= wait.target < len(memory):
        return replace(wait, holder=owner_pid(memory.start + wait.target) or 0)
    if wait.kind == at.FOR_REDUCTION and 0 < wait.stage * at.REDUCTION_STRIDE <= len(memory):
        lines = (memory.start + at.REDUCTION_STRIDE * worker for worker in range(wait.stage))
        return replace(wait, phases=tuple(load64(line + at.PHASE) for line in lines))
    return wait
