"""Tables and modules on a GPU: bytes a second to and from it, beside the bus's own, and training that shares one. JSON.

python benchmarks/gpu.py [--megabytes 16 256 1024] [--json FILE]

``bus`` is a copy between the device and memory that PyTorch has pinned: the most that anything here can reach. What a
table gives goes three ways: as `multiverso.torch` does it; read into pinned memory that is kept, and sent from there;
and straight out of the table's own memory, registered with ``cudaHostRegister`` (torn where others add meanwhile). A
module of as many parameters is exchanged by `ParamManager`. Then workers train on the one device, alone and beside each
other.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import multiverso as mv
from multiverso.torch import ArrayTableHandler, ParamManager, SharedOptimizer

_REPEATS = 9
_PAGE, _READ_ONLY = 4096, 8


def seconds(work: Callable[[], Any]) -> float:
    """Returns the median time of some calls, the device's work included."""
    times = []
    for _ in range(_REPEATS + 2):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[2:])


def rates(nbytes: int, **ways: Callable[[], Any]) -> dict[str, float]:
    """Returns gigabytes a second of each way."""
    return {name: round(nbytes / seconds(way) / 1e9, 2) for name, way in ways.items()}


def copies(megabytes: int) -> dict[str, Any]:
    """What moves a table of so many megabytes to the device and back."""
    count = megabytes * 250_000
    nbytes = 4 * count
    device = torch.zeros(count, device="cuda")
    pinned = torch.zeros(count).pin_memory()
    pageable = np.zeros(count, np.float32)
    handler = ArrayTableHandler(count, device="cuda", name=f"table-{megabytes}")
    table = handler.table
    kept = pinned.numpy()

    def through_pinned() -> None:
        table.get(kept)
        device.copy_(pinned, non_blocking=True)

    def add_through_pinned() -> None:
        pinned.copy_(device, non_blocking=True)
        torch.cuda.synchronize()
        table.add(kept)

    found: dict[str, Any] = {
        "bus": rates(
            nbytes,
            to_device=lambda: device.copy_(pinned, non_blocking=True),
            from_device=lambda: pinned.copy_(device, non_blocking=True),
        ),
        "pageable": rates(
            nbytes,
            to_device=lambda: device.copy_(torch.from_numpy(pageable)),
            from_device=lambda: torch.from_numpy(pageable).copy_(device),
        ),
        "handler": rates(nbytes, get=handler.get, add=lambda: handler.add(device)),
        "kept_pinned": rates(nbytes, get=through_pinned, add=add_through_pinned),
        "host_only": rates(nbytes, get=lambda: table.get(kept), add=lambda: table.add(kept)),
    }
    found["module"] = module(megabytes)
    return found


def registered(megabytes: int) -> dict[str, Any]:
    """What a copy straight out of a table's own memory reaches, once that is registered; in a process of its own.

    A call of the runtime that fails is remembered by it, and reported by whatever is called next.
    """
    mv.init()
    count = megabytes * 250_000
    table = mv.ArrayTableHandler(count)
    found = {
        "own_memory": _register(np.zeros(count, np.float32), 0),
        "table": _register(table.memory(), 0),
        "table_for_reading": _register(table.view(), _READ_ONLY),
    }
    mv.shutdown()
    return found


def _register(array: Any, flags: int) -> dict[str, Any]:
    runtime, device = torch.cuda.cudart(), torch.zeros(array.size, device="cuda")
    address = array.__array_interface__["data"][0]
    begin = address // _PAGE * _PAGE
    size = -(-(address + array.nbytes - begin) // _PAGE) * _PAGE
    before = time.perf_counter()
    code = int(runtime.cudaHostRegister(begin, size, flags))
    found: dict[str, Any] = {"code": code, "seconds_to_register": round(time.perf_counter() - before, 4)}
    if code == 0:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch has no arrays that cannot be written to
            shared = torch.from_numpy(array)
        found |= rates(array.nbytes, to_device=lambda: device.copy_(shared, non_blocking=True))
        before = time.perf_counter()
        runtime.cudaHostUnregister(begin)
        found["seconds_to_unregister"] = round(time.perf_counter() - before, 4)
    else:
        with contextlib.suppress(RuntimeError):
            torch.cuda.synchronize()  # reports it once more, and only here
    return found


def module(megabytes: int) -> dict[str, float]:
    """What an exchange of a module of so many megabytes takes."""
    side = round((megabytes * 250_000 / 4) ** 0.5)
    network = torch.nn.Sequential(*(torch.nn.Linear(side, side, bias=False) for _ in range(4))).cuda()
    nbytes = 16 * side * side
    manager = ParamManager(network)
    found = seconds(manager.sync_all_param)
    return {"milliseconds": round(found * 1e3, 2), "gigabytes_a_second_both_ways": round(2 * nbytes / found / 1e9, 2)}


def train(steps: int, overlap: bool) -> dict[str, float]:
    """Trains a small network on the device, sharing it with the job's other workers; returns steps a second."""
    mv.init()
    torch.manual_seed(mv.worker_id())
    network = torch.nn.Sequential(
        torch.nn.Linear(784, 2048),
        torch.nn.ReLU(),
        torch.nn.Linear(2048, 2048),
        torch.nn.ReLU(),
        torch.nn.Linear(2048, 10),
    ).cuda()
    optimizer: Any = SharedOptimizer(torch.optim.SGD(network.parameters(), lr=0.05), network, overlap=overlap)
    teacher = torch.randn(784, 10, device="cuda", generator=torch.Generator("cuda").manual_seed(5))
    begin = losses = 0.0
    for step in range(steps):
        if step == steps // 5:
            mv.barrier()
            torch.cuda.synchronize()
            begin = time.perf_counter()
        x = torch.randn(512, 784, device="cuda")
        loss = torch.nn.functional.cross_entropy(network(x), (x @ teacher).argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses = loss.item()
    torch.cuda.synchronize()
    lasted = time.perf_counter() - begin
    mv.barrier()
    mv.shutdown()
    return {"steps_a_second": round((steps - steps // 5) / lasted, 1), "last_loss": round(losses, 3)}


def main() -> None:
    """Measures all of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, nargs="*", default=[16, 256, 1024])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    mv.init()
    for megabytes in options.megabytes:
        found[f"{megabytes} MB"] = copies(megabytes)
    mv.shutdown()
    for megabytes in options.megabytes:
        (found[f"{megabytes} MB"]["registered"],) = mv.run(registered, 1, args=(megabytes,), on_failure="continue")
    for workers in (1, 2, 4):
        for overlap in (False, True):
            each = mv.run(train, workers=workers, args=(options.steps, overlap), timeout_seconds=120)
            found.setdefault("training", []).append({"workers": workers, "overlap": overlap, "each": each})
    text = json.dumps(found, indent=1, default=repr)
    print(text)
    if options.json is not None:
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
