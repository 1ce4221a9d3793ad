"""Kills readers and publishers of a publication: prints JSON, ends with 1 if anything is wrong.

python benchmarks/chaos_publications.py [--kills 1000] [--reads 100000] [--seed 1] [--megabytes 4] [--readers 8]
python benchmarks/chaos_publications.py --megabytes 1500 --tensors 400 --whole-every 500 --slots 2 --publishers 0.05
    --pause 1 --rest 0.05

What has to hold: whatever a reader takes is whole and of one version; versions never go back; a publisher is never held
up by the dead; nothing is left behind. Each read looks at the publisher's checksums of all tensors, which are equal
where all are of one version, and at the first and last number of each tensor, and works checksums out anew: of all
tensors, or, where the model is too large for that, of a drawn one, and of all at one read of so many (--whole-every).

``models_in_memory`` is the proportional memory (PSS) of all processes, in models, the publisher's own with it, and
``models_shared`` that of what is shared; looked at between two kills, the median and the most. A publisher that follows
a dead one has memory of its own while readers still have the dead one's.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import signal
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from multiverso.errors import StartupError
from multiverso.kernels import publications as kernels
from multiverso.publications import Publication, subscribe
from multiverso.wire import publications as names
from reporting import give_report

SECONDS = 600.0
LOOK_SECONDS = 10.0  # between two looks at the memory of all processes
REPORTED = 5  # reads at a time: those that the killed had not reported count for nothing
NUMBERS = 60_000  # of which one is in all places of a version
context = multiprocessing.get_context("fork")  # of a process without threads, which has all kernels


def publish(name: str, options: argparse.Namespace, pipe: Any) -> None:
    """A publisher: until it is killed or told to stop. Every number of a version is the step's."""
    numbers = np.zeros((options.tensors, int(options.megabytes * 1e6 / 2 / options.tensors)), np.uint16)
    weights = {f"layer{number}": row for number, row in enumerate(numbers)}
    while True:
        try:
            publication = Publication(name, like=weights, slots=options.slots)
            break
        except StartupError:  # the one before is not quite gone
            time.sleep(0.001)
    with publication:
        published = step = 0
        while not pipe.poll(options.pause):
            step += 1
            numbers[:] = step % NUMBERS
            published += publication.publish(weights, step=step) is not None
            if step == 1:
                pipe.send("ready")
        pipe.recv()
        pipe.send((published, publication.left_out))


