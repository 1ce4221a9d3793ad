"""Local SGD of a small transformer between two sites with a slow link: whole, in fragments, overlapped, rounded: JSON.

sudo python benchmarks/fragments.py [--steps 900] [--repeats 3] [--rate 10mbit] [--only NAME ...] [--out FILE]

Each site is a network namespace of this machine with two workers, the link a pair of devices with a token bucket at
either end. A character-level transformer (``tasks.py``) learns the text of Python's ``help()``; each worker trains with
AdamW and contributes to an outer Nesterov step at every 20th step (DiLoCo, arXiv 2311.08105; fragments and overlap:
Streaming DiLoCo, arXiv 2501.18512). Losses are those of the shared parameters on a tenth of the text that nobody
trains on, after equal steps and after equal seconds. Bytes are what the devices count during training, headers and all;
the peak is the most that one of them has sent in a fifth of a second.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from namespaces import bytes_a_second, congestion_control, inside, mpi_results, two_hosts
from reporting import give_report

EVERY = 20
VARIANTS: dict[str, dict[str, Any]] = {
    "one host, whole": {"hosts": 1},
    "whole": {},
    "whole, int8": {"wire": "int8"},
    "4 fragments": {"fragments": 4},
    "4 fragments, overlap 4": {"fragments": 4, "overlap": 4},
    "4 fragments, overlap 4, int8": {"fragments": 4, "overlap": 4, "wire": "int8"},
    "4 fragments, overlap 4, topk:0.03": {"fragments": 4, "overlap": 4, "wire": "topk:0.03"},
}
_LOOK_SECONDS = 0.2


def train(variant: str, options: argparse.Namespace) -> None:
    """One worker; prints what it came to."""
    import numpy as np
    import torch

    import multiverso as mv
    from multiverso.torch import ParamManager
    from tasks import CONTEXT, characters, transformer, windows

    how = VARIANTS[variant]
    torch.set_num_threads(1)
    mv.init(sync=True, wire=how.get("wire"))
    me = mv.worker_id()
    text, held = characters()
    text = text[me * len(text) // mv.workers_num() : (me + 1) * len(text) // mv.workers_num()]
    model, drawn = transformer(options.seed, 64, 2), np.random.default_rng([options.seed, me])
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    manager = ParamManager(
        model, rule=mv.rules.local_sgd(0.7, 0.9), every=EVERY,
        fragments=how.get("fragments", 1), overlap=how.get("overlap", False),
    )  # fmt: skip
    mv.barrier()
    began, seen = time.monotonic(), dict[str, Any]()
    for step in range(1, options.steps + 1):
        inputs, targets = windows(text, drawn.integers(len(text) - CONTEXT - 1, size=8))
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        manager.step()
        if me == 0 and step == options.equal_steps:
            seen["loss_at_equal_steps"] = manager.state_dict()
        if me == 0 and "loss_at_equal_seconds" not in seen and time.monotonic() - began >= options.equal_seconds:
            seen["loss_at_equal_seconds"], steps_by_then = manager.state_dict(), step
    ended = time.monotonic()
    manager.finish()
    mv.barrier()

    def loss(state: Any) -> float:
        model.load_state_dict(state)
        inputs, targets = windows(held, np.arange(0, len(held) - CONTEXT - 1, CONTEXT))
        with torch.no_grad():
            return float(torch.nn.functional.cross_entropy(model(inputs), targets))

    if me == 0:
        if len(seen) < 2:
            raise SystemExit(f"{options.steps} steps of {variant} took {ended - began:.1f} s: give more --steps")
        floats = sum(value.numel() for value in model.parameters())
        found = {"floats": floats, "began": began, "ended": ended, "steps_at_equal_seconds": steps_by_then}
        print(json.dumps(found | {name: loss(state) for name, state in seen.items()}), flush=True)
    mv.barrier()
    mv.shutdown()


def run(names: list[str], variant: str, options: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Trains once, beside a look at what the devices have sent."""
    over, counts = threading.Event(), list[tuple[float, int, int]]()

    def look() -> None:
        while not over.wait(_LOOK_SECONDS):
            counts.append((time.monotonic(), _sent(names, 0), _sent(names, 1)))

    looking = threading.Thread(target=look)
    looking.start()
    hosts = VARIANTS[variant].get("hosts", 2)
    command = [sys.executable, __file__, "--worker", variant, "--steps", options.steps]
    command += ["--equal-steps", options.equal_steps, "--equal-seconds", options.equal_seconds]
    with tempfile.TemporaryDirectory() as folder:
        try:
            command += ["--seed", seed]
            found: dict[str, Any]
            (found,) = mpi_results(names, hosts, 4 // hosts, Path(folder), command, {}, options.most)
        finally:
            over.set()
            looking.join()
    began, ended = found.pop("began"), found.pop("ended")
    training = [count for count in counts if began <= count[0] <= ended]
    rates = [
        (now[side] - before[side]) / (now[0] - before[0])
        for before, now in itertools.pairwise(training)
        for side in (1, 2)
    ]
    sent = sum(training[-1][side] - training[0][side] for side in (1, 2))
    return found | {"seconds": ended - began, "megabytes": sent / 1e6, "peak_mbit": max(rates) * 8 / 1e6}


def _sent(names: list[str], host: int) -> int:
    return int(inside(names[host], "cat", f"/sys/class/net/v{host}/statistics/tx_bytes"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=900, help="of each worker, in each run")
    parser.add_argument("--equal-steps", type=int, default=600, help="after which losses are compared")
    parser.add_argument("--equal-seconds", type=float, default=8, help="after which losses are compared, too")
    parser.add_argument("--repeats", type=int, default=3, help="of each variant, with other seeds")
    parser.add_argument("--rate", default="10mbit", help="of the link, as tc names it")
    parser.add_argument("--most", type=float, default=300, help="seconds of a run")
    parser.add_argument("--only", nargs="*", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--out", type=Path, help="file for the JSON, too")
    parser.add_argument("--worker", choices=VARIANTS, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        train(options.worker, options)
        return
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # and nothing stays behind
    runs: dict[str, list[dict[str, Any]]] = {variant: [] for variant in options.only}
    with two_hosts(options.rate) as names:
        for seed in range(options.repeats):
            for variant, found in runs.items():
                found.append(run(names, variant, options, seed))
    report = {
        "what": f"two sites of two workers, {options.rate} between them, a transformer, outer steps at every {EVERY}th",
        "link_megabytes_a_second": bytes_a_second(options.rate) / 1e6,
        "congestion_control": congestion_control(),
        "load": os.getloadavg()[0],
        "settings": {
            "equal_steps": options.equal_steps,
            "equal_seconds": options.equal_seconds,
            "seeds": options.repeats,
        },
        "variants": {
            variant: {name: round(statistics.fmean(one[name] for one in found), 4) for name in found[0]}
            for variant, found in runs.items()
        },
    }
    give_report(report, options.out)


if __name__ == "__main__":
    main()
