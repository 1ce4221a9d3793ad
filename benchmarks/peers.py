"""What else can hold parameters for several processes, and comes by pip: the same push and pull, in turns in one run.

Each worker adds an array of float32 to shared parameters and reads all of them back. Run by ``multiverso run -n 2
benchmarks/peers.py`` (with ``--json FILE``); worker 0 prints JSON: for each way and size the median and the mean of a
worker's seconds, and both divided by ours. Ray takes part where it is installed (``make ray`` does that), torch's RPC
and shared tensors where torch is. A private array is the limit: nobody shares it.

Medians hide waits that are rare and long: with several workers, trust the means.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np

import multiverso as mv
from reporting import give_report

SIZES = {1_000: 300, 100_000: 60, 1_000_000: 20, 10_000_000: 4}  # floats: times in a turn
TURNS = 3
Call = Callable[[], None]
Way = Callable[[int, np.ndarray, np.ndarray], Call]  # elements, what is added, where it is read to


def _private(elements: int, delta: np.ndarray, out: np.ndarray) -> Call:
    values = np.zeros(elements, np.float32)

    def call() -> None:
        np.add(values, delta, out=values)
        np.copyto(out, values)

    return call


def _ours(elements: int, delta: np.ndarray, out: np.ndarray) -> Call:
    table = mv.ArrayTableHandler(elements)

    def call() -> None:
        table.add(delta)
        table.get(out=out)

    return call


# -- torch: tensors in shared memory without any lock, and a server by RPC ---------------------------------------------

_held: dict[int, object] = {}


def _hogwild(elements: int, delta: np.ndarray, out: np.ndarray) -> Call:
    """Tensors as ``share_memory_()`` makes them. Adds of two workers at once get lost."""
    import torch

    path = _place("hogwild") / str(elements)
    mv.barrier()
    shared = torch.from_file(str(path), shared=True, size=elements, dtype=torch.float32)
    mine, into = torch.from_numpy(delta), torch.from_numpy(out)

    def call() -> None:
        shared.add_(mine)
        into.copy_(shared)

    return call


def add(elements: int, delta: object) -> None:
    """Called at the RPC server."""
    import torch

    if elements not in _held:
        _held[elements] = torch.zeros(elements)
    _held[elements].add_(delta)  # type: ignore[attr-defined]


def get(elements: int) -> object:
    """Called at the RPC server."""
    return _held[elements]


def serve(place: str, world: int) -> None:
    """The RPC server's process: it answers until all workers have ended."""
    from torch.distributed import rpc

    rpc.init_rpc("server", rank=world - 1, world_size=world, rpc_backend_options=_options(place))
    rpc.shutdown()


def _options(place: str) -> object:
    from torch.distributed import rpc

    return rpc.TensorPipeRpcBackendOptions(init_method=f"file://{place}/rpc", num_worker_threads=4)


@contextmanager
def _rpc() -> Iterator[Way]:
    import torch
    from torch.distributed import rpc

    import peers  # by its name: the server looks up what it is to call

    place, world = str(_place("rpc")), mv.workers_num() + 1
    server = None
    if mv.worker_id() == 0:
        here = str(Path(__file__).parent)
        code = f"import sys; sys.path.insert(0, {here!r}); import peers; peers.serve({place!r}, {world})"
        server = subprocess.Popen([sys.executable, "-c", code])
    rpc.init_rpc(f"worker-{mv.worker_id()}", rank=mv.worker_id(), world_size=world, rpc_backend_options=_options(place))

    def way(elements: int, delta: np.ndarray, out: np.ndarray) -> Call:
        mine, into = torch.from_numpy(delta), torch.from_numpy(out)

        def call() -> None:
            rpc.rpc_sync("server", peers.add, (elements, mine))
            into.copy_(rpc.rpc_sync("server", peers.get, (elements,)))

        return call

    yield way
    rpc.shutdown()
    if server is not None:
        server.wait(60)