def read(name: str, options: argparse.Namespace, pipe: Any) -> None:
    """A reader: takes versions and looks at them, until it is killed or told to stop."""
    seen, reads, hashed, wrong = 0, 0, 0, 0
    draw, add_up = random.Random(os.getpid()), kernels.summed.compiled()
    with subscribe(name, timeout_seconds=SECONDS) as subscription:
        while not pipe.poll(options.rest):
            with subscription.latest() as snapshot:
                wrong += snapshot.version < seen
                seen, reads = snapshot.version, reads + 1
                tensors, sums = snapshot.layout.tensors, snapshot.sums
                looked_at = tensors if draw.randrange(options.whole_every) == 0 else [draw.choice(tensors)]
                for tensor in looked_at:
                    address = snapshot.bytes_of(tensor).ctypes.data
                    wrong += add_up(address, tensor.words, 0) != sums[0]
                hashed += sum(tensor.nbytes for tensor in looked_at)
                ends = [place // 2 for each in tensors for place in (each.offset, each.offset + each.nbytes - 2)]
                numbers = snapshot._bytes().view(np.uint16)[ends]
                wrong += bool((numbers != (snapshot.step or 0) % NUMBERS).any() or (sums != sums[0]).any())
            if reads == REPORTED:
                pipe.send((reads, hashed, int(wrong)))
                reads = hashed = wrong = 0
        pipe.recv()
    pipe.send((reads, hashed, int(wrong)))
    pipe.send("end")


def memory_of(pids: list[int | None], kind: str) -> int:
    """Bytes that these processes have, each of what they share in parts."""
    rows = [row for pid in pids for row in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()]
    return sum(int(row.split()[1]) * 1024 for row in rows if row.startswith(kind))


class Process:
    """One process with its pipe."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=function, args=(*arguments, theirs))
        self.process.start()
        self.begun = False
        theirs.close()

    def begin(self, seconds: float = SECONDS) -> bool:
        """Waits until it has published; whether it has."""
        if not self.begun and self.pipe.poll(seconds):
            self.begun = self.pipe.recv() == "ready"
        return self.begun

    def kill(self) -> None:
        """SIGKILL."""
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGKILL)

    def join(self) -> None:
        """After `kill`: its memory is gone, too."""
        self.process.join()
        self.process.close()


def main() -> int:
    """Prints what was seen."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--reads", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--megabytes", type=float, default=4.0)
    parser.add_argument("--tensors", type=int, default=8)
    parser.add_argument(
        "--whole-every", type=int, default=1, help="all checksums are worked out at one read of so many"
    )
    parser.add_argument("--readers", type=int, default=8)
    parser.add_argument("--slots", type=int, default=3)
    parser.add_argument("--publishers", type=float, default=0.3, help="part of the kills that hit the publisher")
    parser.add_argument("--pause", type=float, default=0.002, help="seconds from one version to the next")
    parser.add_argument(
        "--rest", type=float, default=0.002, help="seconds between two reads: who begins needs a processor"
    )
    parser.add_argument("--seconds", type=float, default=3600.0, help="after which it ends in any case")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    for kernel in (
        kernels.pin,
        kernels.unpin,
        kernels.free_slot,
        kernels.make_current,
        kernels.copy_summed,
        kernels.summed,
    ):
        kernel.compiled()
    draw, name = random.Random(options.seed), f"chaos-{os.getpid()}"
    publisher = Process(publish, name, options)
    assert publisher.begin(), "no publisher began"
    readers = [Process(read, name, options) for _ in range(options.readers)]
    kills = {"reader": 0, "publisher": 0}
    reads = hashed = wrong = 0
    taken: list[tuple[int, int]] = []
    longest, began = 0.0, time.monotonic()
    killed = began  # the last publisher
    while (done := sum(kills.values())) < options.kills or reads < options.reads:
        for reader in readers:
            while reader.pipe.poll(0):
                more = reader.pipe.recv()
                reads, hashed, wrong = reads + more[0], hashed + more[1], wrong + more[2]
        passed = time.monotonic() - began
        if passed > options.seconds:
            break
        if publisher.begun and passed >= len(taken) * LOOK_SECONDS:
            pids = [each.process.pid for each in (publisher, *readers)]
            taken.append((memory_of(pids, "Pss:"), memory_of(pids, "Pss_Shmem:")))
            print(f"{passed:.0f} s: {kills}, {reads} reads, {wrong} wrong", file=sys.stderr)
        time.sleep(draw.random() * 0.02)
        if not publisher.begun and publisher.begin(0):
            longest = max(longest, time.monotonic() - killed)
        if done >= options.kills or done * options.reads > reads * options.kills + options.reads:
            continue  # kills go evenly with the reads
        if draw.random() < options.publishers:
            if publisher.begun:  # while one begins, readers are killed
                killed = time.monotonic()
                publisher.kill()
                publisher.join()
                publisher = Process(publish, name, options)
                kills["publisher"] += 1
        else:
            chosen = draw.sample(range(len(readers)), draw.randint(1, len(readers)))
            ended = [readers[number] for number in chosen]
            for reader in ended:
                reader.kill()
            for number in chosen:
                readers[number] = Process(read, name, options)
            for reader in ended:
                reader.join()
            kills["reader"] += len(chosen)
    for reader in readers:
        reader.pipe.send("stop")
        while (said := reader.pipe.recv()) != "end":
            reads, hashed, wrong = reads + said[0], hashed + said[1], wrong + said[2]
        reader.process.join()
    assert publisher.begin(), "no publisher began"
    publisher.pipe.send("stop")
    published, left_out = publisher.pipe.recv()
    publisher.process.join()
    left = names.addresses(name, None)
    whole, shared = ([each / options.megabytes / 1e6 for each in kind] for kind in zip(*taken, strict=True))
    result = {
        "kills": kills,
        "reads": reads,
        "wrong": wrong,
        "hashed_anew_terabytes": round(hashed / 1e12, 3),
        "published_and_left_out_by_the_last_publisher": [published, left_out],
        "left_behind": len(left),
        "megabytes": options.megabytes,
        "tensors": options.tensors,
        "readers": options.readers,
        "slots": options.slots,
        "models_in_memory": {"median": round(statistics.median(whole), 2), "most": round(max(whole), 2)},
        "models_shared": {"median": round(statistics.median(shared), 2), "most": round(max(shared), 2)},
        "longest_seconds_to_another_publisher": round(longest, 3),
        "seconds": round(time.monotonic() - began, 1),
    }
    give_report(result, options.json)
    return int(wrong > 0 or bool(left))


if __name__ == "__main__":
    sys.exit(main())
