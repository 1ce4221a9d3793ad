"""Kills on several hosts, from a seed: does the job go on from its checkpoint, and what is left behind?

    python benchmarks/chaos_hosts.py --seed 1 --kills 40

Each episode is a rehearsal of two hosts with real processes that add to a table and save a checkpoint every few
steps: ``multiverso run --hosts 2 --max-restarts 1``. At a random step a worker kills another one, its host's node,
all processes of its host, or the first host's node. Then it is checked:

- nobody hangs: the job ends in time, with 0, and every worker has done all its steps;
- all workers read the same in the end, and what they read is what was added, but for the adds of the moments between
  the parts of the checkpoint, which are counted;
- no process is left, and no file but the whole checkpoints.

``on_seconds`` are from the kill to the last worker's first step after the restart; ``seconds``, the whole job's. The
first are made of ``ended``, until the last worker's new process begins (the death is noticed, the others are ended, and
the launcher waits a moment), ``joined``, until ``init`` has returned in all (interpreter, nodes, connections),
``restored``, until all have the checkpoint, and ``stepped``.

With ``--accuracy`` a PyTorch model trains on two and on three hosts, in rounds and saved at each epoch
(``examples/resuming/with_torch.py``): once undisturbed, and once with all processes of a host killed in its second
epoch and the job started again. Both have to end with the same accuracy.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

DEADLINE = 120.0
SETTLE_SECONDS = 20.0  # the guard of a launcher that was killed looks for its processes for up to ten
KINDS = ("worker", "node", "host", "coordinator")
PARTS = ("ended", "joined", "restored", "stepped")
TRAINING = Path(__file__).resolve().parent.parent / "examples" / "resuming" / "with_torch.py"
VICTIM = """
import json, os, signal, sys, time
began = time.time()
import multiverso as mv

place, steps, kind, killer, at = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), int(sys.argv[5])

def children(pid):
    found = [int(p) for p in open(f"/proc/{pid}/task/{pid}/children").read().split()]
    return found + [grandchild for child in found for grandchild in children(child)]

def is_worker(pid):
    with open(f"/proc/{pid}/environ", "rb") as file:
        return b"MULTIVERSO_WORKER_ID=" in file.read()

def note(what):
    with open(os.path.join(os.path.dirname(place), "notes"), "a") as file:
        file.write(json.dumps([what, mv.worker_id(), time.time()]) + "\\n")

def kill():
    note("killed")
    here = os.getppid()
    if kind == "worker":
        others = [p for p in children(here) if p != os.getpid() and is_worker(p)]
        os.kill((others or [os.getpid()])[0], signal.SIGKILL)
    elif kind == "host":
        for pid in [p for p in children(here) if p != os.getpid()] + [here, os.getpid()]:
            os.kill(pid, signal.SIGKILL)
    else:
        os.kill(here, signal.SIGKILL)

mv.init()
joined = time.time()
table = mv.ArrayTableHandler(10_000, dtype="int64")
with mv.checkpoint(place, every=5) as checkpoint:
    own = checkpoint.restore()
    restored = time.time()
    step = own["step"] if own else 0
    first = True
    while step < steps:
        table.add([1] * 10_000)
        step += 1
        if mv.restarts() == 0 and mv.worker_id() == killer and step == at:
            kill()
        checkpoint.step({"step": step})
        if first:
            note(f"begun {mv.restarts()} at {step}")
            note(["parts", mv.restarts(), began, joined, restored, time.time()])
            first = False
        time.sleep(0.01)
