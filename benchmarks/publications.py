"""What publishing costs beside a plain copy, and reading; memory of many readers; bytes to other hosts. Prints JSON.

python benchmarks/publications.py [--megabytes 1500] [--readers 8] [--versions 500] [--hosts 3 --link 10mbit]

``publish_ratio``: a publish beside ``memmove`` of the same bytes, in turns. ``latest_us``: taking and releasing the
newest version. ``wake_us``: from ``publish`` to a waiting reader of another process. ``models_in_memory``: the
proportional memory of all processes (PSS), of which each reader has read every byte, in models. ``following``: AdamW
at 3e-6 in bfloat16 on a small language model (PyTorch), each version sent to another host: bytes as a part of the
whole's.
"""

from __future__ import annotations

import argparse
import contextlib
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
from namespaces import ADDRESSES, enter, two_hosts

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


def start(program: str, *arguments: str, prefix: list[str] | None = None, **environ: str) -> subprocess.Popen[str]:
    """Starts a program with pipes."""
    return subprocess.Popen(
        [*(prefix or ()), sys.executable, "-c", textwrap.dedent(program), *arguments],
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


def following(versions: int, hosts: int, link: str | None) -> dict[str, Any]:
    """Sends each version of a real training to other hosts, behind a link of a limited rate if one is given."""
    with contextlib.ExitStack() as stack:
        prefix: list[str] = []
        address = "127.0.0.1"
        if link is not None:
            here, there = stack.enter_context(two_hosts(link))
            enter(here)
            prefix, address = ["ip", "netns", "exec", there], ADDRESSES[0]
        found = _whole(prefix, address, link) if link is not None else {}
        return found | _trained(versions, hosts, prefix, address)


def _followers(
    stack: contextlib.ExitStack, hosts: int, name: str, place: str, token: str, prefix: list[str]
) -> list[subprocess.Popen[str]]:
    """Starts a reader on each host: each has a state directory of its own, as hosts have."""
    followers = []
    for _ in range(hosts):
        home = stack.enter_context(tempfile.TemporaryDirectory())
        follower = stack.enter_context(start(FOLLOWER, name, place, token, prefix=prefix, XDG_STATE_HOME=home))
        stack.callback(follower.kill)
        followers.append(follower)
    return followers


def _whole(prefix: list[str], address: str, link: str) -> dict[str, Any]:
    """How long a version takes of which all has changed, beside the time that the link needs for its bytes."""
    number, unit = int(link[:-4]), {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}[link[-4:]]
    nbytes = int(min(100e6, 2 * number * unit / 8))
    draw, name, token = np.random.default_rng(0), f"whole-{os.getpid()}", secrets.token_hex()
    weights = {"w": draw.integers(0, 256, nbytes, np.uint8)}
    took = []
    with mv.Publication(name, like=weights, slots=4) as publication, contextlib.ExitStack() as stack:
        place = "{}:{}".format(*publication.forward(token=token, address=address))
        publication.publish(weights)
        (follower,) = _followers(stack, 1, name, place, token, prefix)
        line_of(follower)
        for _ in range(5):
            weights["w"] += np.uint8(1)
            publication.publish(weights)
            began = time.perf_counter()
            line_of(follower)
            took.append(time.perf_counter() - began)
    return {"link": link, "whole_megabytes": nbytes / 1e6, "whole_beside_link": min(took) * number * unit / 8 / nbytes}


def _trained(versions: int, hosts: int, prefix: list[str], address: str) -> dict[str, Any]:
    import torch

    torch.manual_seed(0)
    text = torch.tensor(list(Path(__file__).read_bytes()))
    layer = torch.nn.TransformerEncoderLayer(256, 4, 1024, 0.0, batch_first=True)
    model = torch.nn.Sequential(
        torch.nn.Embedding(256, 256), torch.nn.TransformerEncoder(layer, 2), torch.nn.Linear(256, 256)
    ).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-6)
    name, token, wrong = f"following-{os.getpid()}", secrets.token_hex(), 0
    with mv.Publication(name, like=model, slots=4) as publication, contextlib.ExitStack() as stack:
        place = "{}:{}".format(*publication.forward(token=token, address=address))
        publication.publish(model)
        seen = stack.enter_context(mv.subscribe(name))
        followers = _followers(stack, hosts, name, place, token, prefix)
        for follower in followers:
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
            wrong += sum(line_of(follower) != f"{version} {sums}" for follower in followers)
        seconds = time.perf_counter() - began
    return {
        "hosts": hosts,
        "versions": versions,
        "wrong": wrong,
        "megabytes": whole / hosts / 1e6,
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
    parser.add_argument("--hosts", type=int, default=1, help="that follow")
    parser.add_argument("--link", help="between them and the publisher: 10mbit, 1gbit; namespaces (root)")
    parser.add_argument("--only-following", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found: dict[str, Any] = {"processors": len(os.sched_getaffinity(0))}
    if not options.only_following:
        found |= cost(options.megabytes, options.rounds) | wakes(100) | memory(options.megabytes, options.readers)
    found["following"] = following(options.versions, options.hosts, options.link)
    text = json.dumps(found, indent=1)
    print(text)
    if options.json:
        options.json.write_text(f"{text}\n")
    return int(found["following"]["wrong"] > 0)


if __name__ == "__main__":
    sys.exit(main())
