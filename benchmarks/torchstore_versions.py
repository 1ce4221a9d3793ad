"""Seconds until another process has a version in tensors of its own: a publication, or torchstore. Prints JSON.

    python benchmarks/torchstore_versions.py publication [--megabytes 16] [--versions 7]
    python benchmarks/torchstore_versions.py torchstore

torchstore 0.1.2 (with torchmonarch 0.1.2 and torch 2.9.0) goes into an environment of its own: pip install torchstore.
Its wheels ask for libcuda.so.1, libibverbs.so.1 and libmlx5.so.1. Without a GPU the first of them can be a library of
five functions that return an error: what there is to send then goes by Monarch's own messages, as it does without RDMA.
Both ways hand over the same 20 tensors of bfloat16, every number of which is the version's: put_state_dict and
get_state_dict into tensors that are there; publish and load_into.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import torch

TENSORS = 20


def state(value: float, megabytes: float) -> dict[str, torch.Tensor]:
    """Tensors of a version."""
    count = int(megabytes * 1e6 / 2 / TENSORS)
    return {f"layer{number}": torch.full((count,), float(value), dtype=torch.bfloat16) for number in range(TENSORS)}


def report(megabytes: float, rows: list[tuple[float, float, bool]]) -> None:
    """Prints medians."""
    given, taken, right = zip(*rows, strict=True)
    found = {"give_seconds": statistics.median(given), "take_seconds": statistics.median(taken), "right": all(right)}
    print(json.dumps({"way": sys.argv[1], "megabytes": megabytes, **found}))


def is_version(tensors: dict[str, torch.Tensor], version: int) -> bool:
    """Whether all numbers are a version's."""
    return all(bool((tensor == float(version)).all()) for tensor in tensors.values())


def by_publication(megabytes: float, versions: int) -> None:
    """This process publishes, another one of this program reads."""
    import multiverso as mv

    if "--name" in sys.argv:
        name, mine, version = sys.argv[sys.argv.index("--name") + 1], state(0, megabytes), 0
        with mv.subscribe(name) as subscription:
            print("ready", flush=True)
            for line in sys.stdin:
                began = time.perf_counter()
                version = subscription.load_into(mine)
                print(time.perf_counter() - began, version == int(line) and is_version(mine, version), flush=True)
        return
    name, rows = f"torchstore-{os.getpid()}", []
    command = [sys.executable, __file__, "publication", "--megabytes", str(megabytes), "--name", name]
    with (
        mv.Publication(name, like=state(0, megabytes)) as publication,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as reader,
    ):
        assert reader.stdin is not None
        assert reader.stdout is not None
        reader.stdout.readline()
        for version in range(1, versions + 1):
            tensors = state(version, megabytes)
            began = time.perf_counter()
            publication.publish(tensors)
            given = time.perf_counter() - began
            print(version, file=reader.stdin, flush=True)
            seconds, right = reader.stdout.readline().split()
            rows.append((given, float(seconds), right == "True"))
        reader.stdin.close()
    report(megabytes, rows)


def by_torchstore(megabytes: float, versions: int) -> None:
    """Two actors of Monarch."""
    import torchstore
    from monarch.actor import Actor, endpoint
    from torchstore.utils import spawn_actors

    class Trainer(Actor):  # type: ignore[misc]
        @endpoint  # type: ignore[untyped-decorator]
        async def give(self, version: int) -> float:
            tensors = state(version, megabytes)
            began = time.perf_counter()
            await torchstore.put_state_dict(tensors, "policy")
            return time.perf_counter() - began

    class Sampler(Actor):  # type: ignore[misc]
        def __init__(self) -> None:
            self.mine = state(0, megabytes)

        @endpoint  # type: ignore[untyped-decorator]
        async def take(self, version: int) -> tuple[float, bool]:
            began = time.perf_counter()
            found: Any = await torchstore.get_state_dict("policy", user_state_dict=self.mine)
            return time.perf_counter() - began, is_version(found, version)

    async def main() -> None:
        await torchstore.initialize()
        trainer, sampler = [await spawn_actors(1, kind, kind.__name__) for kind in (Trainer, Sampler)]
        rows = []
        for version in range(1, versions + 1):
            given = await trainer.give.call_one(version)
            rows.append((given, *await sampler.take.call_one(version)))
        report(megabytes, rows)
        await torchstore.shutdown()

    asyncio.run(main())


def main() -> None:
    """Runs one of the two."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("way", choices=("publication", "torchstore"))
    parser.add_argument("--megabytes", type=float, default=16.0)
    parser.add_argument("--versions", type=int, default=7)
    parser.add_argument("--name", help=argparse.SUPPRESS)
    given = parser.parse_args()
    {"publication": by_publication, "torchstore": by_torchstore}[given.way](given.megabytes, given.versions)


if __name__ == "__main__":
    main()