mv.barrier()
values = table.get()
print(json.dumps({"min": int(values.min()), "max": int(values.max()), "step": step}), flush=True)
mv.barrier()
mv.shutdown()
"""


def episode(seed: int, kind: str | None = None, workers: int = 4, steps: int = 60) -> dict[str, Any]:
    """Runs one job with one kill; returns what came of it.

    Raises:
        AssertionError: a law is broken.
    """
    choose = random.Random(seed)
    kind = kind or choose.choice(KINDS)
    killer = choose.randrange(workers // 2) + (0 if kind == "coordinator" else workers // 2)
    at = choose.randrange(1, steps)
    with tempfile.TemporaryDirectory(prefix="multiverso-chaos-") as folder:
        program, place = Path(folder, "victim.py"), Path(folder, "run")
        program.write_text(VICTIM)
        options = ["--hosts", 2, "-n", workers, "--max-restarts", 1, "--host-grace", 10]
        command = [sys.executable, "-m", "multiverso", "run", *options, program, place, steps, kind, killer, at]
        environ = {**os.environ, "CHAOS_EPISODE": folder}
        began = time.monotonic()
        with subprocess.Popen(
            list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ
        ) as job:
            try:
                out, err = job.communicate(timeout=DEADLINE)
            except subprocess.TimeoutExpired:
                job.send_signal(signal.SIGTERM)
                out, err = job.communicate()
                raise AssertionError(f"it hangs:\n{out}\n{err}") from None
        seconds = time.monotonic() - began
        said = f"seed {seed}, {kind}:\n{out}\n{err}"
        assert job.returncode == 0, said
        assert "the job is started again (1 of at most 1 times)" in err, said
        lines = [json.loads(line.partition("] ")[2]) for line in out.splitlines() if line.endswith("}")]
        assert [line["step"] for line in lines] == [steps] * workers, said
        assert len({(line["min"], line["max"]) for line in lines}) == 1, said
        # what was saved of a chunk may hold an add of the other host that a chunk with another home had not got then
        assert lines[0]["max"] - lines[0]["min"] <= steps, said
        notes = [json.loads(line) for line in Path(folder, "notes").read_text().splitlines()]
        killed = next(moment for what, _, moment in notes if what == "killed")
        again = [(what, moment) for what, _, moment in notes if str(what).startswith("begun 1")]
        moments = [what[2:] for what, _, _ in notes if what[:2] == ["parts", 1]]
        reached = [killed, *(max(each) for each in zip(*moments, strict=True))]
        manifest = json.loads((place / "manifest.json").read_text())
        whole = {f"generation-{generation['number']}" for generation in manifest["generations"]}
        left = {path.name for path in place.iterdir()} - whole - {"manifest.json", ".lock"}
        return {
            "seed": seed,
            "kind": kind,
            "at": at,
            "resumed_at": min(int(what.split()[3]) for what, _ in again),
            "on_seconds": round(max(moment for _, moment in again) - killed, 2),
            "parts": {
                part: round(then - before, 2) for part, before, then in zip(PARTS, reached, reached[1:], strict=False)
            },
            "seconds": round(seconds, 2),
            "adds_lost": workers * steps - lines[0]["min"],
            "files_left": sorted(left),
            "processes_left": processes_left(folder),
        }


def trained(hosts: int, *, killed: bool) -> dict[str, Any]:
    """Trains a model on so many hosts, with a host killed on the way or not.

    Raises:
        AssertionError: it did not end, or not where it was to.
    """
    with tempfile.TemporaryDirectory(prefix="multiverso-chaos-") as folder:
        command = [sys.executable, "-m", "multiverso", "run", "--hosts", hosts, "-n", 2 * hosts, "--max-restarts", 1]
        command += ["--timeout", 2 * DEADLINE, TRAINING, "--directory", Path(folder, "saved")]
        workers: dict[str, int] = {}
        accuracy, went_on = None, 0
        with subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, text=True) as job:
            assert job.stdout is not None
            for line in job.stdout:
                if found := re.search(r"worker (\d+) is process (\d+)", line):
                    workers.setdefault(found[1], int(found[2]))
                went_on += "goes on after epoch" in line
                if killed and "epoch 2 begins" in line:  # the last host's workers, and its launcher with the node
                    last = [workers[str(number)] for number in (2 * hosts - 2, 2 * hosts - 1)]
                    for pid in (parent_of(last[0]), *last):
                        os.kill(pid, signal.SIGKILL)
                    killed = False
                if found := re.search(r"accuracy=([\d.]+)", line):
                    accuracy = float(found[1])
        assert job.returncode == 0, f"the training on {hosts} hosts ended with {job.returncode}"
        return {"accuracy": accuracy, "workers_that_went_on": went_on}


def parent_of(pid: int) -> int:
    """Returns a process's parent."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def processes_left(folder: str) -> list[int]:
    """Returns those that do not end by themselves."""
    end = time.monotonic() + SETTLE_SECONDS
    while (found := processes_of(folder)) and time.monotonic() < end:
        time.sleep(0.02)
    return found


def processes_of(folder: str) -> list[int]:
    """Returns the processes of an episode that are still there."""
    mark, found = f"CHAOS_EPISODE={folder}".encode(), []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if int(path.name) != os.getpid() and mark in (path / "environ").read_bytes().split(b"\0"):
                found.append(int(path.name))
        except OSError:
            continue
    return found


def summary(episodes: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns what they have in common, by kind."""
    found = {}
    for kind in sorted({each["kind"] for each in episodes}):
        own = [each for each in episodes if each["kind"] == kind]
        waits = sorted(each["on_seconds"] for each in own)
        parts = {part: sorted(each["parts"][part] for each in own)[len(own) // 2] for part in PARTS}
        found[kind] = {
            "kills": len(own),
            "on_seconds_median": waits[len(waits) // 2],
            "on_seconds_most": waits[-1],
            "parts_median": parts,
            "adds_lost_most": max(each["adds_lost"] for each in own),
            "adds_twice_most": -min(each["adds_lost"] for each in own),
            "left_behind": sum(len(each["processes_left"]) + len(each["files_left"]) for each in own),
        }
    return found


def main() -> int:
    """Runs what the command line asks for; returns how many episodes failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--kind", choices=KINDS)
    parser.add_argument("--accuracy", action="store_true", help="train a model with and without a kill, too")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    episodes, failed = [], 0
    for seed in range(options.seed, options.seed + options.kills):
        try:
            episodes.append(episode(seed, options.kind))
            print(json.dumps(episodes[-1]), file=sys.stderr, flush=True)
        except AssertionError as error:
            failed += 1
            print(f"FAILED {error}", file=sys.stderr, flush=True)
    trainings = {
        hosts: {"undisturbed": trained(hosts, killed=False), "resumed": trained(hosts, killed=True)}
        for hosts in ((2, 3) if options.accuracy else ())
    }
    for each in trainings.values():
        failed += each["undisturbed"]["accuracy"] != each["resumed"]["accuracy"]
    result = {"failed": failed, "kinds": summary(episodes), "trainings": trainings, "episodes": episodes}
    print(json.dumps({name: result[name] for name in ("failed", "kinds", "trainings")}))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result, indent=1))
    return failed


if __name__ == "__main__":
    sys.exit(main())
