"""Reads a keyed table's state from its first bytes, which are all that the node maps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from multiverso.layout import keyed as layout
from multiverso.layout.keyed import at
from multiverso.memory.words import load64
from multiverso.spec.table import DTYPES

HEAD_BYTES = layout.LINES + layout.LINE_BYTES * layout.OWNERS


def keyed_status(address: int, indexes: Mapping[int, int], copies: int | None = None) -> dict[str, Any] | None:
    """Returns a keyed table's shape (keys that have a row, numbers in each) and what workers have done with it.

    As `Shard.statistics` has it, where that makes sense. None while the table is being made.

    Args:
        address: of its first `HEAD_BYTES`.
        indexes: of the workers to tell of, by number.
        copies: the same of the copies of rows that live on other hosts, of a table on several.
    """
    if load64(address + at.MAGIC) != layout.MAGIC:
        return None
    columns = load64(address + at.COLUMNS)
    row_bytes = columns * load64(address + at.ITEMSIZE)
    workers = {worker: _statistics(_line(address, index), row_bytes) for worker, index in indexes.items()}
    if copies is not None:
        for worker, found in workers.items():
            on_copies = _statistics(_line(copies, indexes[worker]), row_bytes)
            found |= {name: found[name] + on_copies[name] for name in ("bytes", "wait_seconds", "rows_put_back")}
    return {
        "kind": "keyed",
        "shape": [_keys(address), columns],
        "dtype": DTYPES[load64(address + at.DTYPE)],
        "workers": workers,
        "copies": copies_status(copies) if copies is not None else None,
    }


def copies_status(address: int) -> dict[str, int]:
    """Returns how many copies there are of rows that live on other hosts, how often they were used, and fetched."""
    every = [_line(address, worker) for worker in range(layout.OWNERS)]
    return {
        "copies": _keys(address),
        "copies_used": sum(load64(line + at.ROWS_ADDED) + load64(line + at.ROWS_READ) for line in every),
        "copies_fetched": sum(load64(line + at.KEYS_ADMITTED) for line in every),
    }


def _line(address: int, index: int) -> int:
    return address + layout.LINES + layout.LINE_BYTES * index


def _keys(address: int) -> int:
    return sum(
        load64(line + at.KEYS_ADMITTED) - load64(line + at.KEYS_REMOVED) - load64(line + at.KEYS_EVICTED)
        for line in (_line(address, worker) for worker in range(layout.OWNERS))
    )


def _statistics(line: int, row_bytes: int) -> dict[str, float]:
    return {
        "adds": load64(line + at.ADDS),
        "gets": load64(line + at.GETS),
        "exchanges": 0,
        "bytes": (load64(line + at.ROWS_ADDED) + load64(line + at.ROWS_READ)) * row_bytes,
        "wait_seconds": load64(line + at.WAITED) / 1e9,
        "locks_recovered": load64(line + at.TAKEN_OVER),
        "rows_put_back": load64(line + at.PUT_BACK),
        "staleness_last": 0,
        "staleness_max": 0,
        "staleness_mean": 0.0,
        "staleness_reads": 0,
        "clock": 0,
    }
