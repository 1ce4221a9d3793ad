"""The job of ``goodput.py`` with torchft in place of multiverso: what is done a second, and how well?

    pip install torchft==0.2.0 -e '.[demo]'              # into a virtual environment of its own
    python benchmarks/goodput_torchft.py                 # some minutes; prints JSON
    python benchmarks/goodput_torchft.py --every 1000    # nobody is killed
    python benchmarks/goodput_torchft.py --timeout 1     # who is waited for in vain is given up sooner

Eight workers train softmax regression; one is always slow, one at times, and every 20 seconds one of the others is
killed and another process takes its place: the same seeds, data, minibatches and kills as there. Each worker is a
replica group of one. Every step has a quorum, which is asked for before the minibatch, as torchft's own optimizer
does, then averages the gradients with gloo and asks whether to commit. The average is applied as many times as there
are gradients in it, so that a minibatch moves the weights as far as it does there.

Only minibatches of committed steps count, as torchft counts them. A worker has recovered when the first step that it
commits gave it the weights of the others: its next minibatch counts. ``longest_pause`` is the longest time between two
commits of one worker, the median of the runs. ``ended_by_themselves``: workers that failed without being killed. Loss
and accuracy are null if a run had fewer ``--minibatches``; give ``goodput.py`` the same number.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

from goodput import begun, interval
from quorum import ERRATIC, SLOW, WORKERS
from reporting import give_report
from tasks import softmax

MODES = {"at least 1": 1, "at least 6": 6}  # workers in a step that may be committed
SPARE_SECONDS = 100  # what a run may take beside its own time


def train(job: argparse.Namespace) -> None:
    """One worker; ``job.there``: a folder in which each says when it began, and what it came to."""
    import torch
    from torchft import Manager, ProcessGroupGloo  # type: ignore[import-not-found]

    torch.set_num_threads(1)
    task, me, there = softmax(job.seed), job.worker, Path(job.there)
    drawn = np.random.default_rng([job.seed, me, job.incarnation])
    weights = torch.from_numpy(task.weights.astype(np.float64))
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=job.timeout)), min_replica_size=job.least,
        load_state_dict=lambda state: weights.copy_(state["weights"]), state_dict=lambda: {"weights": weights.clone()},
        rank=0, world_size=1, store_addr="127.0.0.1", store_port=store.port, lighthouse_addr=job.lighthouse,
        replica_id=f"worker_{me}", init_sync=False, timeout=timedelta(seconds=30),
    )  # fmt: skip

    def tell(name: str, text: str) -> None:
        (there / f".{me}").write_text(text)
        (there / f".{me}").rename(there / name)

    mine = f"{me}-{job.incarnation}"
    if not job.incarnation:
        tell(f"ready-{me}", "")
        while len(list(there.glob("ready-*"))) < WORKERS:
            time.sleep(0.01)
        tell(mine, f"{os.getpid()} {time.time()}")
    end = begun(job.there) + job.run_seconds
    kept, reached, over, pause, last = None, None, False, 0.0, time.perf_counter()
    while not over:
        manager.start_quorum()
        until = time.perf_counter() + job.seconds * (
            job.slowed if me == SLOW else 10 if me == ERRATIC and drawn.random() < 0.1 else 1
        )
        gradient = task.gradient(weights.numpy(), drawn)
        time.sleep(max(0.0, until - time.perf_counter()))
        # all end with the same step: the first in which the time is over for somebody
        shared = torch.from_numpy(np.append(gradient, float(time.time() >= end)))
        manager.allreduce(shared).wait()
        if not manager.should_commit():
            continue
        weights -= task.rate * manager.num_participants() * shared[:-1]
        over = bool(shared[-1] > 0)
        now = time.perf_counter()
        pause, last = max(pause, now - last), now
        if not (there / mine).exists():
            tell(mine, f"{os.getpid()} {time.time()}")
        if kept is None and manager.batches_committed() >= job.minibatches:
            kept, reached = weights.clone(), manager.batches_committed()
    ended, minibatches = time.time(), manager.batches_committed()
    loss, accuracy = task.score((weights if kept is None else kept).numpy())
    found = {"ended": ended, "minibatches": minibatches, "reached": reached, "loss": loss, "accuracy": accuracy}
    tell(f"result-{me}", json.dumps(found | {"pause": pause}))
    manager.shutdown(wait=False)


def serve(least: int) -> None:
    """The lighthouse, until its standard input is closed."""
    from torchft.coordination import LighthouseServer  # type: ignore[import-not-found]

    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=least)
    print(lighthouse.address(), flush=True)
    sys.stdin.read()
    lighthouse.shutdown()


def run(least: int, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """One job, in which workers are killed; returns what it came to."""
    chance, killed, fell = random.Random(seed), dict[str, float](), 0
    running: dict[int, tuple[int, subprocess.Popen[bytes]]] = {}
    deadline, kill_at, until = time.time() + options.run_seconds + SPARE_SECONDS, float("inf"), float("inf")
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as opened:
        there = Path(folder)
        log = opened.enter_context((there / "log").open("wb"))
        job = vars(options) | {"out": None, "least": least, "seed": seed, "there": folder}

        def start(worker: int, incarnation: int) -> None:
            mine = json.dumps(job | {"worker": worker, "incarnation": incarnation})
            command = [sys.executable, __file__, "--worker", mine]
            running[worker] = incarnation, subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

        command = [sys.executable, __file__, "--lighthouse", str(least), str(options.run_seconds)]
        lighthouse = opened.enter_context(
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        )
        try:
            assert lighthouse.stdout is not None
            job["lighthouse"] = lighthouse.stdout.readline().decode().strip()
            for worker in range(WORKERS):
                start(worker, 0)
            # to its end, or until some seconds after the first has ended: one may have missed the last step
            while time.time() < min(deadline, until) and any(process.poll() is None for _, process in running.values()):
                time.sleep(0.01)
                if until == float("inf") and list(there.glob("result-*")):
                    until, kill_at = time.time() + 5, float("inf")
                if kill_at == until == float("inf") and len(list(there.glob("?-0"))) == WORKERS:
                    kill_at = time.time() + options.every
                for worker, (incarnation, process) in list(running.items()):
                    if process.poll() and until == float("inf"):
                        fell += f"{worker}-{incarnation}" not in killed
                        start(worker, incarnation + 1)
                if time.time() >= kill_at:
                    kill_at = time.time() + options.every
                    worker = chance.randrange(1, ERRATIC)
                    incarnation, process = running[worker]
                    if (there / f"{worker}-{incarnation}").exists():  # else it has not come yet
                        process.kill()
                        killed[f"{worker}-{incarnation}"] = time.time()
        finally:
            for process in [lighthouse, *(process for _, process in running.values())]:
                process.kill()
                process.wait()
        told = {path.name: float(path.read_text().split()[1]) for path in there.glob("?-*")}
        ends = [json.loads(path.read_text()) for path in there.glob("result-*")]
        last_words = (there / "log").read_text(errors="replace")[-2000:]
    recovered = []
    for name, when in killed.items():
        worker_name, _, incarnation_name = name.partition("-")
        if (again := told.get(f"{worker_name}-{int(incarnation_name) + 1}")) is not None:
            recovered.append(again - when)
    if not ends:
        raise SystemExit(f"{last_words}\nat least {least}: no worker came to its end")
    last = max(ends, key=lambda found: found["ended"])
    reached = [found for found in ends if found["reached"] is not None]
    first = min(reached, key=lambda found: found["reached"]) if reached else None
    return {
        "minibatches_a_second": last["minibatches"] / (last["ended"] - min(told.values())),
        "kills": len(killed),
        "seconds_to_recover": recovered,
        "longest_pause": max(found["pause"] for found in ends),
        "ended_by_themselves": fell,
        "loss": first and first["loss"],
        "accuracy": first and 100 * first["accuracy"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", action="append", choices=MODES, help="only this one; may be given again")
    parser.add_argument("--run-seconds", type=float, default=45, help="of each run")
    parser.add_argument("--minibatches", type=int, default=1500, help="with which loss and accuracy are compared")
    parser.add_argument("--seconds", type=float, default=0.02, help="of a minibatch")
    parser.add_argument("--slowed", type=float, default=4, help="how many times as long the slow worker takes")
    parser.add_argument("--every", type=float, default=20, help="seconds between two kills")
    parser.add_argument("--timeout", type=float, default=5, help="gloo's, in seconds: as in torchft's own example")
    parser.add_argument("--repeat", type=int, default=5, choices=range(1, 11), help="seeds")
    parser.add_argument("--out", type=Path, help="file for the JSON, too")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that nothing stays behind
    runs = {mode: list[dict[str, Any]]() for mode in options.mode or MODES}
    for seed in range(options.repeat):
        for mode, found in runs.items():
            found.append(run(MODES[mode], seed, options))
    report: dict[str, Any] = {
        "what": f"torchft: worker {SLOW} of {WORKERS} is {options.slowed:g}x as slow, {ERRATIC} 10x in 1 of 10, one is "
        f"killed every {options.every:g} s and replaced",
        "machine": {"python": platform.python_version(), "processor": platform.machine()},
        "settings": {
            "task": "softmax",
            "run_seconds": options.run_seconds,
            "minibatch_seconds": options.seconds,
            "loss_at_minibatches": options.minibatches,
            "gloo_timeout_seconds": options.timeout,
            "seeds": options.repeat,
        },
        "modes": {},
    }
    for mode, found in runs.items():
        recovered = [seconds for one in found for seconds in one["seconds_to_recover"]]
        reached = all(one["loss"] is not None for one in found)
        report["modes"][mode] = {
            "minibatches_a_second": interval([one["minibatches_a_second"] for one in found], 1),
            "kills": sum(one["kills"] for one in found),
            "seconds_to_recover": round(statistics.median(recovered), 2) if recovered else None,
            "longest_pause": round(statistics.median(one["longest_pause"] for one in found), 2),
            "ended_by_themselves": sum(one["ended_by_themselves"] for one in found),
            "validation_loss": interval([one["loss"] for one in found], 4) if reached else None,
            "validation_accuracy": interval([one["accuracy"] for one in found], 2) if reached else None,
        }
    give_report(report, options.out)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        given = argparse.Namespace(**json.loads(sys.argv[2]))
        signal.alarm(int(given.run_seconds + SPARE_SECONDS))  # should nobody be left to end it
        train(given)
    elif sys.argv[1:2] == ["--lighthouse"]:
        signal.alarm(int(float(sys.argv[3]) + SPARE_SECONDS))
        serve(int(sys.argv[2]))
    else:
        main()
