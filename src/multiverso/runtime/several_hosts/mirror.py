"""Remote workers in this host's control segment: a line of integers for each, read there and written here.

What a line says is what the worker and its node have written into the worker's block there. So every wait, every
picture and every error of this host looks at remote workers as it looks at its own. Moments travel as the sender's
clock has them, with the sender's time beside them.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from multiverso.layout import words as at
from multiverso.memory.words import load32, load64, store32, store64
from multiverso.runtime.job.control import Control
from multiverso.shards.shard import Shard

# the first columns are those of `hosts.control.known_hosts`: number, pid, liveness, state, barrier, created
_ID, _PID, _FATE, _STATE, _BARRIER, _CREATED = range(6)
_THREADED, _GAVE_UP, _WAITED, _KIND, _TABLE, _STAGE, _TARGET, _SINCE, _CHECKPOINT, _AGAIN = range(6, 16)
_COLUMNS = 16
# of one that waits there follow the tables with clocks, each as its number and the worker's clock

Line = list[int]


def read_lines(control: Control, worker_ids: Iterable[int], shards: Mapping[int, Shard]) -> list[Line]:
    """Returns the lines of workers of this host; those that have not come have none."""
    with_clocks = {number: shard for number, shard in shards.items() if shard.consistency.has_clocks}
    lines = []
    for worker_id in worker_ids:
        worker = control.worker(worker_id)
        if worker.liveness == at.FREE:
            continue
        wait = worker.wait
        waits = [wait.kind, wait.table, wait.stage, wait.target, wait.since_ns] if wait else [0, 0, 0, 0, 0]
        known = [worker_id, worker.pid, worker.liveness, worker.participation, worker.barrier, worker.created]
        waited = int(control.waited_seconds(worker_id) * 1e9)
        known += [int(worker.threaded), worker.gave_up_ns, waited, *waits, control.checkpoint(worker_id)]
        lines.append([*known, worker.incarnation])
        if wait:  # after the wait was read, so that they are as new as this
            lines[-1] += _clocks(worker_id, with_clocks)
    return lines


def _clocks(worker_id: int, shards: Mapping[int, Shard]) -> list[int]:
    found: list[int] = []
    for number, shard in shards.items():
        if shard.enrolled(worker_id):
            found += (number, load64(shard.line(worker_id) + at.CLOCK))
    return found


def _show_clocks(line: Line, shards: Mapping[int, Shard]) -> None:
    """Shows what a worker has done by itself; what others may continue with is shown by `write_progress`, later.

    A clock that is not there is not known: the worker has closed the table, or is one in a dead one's place that has
    not opened it yet. What was said of it before is no longer true, and the others will hear that later, too.
    """
    if not line[_KIND]:
        return  # it does not wait: nobody looks at these
    clocks = dict(zip(line[_COLUMNS::2], line[_COLUMNS + 1 :: 2], strict=False))
    for number, shard in shards.items():
        if shard.consistency.has_clocks:
            store64(shard.line(line[_ID]) + at.REACHED, clocks.get(number, -1) + 1)


def write_line(control: Control, line: Line, sent_ns: int | None, shards: Mapping[int, Shard] | None = None) -> bool:
    """Shows a remote worker as its line says; returns whether it has come, left or died with it.

    Args:
        control: this host's.
        line: what `read_lines` returned there, or its first columns for a worker whose host is lost.
        sent_ns: the sender's clock when it did; None: now.
        shards: this host's tables, by number.
    """
    block = control.block(line[_ID])
    liveness, before = line[_FATE], (control.liveness(line[_ID]), control.participation(line[_ID]))
    shift = 0 if sent_ns is None else time.monotonic_ns() - sent_ns
    if len(line) >= _COLUMNS:
        store32(block + at.PID, line[_PID])
        store32(block + at.THREADED, line[_THREADED])
        store64(block + at.CREATED, line[_CREATED])
        store64(block + at.BARRIER, line[_BARRIER])
        store64(block + at.WAITED_NS, line[_WAITED])
        store64(block + at.CHECKPOINT, line[_CHECKPOINT])
        store32(block + at.INCARNATION, line[_AGAIN])
        if line[_GAVE_UP]:
            store64(block + at.GAVE_UP, line[_GAVE_UP] + shift)
        _show_clocks(line, shards or {})  # before the wait, which is looked at with them
        _write_wait(block, line, shift)
    if liveness == at.ALIVE:
        store32(block + at.LIVENESS, liveness)
    store32(block + at.PARTICIPATION, line[_STATE])  # last: from here on it counts
    if liveness in (at.LOST, at.GONE) and liveness != before[0]:
        control.settle(line[_ID], liveness)
    return before != (liveness, line[_STATE])


def _write_wait(block: int, line: Line, shift: int) -> None:
    """As `kernels.waits.publish_wait` does, from plain Python; a wait that continues keeps its number."""
    since = line[_SINCE] + shift if line[_KIND] else 0
    same = (
        load32(block + at.WAIT_KIND) == line[_KIND]
        and load64(block + at.WAIT_TARGET) == line[_TARGET]
        and load32(block + at.WAIT_TABLE) == line[_TABLE]
        and load32(block + at.WAIT_STAGE) == line[_STAGE]
        and abs(load64(block + at.WAIT_SINCE) - since) < _SAME_NS
    )
    if same:
        return
    sequence = load32(block + at.WAIT_SEQ)
    store32(block + at.WAIT_SEQ, sequence + 1)
    store32(block + at.WAIT_TABLE, line[_TABLE])
    store32(block + at.WAIT_STAGE, line[_STAGE])
    store64(block + at.WAIT_TARGET, line[_TARGET])
    store64(block + at.WAIT_SINCE, since)
    store32(block + at.WAIT_KIND, line[_KIND])
    store32(block + at.WAIT_SEQ, sequence + 2)


def read_progress(shard: Shard, worker_ids: Iterable[int]) -> dict[int, Line]:
    """Returns how far workers of this host are in a table's rounds and clocks, as ``write_progress`` takes it."""
    lines = {worker: shard.line(worker) for worker in worker_ids}
    return {
        worker: [int(shard.enrolled(worker)), *(load64(line + word) for word in _PROGRESS)]
        for worker, line in lines.items()
    }


def write_progress(shard: Shard, lines: dict[int, Line]) -> None:
    """Shows how far workers of another host are; whether one takes part at all is said last."""
    for worker, (enrolled, *words) in lines.items():
        for word, value in zip(_PROGRESS, words, strict=True):
            store64(shard.line(worker) + word, value)
        store32(shard.line(worker) + at.ENROLLED, enrolled)


_PROGRESS = (at.STAGED, at.FOLDED, at.FIRST_STEP, at.CLOCK)
_SAME_NS = 200_000_000  # how long a message may have been under way and still tell of the same wait