# -- Ray: an actor that holds arrays -----------------------------------------------------------------------------------


class Holder:
    """Arrays by size."""

    def __init__(self) -> None:
        self._values: dict[int, np.ndarray] = {}

    def add(self, elements: int, delta: np.ndarray) -> None:
        self._values.setdefault(elements, np.zeros(elements, np.float32))
        self._values[elements] += delta

    def get(self, elements: int) -> np.ndarray:
        return self._values[elements]


@contextmanager
def _ray() -> Iterator[Way]:
    import ray

    said = _place("ray") / "address"
    common = {"log_to_driver": False, "logging_level": "ERROR", "namespace": "peers"}
    if mv.worker_id() == 0:
        context = ray.init(num_cpus=1, include_dashboard=False, **common)
        ray.remote(num_cpus=0)(Holder).options(name="holder", lifetime="detached").remote()
        said.write_text(context.address_info["address"])
    mv.barrier()
    if mv.worker_id():
        ray.init(address=said.read_text(), **common)
    holder = ray.get_actor("holder")

    def way(elements: int, delta: np.ndarray, out: np.ndarray) -> Call:
        def call() -> None:
            ray.get(holder.add.remote(elements, delta))
            np.copyto(out, ray.get(holder.get.remote(elements)))

        return call

    yield way
    mv.barrier()
    ray.shutdown()


# -- in turns ----------------------------------------------------------------------------------------------------------


def _place(name: str) -> Path:
    """A folder that all workers of this job know."""
    place = Path(tempfile.gettempdir()) / f"peers-{os.environ.get('MULTIVERSO_JOB', os.getppid())}" / name
    place.mkdir(parents=True, exist_ok=True)
    return place


def _has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _timed(call: Call, times: int) -> list[float]:
    took = []
    for _ in range(times):
        begin = time.perf_counter()
        call()
        took.append(time.perf_counter() - begin)
    return took


def measure(ways: dict[str, Way]) -> dict[str, dict[str, dict[str, float]]]:
    """Returns seconds and ratios by size and way, of this worker."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for elements, times in SIZES.items():
        delta, out = np.ones(elements, np.float32), np.empty(elements, np.float32)
        calls = {name: way(elements, delta, out) for name, way in ways.items()}
        took: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(TURNS + 1):  # the first warms up
            for name in list(calls)[turn % len(calls) :] + list(calls)[: turn % len(calls)]:
                mv.barrier()
                seconds = _timed(calls[name], times if turn else max(2, times // 10))
                took[name] += seconds if turn else []
        mv.barrier()
        calls["multiverso"]()
        ours = took["multiverso"]
        found[str(elements)] = {
            name: {
                "median_s": statistics.median(each),
                "mean_s": statistics.mean(each),
                "median_by_ours": statistics.median(each) / statistics.median(ours),
                "mean_by_ours": statistics.mean(each) / statistics.mean(ours),
            }
            for name, each in took.items()
        }
    return found


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, help="write the result here, too")
    chosen = parser.parse_args()
    mv.init()
    versions = {"python": platform.python_version(), "numpy": np.__version__}
    ways: dict[str, Way] = {"multiverso": _ours, "private array": _private}
    with ExitStack() as stack:
        if _has("torch"):
            import torch

            torch.set_num_threads(1)
            versions["torch"] = torch.__version__
            ways |= {"torch, shared tensor, no lock": _hogwild, "torch rpc": stack.enter_context(_rpc())}
        if _has("ray"):
            import ray

            versions["ray"] = ray.__version__
            ways["Ray actor"] = stack.enter_context(_ray())
        found = measure(ways)
    if mv.worker_id() == 0:
        result = {
            "what": "add an array and read all of it back",
            "workers": mv.workers_num(),
            "cores": len(os.sched_getaffinity(0)),
            "load": os.getloadavg()[0],
            "versions": versions,
            "floats": found,
        }
        give_report(result, chosen.json)
    mv.shutdown()


if __name__ == "__main__":
    main()
