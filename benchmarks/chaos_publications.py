"""Kills readers and publishers of a publication: prints JSON, ends with 1 if anything is wrong.

python benchmarks/chaos_publications.py [--kills 1000] [--reads 100000] [--seed 1] [--megabytes 4] [--readers 8]

What has to hold: whatever a reader takes is whole and of one version, by the checksum of every tensor, which is worked
out anew at each read; versions never go back; a publisher is never held up by the dead; nothing is left behind.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import multiverso as mv
from multiverso.wire import publications as names

SECONDS = 120.0
TENSORS = 8
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["multiverso.publications"])


def model(step: int, megabytes: float) -> dict[str, Any]:
    """Every number of it is the step's."""
    count = int(megabytes * 1e6 / 2 / TENSORS)
    return {f"layer{number}": np.full(count, step % 60_000, np.uint16) for number in range(TENSORS)}


def publish(name: str, megabytes: float, pipe: Any) -> None:
    """A publisher: until it is killed or told to stop."""
    weights, step = model(0, megabytes), 0
    while True:
        try:
            publication = mv.Publication(name, like=weights, slots=3)
            break
        except mv.errors.StartupError:  # the one before is not quite gone
            time.sleep(0.001)
    with publication:
        pipe.send("ready")
        while not pipe.poll(0):
            step += 1
            for array in weights.values():
                array[:] = step % 60_000
            publication.publish(weights, step=step)
        pipe.recv()
        pipe.send(publication.left_out)


def read(name: str, pipe: Any) -> None:
    """A reader: takes versions and looks at all of them, until it is killed or told to stop."""
    seen, reads, wrong = 0, 0, 0
    with mv.subscribe(name, timeout_seconds=SECONDS) as subscription:
        pipe.send("ready")
        while not pipe.poll(0):
            with subscription.latest() as snapshot:
                wrong += snapshot.version < seen
                seen, reads = snapshot.version, reads + 1
                try:
                    snapshot.verify()
                except mv.errors.SnapshotError:
                    wrong += 1
                first = (snapshot.step or 0) % 60_000
                wrong += any(array[0] != first or array[-1] != first for array in snapshot.values())
            if reads % 50 == 0:
                pipe.send((reads, wrong))
                reads = wrong = 0
        pipe.recv()
    pipe.send((reads, wrong))
    pipe.send("end")


class Process:
    """One process with its pipe."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=function, args=(*arguments, theirs))
        self.process.start()
        theirs.close()
        assert self.pipe.poll(SECONDS), "it did not begin"
        assert self.pipe.recv() == "ready"

    def kill(self) -> None:
        """SIGKILL."""
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join()
        self.process.close()


def main() -> int:
    """Prints what was seen."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--reads", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--megabytes", type=float, default=4.0)
    parser.add_argument("--readers", type=int, default=8)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    draw, name = random.Random(options.seed), f"chaos-{os.getpid()}"
    publisher = Process(publish, name, options.megabytes)
    readers = [Process(read, name) for _ in range(options.readers)]
    kills = {"reader": 0, "publisher": 0}
    reads = wrong = 0
    longest, began = 0.0, time.monotonic()
    while sum(kills.values()) < options.kills or reads < options.reads:
        for reader in readers:
            while reader.pipe.poll(0):
                more, bad = reader.pipe.recv()
                reads, wrong = reads + more, wrong + bad
        time.sleep(draw.random() * 0.02)
        if sum(kills.values()) >= options.kills:
            continue
        if draw.random() < 0.3:
            before = time.monotonic()
            publisher.kill()
            publisher = Process(publish, name, options.megabytes)
            longest = max(longest, time.monotonic() - before)
            kills["publisher"] += 1
        else:
            chosen = draw.randrange(len(readers))
            readers[chosen].kill()
            readers[chosen] = Process(read, name)
            kills["reader"] += 1
    for reader in readers:
        reader.pipe.send("stop")
        while (said := reader.pipe.recv()) != "end":
            reads, wrong = reads + said[0], wrong + said[1]
        reader.process.join()
    publisher.pipe.send("stop")
    left_out = publisher.pipe.recv()
    publisher.process.join()
    left = names.addresses(name, None)
    result = {
        "kills": kills,
        "reads": reads,
        "wrong": wrong,
        "left_out_by_the_last_publisher": left_out,
        "left_behind": len(left),
        "megabytes": options.megabytes,
        "readers": options.readers,
        "longest_seconds_to_another_publisher": round(longest, 3),
        "seconds": round(time.monotonic() - began, 1),
    }
    text = json.dumps(result, indent=1)
    print(text)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(f"{text}\n")
    return int(wrong > 0 or bool(left))


if __name__ == "__main__":
    sys.exit(main())
