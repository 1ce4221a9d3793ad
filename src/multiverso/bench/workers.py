"""What each worker of a benchmark does. These functions run in the workers, through ``multiverso.run``."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

import multiverso as mv
from multiverso.bench.timing import alternate, per_call

_ROWS, _COLUMNS = 100_000, 64


def against_the_limit(sizes: list[int], seconds: float) -> list[dict[str, Any]]:
    """One worker: each operation beside the same loop on private memory, in one run."""
    from numba import float32

    from multiverso.kernels import dense
    from multiverso.kernels.compiling import building, compile_kernel

    with building("bench"):
        fused = compile_kernel(dense.push_pull.py_func, (float32[::1],) * 3)
    mv.init()
    rows = []
    for size in sizes:
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
        rows += [
            {
                "operation": name,
                "elements": size,
                "microseconds": times[name],
                "limit": limit,
                "limit_microseconds": times[limit],
                "ratio": times[name] / times[limit],
            }
            for name, limit in limits.items()
        ]
        del table
    mv.shutdown()
    return rows


def rows_against_the_limit(batches: list[int], seconds: float) -> list[dict[str, Any]]:
    """One worker: random distinct rows of a matrix, beside NumPy's take and a private scatter-add."""
    from numba import float32, int64, njit

    from multiverso.kernels.compiling import building, compile_kernel

    @njit(nogil=True)
    def add_row(row: Any, part: Any) -> None:
        for i in range(row.size):
            row[i] += part[i]

    def scatter(matrix: Any, ids: Any, delta: Any) -> None:
        for i in range(ids.size):
            add_row(matrix[ids[i]], delta[i])

    with building("bench"):
        scatter_add = compile_kernel(scatter, (float32[:, ::1], int64[::1], float32[:, ::1]))
    mv.init()
    random = np.random.default_rng(0)
    table = mv.MatrixTableHandler(_ROWS, _COLUMNS)
    private = np.zeros((_ROWS, _COLUMNS), "f4")
    rows = []
    for batch in batches:
        ids = random.choice(_ROWS, batch, replace=False)
        delta = random.standard_normal((batch, _COLUMNS), dtype="f4")
        out, taken = np.empty_like(delta), np.empty_like(delta)
        times = alternate(
            {
                "np.take": lambda: np.take(private, ids, axis=0, out=taken, mode="clip"),
                "get rows": lambda: table.get(ids, out=out),
                "private scatter-add": lambda: scatter_add(private, ids, delta),
                "add rows": lambda: table.add(delta, ids),
            },
            seconds,
        )
        rows += [
            {
                "operation": name,
                "rows": batch,
                "microseconds": times[name],
                "limit": limit,
                "limit_microseconds": times[limit],
                "ratio": times[name] / times[limit],
            }
            for name, limit in (("get rows", "np.take"), ("add rows", "private scatter-add"))
        ]
    mv.shutdown()
    return rows


def together(sizes: list[int], elements_a_size: int) -> list[dict[str, Any]]:
    """Several workers at once: microseconds a call in this worker, for add, get and exchange, and a barrier."""
    mv.init()
    rows = []
    mv.barrier()
    rows.append({"operation": "barrier", "elements": 0, "microseconds": per_call(mv.barrier, 300)})
    for size in sizes:
        table = mv.ArrayTableHandler(size)
        random = np.random.default_rng(mv.worker_id())
        delta, out, local, last = (random.standard_normal(size, dtype="f4") for _ in range(4))
        times = max(6, min(5000, elements_a_size // size))
        for name, call in (
            ("add", lambda: table.add(delta)),
            ("get", lambda: table.get(out=out)),
            ("exchange", lambda: table.exchange(local, last)),
        ):
            call()
            mv.barrier()
            rows.append({"operation": name, "elements": size, "microseconds": per_call(call, times)})
            mv.barrier()
        del table
    mv.shutdown()
    return rows


def rounds(sizes: list[int], elements_a_size: int) -> list[dict[str, Any]]:
    """Several workers in synchronous mode: microseconds a round, by exchange and by add and get."""
    mv.init(sync=True)
    rows = []
    for size in sizes:
        table = mv.ArrayTableHandler(size)
        random = np.random.default_rng(mv.worker_id())
        delta, out, local, last = (random.standard_normal(size, dtype="f4") * 1e-3 for _ in range(4))

        def add_and_get() -> None:
            table.add(delta)
            table.get(out=out)

        times = max(6, min(2000, elements_a_size // size))
        for name, call in (("round (exchange)", lambda: table.exchange(local, last)), ("round (add, get)", add_and_get)):
            call()
            mv.barrier()
            rows.append({"operation": name, "elements": size, "microseconds": per_call(call, times)})
        del table
    mv.shutdown()
    return rows


def steps(seconds: float, compute_seconds: float, elements: int, sharing: bool) -> float:
    """A training loop with slept compute: steps a second in this worker."""
    if sharing:
        mv.init()
        table = mv.ArrayTableHandler(elements)
        local = table.get()
        last = local.copy()
        table.exchange(local, last)
        mv.barrier()
    number, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        time.sleep(compute_seconds)
        if sharing:
            table.exchange(local, last)
        number += 1
    rate = number / (time.perf_counter() - began)
    if sharing:
        mv.shutdown()
    return rate
