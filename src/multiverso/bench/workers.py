"""What each worker of a benchmark does. These functions run in the workers, through ``multiverso.run``.

Times are medians of calls that alternate, which forgives a busy machine.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

import multiverso as mv
from multiverso.bench import limits

_SHORT_SECONDS = 20e-6


def alternate(calls: Mapping[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """Times calls against each other, one after another, repeatedly.

    A disturbance then hits all of them alike. Calls shorter than a few microseconds are timed in batches, or
    the clock would be part of the figure.

    Args:
        calls: what to time, by name.
        seconds: how long to measure, about; at least 7 times each.

    Returns:
        The median of each, in microseconds a call.
    """
    batches = {}
    for name, call in calls.items():
        call()
        began = time.perf_counter()
        call()
        once = time.perf_counter() - began
        batches[name] = max(1, int(_SHORT_SECONDS * 10 / max(once, 1e-7))) if once < _SHORT_SECONDS else 1
    samples: dict[str, list[float]] = {name: [] for name in calls}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(next(iter(samples.values()))) < 7:
        for name, call in calls.items():
            batch = range(batches[name])
            began = time.perf_counter()
            for _ in batch:
                call()
            samples[name].append((time.perf_counter() - began) / len(batch))
    return {name: statistics.median(times) * 1e6 for name, times in samples.items()}


def per_call(call: Callable[[], object], times: int) -> float:
    """Returns microseconds a call over a fixed number of calls (all workers have to make equally many)."""
    began = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - began) / times * 1e6


_ROWS, _COLUMNS = 100_000, 64


def against_the_limit(sizes: list[int], seconds: float) -> list[dict[str, Any]]:
    """One worker: each operation beside the same loop on private memory, in one run."""
    fused = limits.exchange.compiled("float32")
    mv.init()
    rows = [row for size in sizes for row in _one_size(size, seconds, fused)]
    mv.shutdown()
    return rows


def _one_size(size: int, seconds: float, fused: Callable[..., Any]) -> list[dict[str, Any]]:
    random = np.random.default_rng(0)
    table = mv.ArrayTableHandler(size)
    delta, out, copy, local, last = (random.standard_normal(size, dtype="f4") for _ in range(5))
    private, a, b, c = (random.standard_normal(size, dtype="f4") for _ in range(4))
    times = alternate(
        {
            "np.add": lambda: np.add(private, delta, out=private),
            "add": lambda: table.add(delta),
            "np.copyto": lambda: np.copyto(copy, private),
            "get": lambda: table.get(out=out),
            "private exchange": lambda: fused(a, b, c),
            "exchange": lambda: table.exchange(local, last),
        },
        seconds,
    )
    limits = {"add": "np.add", "get": "np.copyto", "exchange": "private exchange"}
    return [_beside(times, name, limit, {"elements": size}) for name, limit in limits.items()]


def _beside(times: dict[str, float], name: str, limit: str, what: dict[str, int]) -> dict[str, Any]:
    return {
        "operation": name,
        **what,
        "microseconds": times[name],
        "limit": limit,
        "limit_microseconds": times[limit],
        "ratio": times[name] / times[limit],
    }


def rows_against_the_limit(batches: list[int], seconds: float) -> list[dict[str, Any]]:
    """One worker: random distinct rows of a matrix, beside NumPy's take and a private scatter-add."""
    scatter = limits.scatter_add.compiled("float32")
    mv.init()
    random = np.random.default_rng(0)
    table = mv.MatrixTableHandler(_ROWS, _COLUMNS)
    private = np.zeros((_ROWS, _COLUMNS), "f4")

    def one_batch(batch: int) -> list[dict[str, Any]]:
        ids = random.choice(_ROWS, batch, replace=False)
        delta = random.standard_normal((batch, _COLUMNS), dtype="f4")
        out, taken = np.empty_like(delta), np.empty_like(delta)
        times = alternate(
            {
                "np.take": lambda: np.take(private, ids, axis=0, out=taken, mode="clip"),
                "get rows": lambda: table.get(ids, out=out),
                "private scatter-add": lambda: scatter(private.reshape(-1), _COLUMNS, ids, delta.reshape(-1)),
                "add rows": lambda: table.add(delta, ids),
            },
            seconds,
        )
        limits = {"get rows": "np.take", "add rows": "private scatter-add"}
        return [_beside(times, name, limit, {"rows": batch}) for name, limit in limits.items()]

    rows = [row for batch in batches for row in one_batch(batch)]
    mv.shutdown()
    return rows


def together(sizes: list[int], elements_a_size: int) -> list[dict[str, Any]]:
    """Several workers at once: microseconds a call in this worker, beside the same in memory of its own, and a barrier.

    They share the machine's memory and caches in both cases, so the ratio says what the sharing of a table costs.
    """
    fused = limits.exchange.compiled("float32")

    def calls(table: Any, delta: Any, out: Any, local: Any, last: Any) -> dict[str, Callable[[], object]]:
        private = delta.copy()
        return {
            "private add": partial(np.add, private, delta, out=private),
            "add": partial(table.add, delta),
            "private get": partial(np.copyto, out, private),
            "get": partial(table.get, out=out),
            "private exchange": partial(fused, private, local, last),
            "exchange": partial(table.exchange, local, last),
            "private add, get": partial(_add_and_get_privately, private, delta, out),
            "add, get": partial(_add_and_get, table, delta, out),
        }

    mv.init()
    mv.barrier()
    barrier = {"operation": "barrier", "elements": 0, "microseconds": per_call(mv.barrier, 300)}
    return [barrier, *_at_once(calls, sizes, elements_a_size, 5000)]


def rounds(sizes: list[int], elements_a_size: int) -> list[dict[str, Any]]:
    """Several workers in synchronous mode: microseconds a round, by exchange and by add and get."""

    def calls(table: Any, delta: Any, out: Any, local: Any, last: Any) -> dict[str, Callable[[], object]]:
        return {
            "round (exchange)": partial(table.exchange, local, last),
            "round (add, get)": partial(_add_and_get, table, delta, out),
        }

    mv.init(sync=True)
    return _at_once(calls, sizes, elements_a_size, 2000)


def _at_once(
    calls: Callable[..., dict[str, Callable[[], object]]], sizes: list[int], elements_a_size: int, most: int
) -> list[dict[str, Any]]:
    rows = []
    for size in sizes:
        table = mv.ArrayTableHandler(size)
        random = np.random.default_rng(mv.worker_id())
        arrays = (random.standard_normal(size, dtype="f4") * 1e-3 for _ in range(4))
        times = max(6, min(most, elements_a_size // size))
        for name, call in calls(table, *arrays).items():
            call()
            mv.barrier()
            rows.append({"operation": name, "elements": size, "microseconds": per_call(call, times)})
            mv.barrier()
    mv.shutdown()
    return rows


def _add_and_get(table: Any, delta: Any, out: Any) -> None:
    table.add(delta)
    table.get(out=out)


def _add_and_get_privately(private: Any, delta: Any, out: Any) -> None:
    np.add(private, delta, out=private)
    np.copyto(out, private)
