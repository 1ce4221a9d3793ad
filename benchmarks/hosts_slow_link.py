"""A PyTorch model on two hosts with a link of 10 Mbit/s between them: accuracy and bytes by what travels: JSON.

sudo python benchmarks/hosts_slow_link.py [--seconds 20] [--repeats 3] [--rate 10mbit] [--only NAME ...] [--output FILE]

Each host is a network namespace of this machine, the link a pair of devices with a token bucket at either end. MPICH's
mpiexec starts a worker on each by a script that enters the namespace, and they find each other by mpi4py: nothing of it
is a rehearsal but the machine. Every variant trains for the same time on scikit-learn's digits, each worker on half;
"one host" is both workers on one, with no link between them. Bytes are what the devices count, headers and all.

"exchange" is what one exchange for every minibatch would have sent: the model there and back for each step.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from namespaces import congestion_control, mpi_results, sent, two_hosts
from reporting import give_report

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

seconds, width, seed = float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(1)
mv.init()
me, n = mv.worker_id(), mv.workers_num()
x, y = load_digits(return_X_y=True)
x, x_test, y, y_test = (torch.from_numpy(a) for a in train_test_split(
    (x / 16).astype("float32"), y.astype("int64"), test_size=500, random_state=seed))
x, y = x[me::n], y[me::n]
torch.manual_seed(seed)
model = torch.nn.Sequential(torch.nn.Linear(64, width), torch.nn.ReLU(), torch.nn.Linear(width, 10))
optimizer = SharedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), model)
chance = torch.Generator().manual_seed(1000 * seed + me)
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


def train(names: list[str], folder: Path, variant: str, seconds: float, width: int, seed: int) -> dict[str, Any]:
    """Trains once, and says how that went."""
    (folder / "worker.py").write_text(WORKER)
    hosts = 1 if variant == "one host" else 2
    command = [sys.executable, folder / "worker.py", seconds, width, seed]
    before = sent(names)
    workers = mpi_results(names, hosts, 2 // hosts, folder, command, VARIANTS[variant], 60 + 10 * seconds)
    steps, floats = sum(worker["steps"] for worker in workers), workers[0]["floats"]
    told = sent(names) - before
    each = 2 * 4 * floats * steps
    return {
        "accuracy": statistics.mean(worker["accuracy"] for worker in workers),
        "steps": steps,
        "bytes": told,
        "exchange_bytes": each,
        "fewer": round(each / told) if variant != "one host" and told else None,
    }


def mean(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the means of what several runs of a variant gave, and the accuracy of each."""
    means = {name: statistics.mean(run[name] for run in runs) for name in runs[0] if runs[0][name] is not None}
    return {**means, "accuracies": [round(run["accuracy"], 4) for run in runs]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="of training, each variant")
    parser.add_argument("--repeats", type=int, default=3, help="of each variant, with other seeds and other halves")
    parser.add_argument("--rate", default="10mbit", help="of the link, as tc names it")
    parser.add_argument("--width", type=int, default=1024, help="of the model's hidden layer")
    parser.add_argument("--only", nargs="*", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # and nothing stays behind
    with tempfile.TemporaryDirectory() as folder, two_hosts(options.rate) as names:
        runs: dict[str, list[dict[str, Any]]] = {variant: [] for variant in options.only}
        for seed in range(options.repeats):
            for variant, found in runs.items():
                found.append(train(names, Path(folder), variant, options.seconds, options.width, seed))
    give_report(
        {
            "rate": options.rate,
            "congestion_control": congestion_control(),
            "seconds": options.seconds,
            "width": options.width,
            "load": os.getloadavg()[0],
            "repeats": options.repeats,
            "variants": [{"variant": variant, **mean(found)} for variant, found in runs.items()],
        },
        options.output,
        indent=2,
    )


if __name__ == "__main__":
    main()
