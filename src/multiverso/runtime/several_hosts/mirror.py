"""Remote workers in this host's control segment: a line for each, read there and written here.

What a line says is what the worker and its node have written into the worker's block there. So every wait, every
picture and every error of this host looks at remote workers as it looks at its own. Moments travel as the sender's
clock has them, with the sender's time beside them.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from multiverso.hosts.control.messages import Line, WaitOf
from multiverso.layout import words as at
from multiverso.layout.worker_index import WorkerIndex
from multiverso.memory.words import load32, load64, store32, store64
from multiverso.runtime.job.control import Control
from multiverso.shards.shard import Shard


def read_lines(control: Control, worker_ids: Iterable[int], shards: Mapping[int, Shard]) -> list[Line]:
    """Returns the lines of workers of this host; those that have not come have none."""
    lines = []
    for worker_id in worker_ids:
        worker = control.worker(worker_id)
        if worker.liveness == at.FREE:
            continue
        line = msgspec.convert(worker, Line, from_attributes=True)
        line.checkpoint = control.checkpoint(worker_id)
        line.waited_ns = int(control.waited_seconds(worker_id) * 1e9)
        line.progress = {  # after its wait was read, so that it is as new as this
            number: read_progress(shard, worker_id)
            for number, shard in shards.items()
            if shard.consistency.in_rounds or (line.wait and shard.consistency.has_clocks and shard.enrolled(worker_id))
        }
        lines.append(line)
    return lines


def show_progress(line: Line, shards: Mapping[int, Shard]) -> None:
    """Shows what a worker has done by itself; how far others may rely on its clocks is said later (`messages.Clocks`).

    A clock that is not there is not known: the worker has closed the table, or is one in a dead one's place that has
    not opened it yet. What was said of it before is no longer true, and the others will learn that later, too.
    """
    for number, shard in shards.items():
        found = line.progress.get(number)
        if shard.consistency.in_rounds and found is not None:
            write_progress(shard, line.worker_id, found)
        elif shard.consistency.has_clocks and line.wait is not None:  # else these are not looked at
            store64(shard.line(line.worker_id) + at.REACHED, 0 if found is None else found[-1] + 1)


def write_line(control: Control, line: Line, shards: Mapping[int, Shard] | None = None) -> bool:
    """Shows a remote worker as its line says; returns whether it has come, left or died with it.

    Args:
        control: this host's.
        line: what `read_lines` returned there.
        shards: this host's tables, by number.
    """
    worker = line.worker_id
    block, before = control.block(worker), (control.liveness(worker), control.participation(worker))
    shift = time.monotonic_ns() - line.read_ns if line.read_ns else 0
    if line.pid:
        store32(block + at.PID, line.pid)
        store32(block + at.THREADED, line.threaded)
        store64(block + at.CREATED, line.created)
        store64(block + at.BARRIER, line.barrier)
        store64(block + at.WAITED_NS, line.waited_ns)
        store64(block + at.CHECKPOINT, line.checkpoint)
        store32(block + at.INCARNATION, line.incarnation)
        if line.gave_up_ns:
            store64(block + at.GAVE_UP, line.gave_up_ns + shift)
        show_progress(line, shards or {})  # before the wait, which is looked at with it
        _write_wait(block, line, shift, control.index)
    if line.liveness == at.ALIVE:
        store32(block + at.LIVENESS, line.liveness)
    store32(block + at.PARTICIPATION, line.participation)  # last: from here on it counts
    if line.liveness in (at.LOST, at.GONE) and line.liveness != before[0]:
        control.settle(worker, line.liveness)
    return before != (line.liveness, line.participation)


def _write_wait(block: int, line: Line, shift: int, index: WorkerIndex) -> None:
    """As `kernels.waits.publish_wait` does, from plain Python; a wait that continues keeps its number."""
    wait = line.wait or WaitOf(0, 0, 0, 0, -shift)
    since = wait.since_ns + shift
    stage = index.of(wait.stage) if wait.kind == at.FOR_WORD and 0 <= wait.stage <= index.workers else wait.stage
    words = {at.WAIT_TABLE: wait.table, at.WAIT_STAGE: stage, at.WAIT_KIND: wait.kind}
    is_same = load64(block + at.WAIT_TARGET) == wait.target and abs(load64(block + at.WAIT_SINCE) - since) < _SAME_NS
    if is_same and all(load32(block + word) == value for word, value in words.items()):
        return
    sequence = load32(block + at.WAIT_SEQ)
    store32(block + at.WAIT_SEQ, sequence + 1)
    store64(block + at.WAIT_TARGET, wait.target)
    store64(block + at.WAIT_SINCE, since)
    for word, value in words.items():
        store32(block + word, value)
    store32(block + at.WAIT_SEQ, sequence + 2)


def read_progress(shard: Shard, worker: int) -> list[int]:
    """Returns how far a worker of this host is in a table's rounds and clocks, as ``write_progress`` takes it."""
    return [int(shard.enrolled(worker)), *(load64(shard.line(worker) + word) for word in _PROGRESS)]


def write_progress(shard: Shard, worker: int, progress: Sequence[int]) -> None:
    """Shows how far a worker of another host is; whether it takes part at all is said last."""
    enrolled, *words = progress
    for word, value in zip(_PROGRESS, words, strict=True):
        store64(shard.line(worker) + word, value)
    store32(shard.line(worker) + at.ENROLLED, enrolled)


_PROGRESS = (at.STAGED, at.FOLDED, at.FIRST_STEP, at.CLOCK)
_SAME_NS = 200_000_000  # how long a message may have been under way and still mean the same wait
