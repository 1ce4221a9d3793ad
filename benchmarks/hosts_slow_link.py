"""A PyTorch model on two hosts with a link of 10 Mbit/s between them: accuracy and bytes by what travels: JSON.

sudo python benchmarks/hosts_slow_link.py [--seconds 20] [--rate 10mbit] [--only NAME ...] [--output FILE]

Each host is a network namespace of this machine, the link a pair of devices with a token bucket at either end. MPICH's
mpiexec starts a worker on each by a script that enters the namespace, and they find each other by mpi4py: nothing of it
is a rehearsal but the machine. Every variant trains for the same time on the same halves of scikit-learn's digits;
"one host" is both workers on one, with no link between them. Bytes are what the devices count, headers and all.

"exchange" is what one exchange for every minibatch would have sent: the model there and back for each step.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BIN = Path(sys.executable).parent
BRIDGE = "mvbench"
VARIANTS: dict[str, dict[str, str]] = {
    "one host": {},
    "float32": {},
    "int8": {"MULTIVERSO_WIRE": "int8"},
    "int8, every 0.5 s": {"MULTIVERSO_WIRE": "int8", "MULTIVERSO_EVERY": "0.5"},
    "local SGD, every 2 s": {"MULTIVERSO_BETWEEN": "local_sgd", "MULTIVERSO_EVERY": "2"},
    "local SGD, int8, every 2 s": {
        "MULTIVERSO_BETWEEN": "local_sgd",
        "MULTIVERSO_EVERY": "2",
        "MULTIVERSO_WIRE": "int8",
    },
}
WORKER = """
import sys, json, time
import numpy as np, torch
import multiverso as mv
from multiverso.torch import SharedOptimizer
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

seconds, width = float(sys.argv[1]), int(sys.argv[2])
torch.set_num_threads(1)
mv.init()
me, n = mv.worker_id(), mv.workers_num()
x, y = load_digits(return_X_y=True)
x, x_test, y, y_test = (torch.from_numpy(a) for a in train_test_split(
    (x / 16).astype("float32"), y.astype("int64"), test_size=500, random_state=0))
x, y = x[me::n], y[me::n]
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, width), torch.nn.ReLU(), torch.nn.Linear(width, 10))
optimizer = SharedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), model)
chance = torch.Generator().manual_seed(me)
mv.barrier()
began, steps = time.monotonic(), 0
while time.monotonic() - began < seconds:
    picked = torch.randint(len(x), (32,), generator=chance)
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(x[picked]), y[picked]).backward()
    optimizer.step()
    steps += 1
mv.barrier()
optimizer.manager.sync_all_param()
with torch.no_grad():
    accuracy = (model(x_test).argmax(1) == y_test).float().mean().item()
mv.barrier()
size = sum(p.numel() for p in model.parameters())
sys.stdout.write(json.dumps({"worker": me, "steps": steps, "accuracy": accuracy, "floats": size}) + "\\n")
sys.stdout.flush()
mv.shutdown()
"""


def ip(*arguments: object) -> None:
    """Changes the network."""
    subprocess.run(["ip", *map(str, arguments)], check=True, capture_output=True)


@contextlib.contextmanager
def two_hosts(rate: str) -> Iterator[list[str]]:
    """Two namespaces, mvbench0 and mvbench1, with a limited link between them."""
    names = [f"{BRIDGE}{host}" for host in range(2)]
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", "v0", "netns", names[0], "type", "veth", "peer", "name", "v1", "netns", names[1])
        for host, name in enumerate(names):
            ip("-n", name, "addr", "add", f"10.78.0.{host + 1}/24", "dev", f"v{host}")
            ip("-n", name, "link", "set", f"v{host}", "up")
            ip("-n", name, "link", "set", "lo", "up")
            limit = ["tc", "qdisc", "add", "dev", f"v{host}", "root", "tbf", "rate", rate]
            command = ["ip", "netns", "exec", name, *limit, "burst", "64kb", "latency", "50ms"]
            subprocess.run(command, check=True, capture_output=True)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def sent(names: list[str]) -> int:
    """How many bytes both hosts have sent over the link."""
    total = 0
    for host, name in enumerate(names):
        path = f"/sys/class/net/v{host}/statistics/tx_bytes"
        read = subprocess.run(
            ["ip", "netns", "exec", name, "cat", path], check=True, capture_output=True, text=True
        )
        total += int(read.stdout)
    return total


def train(names: list[str], folder: Path, variant: str, seconds: float, width: int) -> dict[str, Any]:
    """Trains once, and says how that went."""
    enter = folder / "enter"
    enter.write_text(
        '#!/bin/sh\nwhile [ "${1#-}" != "$1" ]; do shift; done\nhost=${1##*.}; shift\n'
        f'exec ip netns exec {BRIDGE}$((host - 1)) sh -c "$*"\n'
    )
    enter.chmod(0o755)
    (folder / "worker.py").write_text(WORKER)
    hosts = "10.78.0.1" if variant == "one host" else "10.78.0.1,10.78.0.2"
    command = [
        *(
            "ip",
            "netns",
            "exec",
            names[0],
            BIN / "mpiexec.hydra",
            "-launcher",
            "ssh",
            "-launcher-exec",
            enter,
        ),
        *("-hosts", hosts, "-n", 2, sys.executable, folder / "worker.py", seconds, width),
    ]
    before = sent(names)
    done = subprocess.run(
        list(map(str, command)),
        capture_output=True,
        text=True,
        check=False,
        timeout=60 + 10 * seconds,
        env={**os.environ, **VARIANTS[variant]},
    )
    if done.returncode:
        raise SystemExit(f"{variant} failed with exit code {done.returncode}:\n{done.stdout}{done.stderr}")
    workers = [json.loads(line) for line in done.stdout.splitlines()]
    steps, floats = sum(worker["steps"] for worker in workers), workers[0]["floats"]
    told = sent(names) - before
    each = 2 * 4 * floats * steps
    return {
        "variant": variant,
        "accuracy": statistics.mean(worker["accuracy"] for worker in workers),
        "steps": steps,
        "bytes": told,
        "exchange_bytes": each,
        "fewer": round(each / told) if variant != "one host" and told else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=20.0, help="of training, each variant")
    parser.add_argument("--rate", default="10mbit", help="of the link, as tc names it")
    parser.add_argument("--width", type=int, default=1024, help="of the model's hidden layer")
    parser.add_argument("--only", nargs="*", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, two_hosts(options.rate) as names:
        results = [
            train(names, Path(folder), variant, options.seconds, options.width) for variant in options.only
        ]
    text = json.dumps(
        {
            "rate": options.rate,
            "seconds": options.seconds,
            "width": options.width,
            "load": os.getloadavg()[0],
            "variants": results,
        },
        indent=2,
    )
    print(text)
    if options.output:
        options.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
