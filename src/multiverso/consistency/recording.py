"""Which rounds each read of a worker was in: written when it leaves a table, and what another run needs to do the same.

A folder holds a file for each worker and table. In it each read is a pair: the round that has what was added before
it, and the one whose values it returned, which is later where the worker was stopped between the two. A worker that
left after an add has one more, with no round that it read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from multiverso.errors import SnapshotError
from multiverso.files.opening import read_plain, write_whole, writing_a_save
from multiverso.files.parsing import Count, Number, parse

Reads = list[tuple[Number, Count]]
_LONGEST = 1 << 28
_MOST_WORKERS = 64  # of a round in a plan, a bit each


class _Recorded(msgspec.Struct):
    workers: Number
    table: str
    reads: Reads


@dataclass(frozen=True)
class Plan:
    """What a replay does.

    Attributes:
        rounds: (n, 2) int64, C-contiguous: the members of each round, and who reads its values, a bit each.
        reads: this worker's reads, as they were recorded.
    """

    rounds: npt.NDArray[np.int64]
    reads: Reads


def begin(folder: Path, table: int, worker: int, workers: int) -> Path:
    """Returns where a worker's record of a table will be; until then there is none, also not of a run before.

    Raises:
        SnapshotError: there is no such folder, and none can be made; or nobody could follow the record.
    """
    if workers > _MOST_WORKERS:
        raise SnapshotError(f"runs of up to {_MOST_WORKERS} workers can be recorded, and this job has {workers}")
    path = _file_of(folder, table, worker)
    with writing_a_save(folder):
        folder.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
    return path


def _file_of(folder: Path, table: int, worker: int) -> Path:
    return folder / f"table-{table}.worker-{worker}.json"


def write(path: Path, workers: int, table: str, reads: Sequence[tuple[int, int]]) -> None:
    """Writes a worker's record of a table, whole or not at all."""
    write_whole(path, msgspec.json.encode(_Recorded(workers, table, list(reads))))


def read_plan(folder: Path, table: int, name: str, workers: int, me: int) -> Plan:
    """Returns what all workers have recorded of a table.

    Raises:
        SnapshotError: a worker's record is missing (it was killed), or they are not those of this table in a job of so
            many workers.
    """
    everyone = [_read(_file_of(folder, table, worker), name, workers) for worker in range(workers)]
    last = max((max(pair) for reads in everyone for pair in reads), default=0)
    rounds = np.zeros((last + 1, 2), np.int64)
    for worker, reads in enumerate(everyone):
        before = 0
        for joined, got in reads:
            if joined <= before or 0 < got < joined:
                raise SnapshotError(f"{_file_of(folder, table, worker)}: round {joined} does not follow round {before}")
            bit = np.int64(np.uint64(1 << worker))
            rounds[joined, 0] |= bit
            if got:
                rounds[got, 1] |= bit
            before = got or last
    return Plan(rounds, everyone[me])


def _read(path: Path, name: str, workers: int) -> Reads:
    try:
        recorded = parse(read_plain(path, _LONGEST), _Recorded, path, "the record of a worker's rounds")
    except FileNotFoundError:
        raise SnapshotError(
            f"there is no {path}: a run can be replayed when all of its workers have left by shutdown(), and this one "
            "was killed, or the record is of another run"
        ) from None
    if (recorded.workers, recorded.table) != (workers, name):
        raise SnapshotError(
            f"{path} is of {recorded.table} in a job of {recorded.workers} workers, and this is {name} in one of "
            f"{workers}: replay the same program with as many workers"
        )
    return recorded.reads
