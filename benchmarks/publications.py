"""What publishing costs beside a plain copy, and reading; memory of many readers; bytes to other hosts. Prints JSON.

python benchmarks/publications.py [--megabytes 1500] [--readers 8] [--versions 500]

``publish_ratio``: a publish beside ``memmove`` of the same bytes, in turns. ``latest_us``: taking and releasing the
newest version. ``wake_us``: from ``publish`` to a waiting reader of another process. ``models_in_memory``: the
proportional memory of all processes (PSS), of which each reader has read every byte, in models. ``following``: AdamW
at 3e-6 in bfloat16 on a small language model (PyTorch), each version sent to another host: bytes as a part of the
whole's.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from typing import Any

import numpy as np

import multiverso as mv

READER = """
    import sys, time
    import multiverso as mv
    with mv.subscribe(sys.argv[1]) as subscription:
        with subscription.latest() as snapshot:
            snapshot.verify()
            print("ready", flush=True)
            sys.stdin.readline()
"""
WAITER = """
    import sys, time
    import multiverso as mv
    with mv.subscribe(sys.argv[1]) as subscription:
        seen = subscription.latest().version
        print("ready", flush=True)
        while True:
            with subscription.wait(seen) as snapshot:
                woken = time.monotonic_ns()
                seen = snapshot.version
                print(woken, flush=True)
"""
FOLLOWER = """
    import sys
    import multiverso as mv
    with mv.subscribe(sys.argv[1], address=sys.argv[2], token=sys.argv[3]) as subscription:
        seen = 0
        while True:
            with subscription.wait(seen) as snapshot:
                snapshot.verify()
                seen = snapshot.version
                print(seen, sum(snapshot.checksums.values()) % 2**64, flush=True)
"""


def start(program: str, *arguments: str, **environ: str) -> subprocess.Popen[str]:
    """Starts a program with pipes."""
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **environ},
    )


def line_of(process: subprocess.Popen[str]) -> str:
    """Returns the next line that a program writes."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


def cost(megabytes: int, rounds: int) -> dict[str, Any]:
    """A publish beside a plain copy, in turns; and reads."""
    count = megabytes * 1_000_000 // 8 // 2
    draw = np.random.default_rng(0)
    weights = {f"layer{number}": draw.integers(0, 1 << 16, 4 * count, np.uint16) for number in (0, 1)}
    nbytes = sum(array.nbytes for array in weights.values())
    source, target = np.concatenate([*weights.values()]), np.zeros(nbytes // 2, np.uint16)
    copies, publishes = [], []
    name = f"cost-{os.getpid()}"
    with mv.Publication(name, like=weights) as publication, mv.subscribe(name) as subscription:
        for _ in range(rounds + 2):
            began = time.perf_counter()
            ctypes.memmove(target.ctypes.data, source.ctypes.data, nbytes)
            copies.append(time.perf_counter() - began)
            began = time.perf_counter()
            publication.publish(weights)
            publishes.append(time.perf_counter() - began)
        del source, target
        takes = []
        for _ in range(7):
            began = time.perf_counter()
            for _ in range(10_000):
                subscription.latest()
            takes.append((time.perf_counter() - began) / 10_000)
    ratios = [one / other for one, other in zip(publishes[2:], copies[2:], strict=True)]
    return {
        "megabytes": nbytes / 1e6,
        "copy_seconds": statistics.median(copies[2:]),
        "publish_seconds": statistics.median(publishes[2:]),
        "publish_ratio": statistics.median(ratios),
        "latest_us": min(takes) * 1e6,
    }


def wakes(rounds: int) -> dict[str, float]:
    """How long a waiting reader of another process sleeps on."""
    weights, name, took = {"w": np.zeros(1000)}, f"wakes-{os.getpid()}", []
    with mv.Publication(name, like=weights) as publication:
        publication.publish(weights)
        with start(WAITER, name) as waiter:
            line_of(waiter)
            for _ in range(rounds):
                time.sleep(0.01)  # it sleeps again
                began = time.monotonic_ns()
                publication.publish(weights, wait_seconds=10)
                took.append((int(line_of(waiter)) - began) / 1e3)
            waiter.kill()
    took.sort()
    return {"wake_us": statistics.median(took), "wake_us_p90": took[int(0.9 * len(took))]}


def memory(megabytes: int, readers: int) -> dict[str, float]:
    """Proportional memory of a publisher without a model of its own, and of readers that have read everything."""
    weights, name = {"w": np.zeros(megabytes * 500_000, np.uint16)}, f"memory-{os.getpid()}"
    with mv.Publication(name, like=weights) as publication:
        for _ in range(3):
            publication.publish(weights)
        programs = [start(READER, name) for _ in range(readers)]
        for program in programs:
            line_of(program)
        pids = [os.getpid(), *(program.pid for program in programs)]
        used = sum(_shared_part(pid) for pid in pids)
        for program in programs:
            with program:
                program.kill()
    return {"readers": readers, "models_in_memory": used / (megabytes * 1e6)}


def _shared_part(pid: int) -> float:
    """Bytes of shared memory that a process has its part of."""
    rows = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(float(row.split()[1]) * 1024 for row in rows if row.startswith("Pss_Shmem:"))


def following(versions: int) -> dict[str, Any]:
    """Sends each version of a real training to another host."""
    import torch

    torch.manual_seed(0)
    text = torch.tensor(list(Path(__file__).read_bytes()))
    model = torch.nn.Sequential(
        torch.nn.Embedding(256, 256),
        torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(256, 4, 1024, 0.0, batch_first=True), 2),
        torch.nn.Linear(256, 256),
    ).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-6)
    name, token, wrong = f"following-{os.getpid()}", secrets.token_hex(), 0
    with tempfile.TemporaryDirectory() as home, mv.Publication(name, like=model, slots=4) as publication:
        place = "{}:{}".format(*publication.forward(token=token, address="127.0.0.1"))
        publication.publish(model)
        with start(FOLLOWER, name, place, token, XDG_STATE_HOME=home) as follower, mv.subscribe(name) as seen:
            line_of(follower)
            forwarder = publication._forwarder
            assert forwarder is not None
            whole, began = forwarder.sent_bytes, time.perf_counter()
            for _ in range(versions):
                at = torch.randint(0, len(text) - 33, (8,))
                batch = torch.stack([text[i : i + 33] for i in at])
                loss = torch.nn.functional.cross_entropy(model(batch[:, :-1]).float().transpose(1, 2), batch[:, 1:])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                version = publication.publish(model, wait_seconds=60)
                with seen.latest() as snapshot:
                    sums = sum(snapshot.checksums.values()) % 2**64
                wrong += line_of(follower) != f"{version} {sums}"
            seconds = time.perf_counter() - began
            follower.kill()
        return {
            "versions": versions,
            "wrong": wrong,
            "megabytes": whole / 1e6,
            "part_of_the_whole": (forwarder.sent_bytes - whole) / whole / versions,
            "seconds_a_version_with_its_step": seconds / versions,
        }


def main() -> int:
    """Runs what the command line asks for, and prints a JSON object."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--megabytes", type=int, default=1500)
    parser.add_argument("--readers", type=int, default=8)
    parser.add_argument("--versions", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found: dict[str, Any] = {"processors": len(os.sched_getaffinity(0))}
    found |= cost(options.megabytes, options.rounds) | wakes(100) | memory(options.megabytes, options.readers)
    found["following"] = following(options.versions)
    text = json.dumps(found, indent=1)
    print(text)
    if options.json:
        options.json.write_text(f"{text}\n")
    return int(found["following"]["wrong"] > 0)


if __name__ == "__main__":
    sys.exit(main())
