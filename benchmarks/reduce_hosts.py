"""all_reduce between two hosts of one worker each, beside gloo's over the same loopback, in turns in one run.

Run it by ``multiverso run --hosts 2 -n 2 benchmarks/reduce_hosts.py``; worker 0 prints JSON: for each size the
median of seconds by ours and by gloo, and gloo's divided by ours.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable

import numpy as np

import multiverso as mv
from multiverso.runtime import Reducer
from multiverso.runtime.session.current import current

SIZES = {1_000: 200, 1_000_000: 20, 10_000_000: 4}


def main() -> None:
    """Measures and prints."""
    import torch
    from torch import distributed

    mv.init()
    session = current()
    me, size = mv.worker_id(), mv.workers_num()
    store = os.path.join(
        tempfile.gettempdir(), f"reduce-hosts-{os.environ.get('MULTIVERSO_JOB', os.getppid())}"
    )
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=me, world_size=size)
    reducer = Reducer(session, size)
    found = {}
    for elements, times in SIZES.items():
        array = np.full(elements, me + 1, np.float32)
        out = np.empty_like(array)
        tensor = torch.from_numpy(array.copy())

        def ours(array: np.ndarray = array, out: np.ndarray = out) -> None:
            reducer.all_reduce(array, "sum", out)

        def gloo(tensor: torch.Tensor = tensor) -> None:
            distributed.all_reduce(tensor)

        took: dict[str, list[float]] = {"ours": [], "gloo": []}
        for _ in range(times):
            for name, call in (("ours", ours), ("gloo", gloo)):
                took[name].append(_seconds(call))
        assert out[0] == out[-1] == size * (size + 1) / 2
        medians = {name: statistics.median(each) for name, each in took.items()}
        found[elements] = {**medians, "gloo_by_ours": medians["gloo"] / medians["ours"]}
    if me == 0:
        print(json.dumps({"load": os.getloadavg()[0], "workers": size, "seconds": found}), flush=True)
    distributed.destroy_process_group()
    mv.shutdown()


def _seconds(call: Callable[[], None]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
