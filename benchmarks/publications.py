"""What publishing costs beside a plain copy, and reading; memory of many readers; bytes to other hosts. Prints JSON.

python benchmarks/publications.py [--megabytes 1500] [--readers 8] [--versions 500] [--hosts 3 --link 10mbit]

``publish_ratio``: a publish beside ``memmove`` of the same bytes, in turns. ``latest_us``: taking and releasing the
newest version. ``wake_us``: from a version's being current to a waiting reader of another process that has it, beside
the same with the whole ``publish``, and a bare wake from process to process. ``models_in_memory``: the proportional
memory of all processes (PSS), of which each reader has read every byte, in models; ``models_shared``: that of the
slots, without the publisher's own model and the interpreters. ``following``: AdamW at 3e-6 in bfloat16 on a small
language model (PyTorch), each version sent to other hosts: bytes as a part of the whole's.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import mmap
import os
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

import multiverso as mv
from multiverso.memory.words import bump_and_wake, load32, load64, store32, store64, wait_for_change
from namespaces import address_in_star, bytes_a_second, enter, inside, ip, star
from reporting import give_report

CUT_SECONDS = 6.0  # longer than a connection is silent before it ends: the chain of differences is cut, too
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
    with mv.subscribe(sys.argv[1], address=sys.argv[2], token=sys.argv[3], timeout_seconds=600) as subscription:
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
    """How long a waiting reader of another process sleeps on, and beside it in turns this machine's own wake."""
    weights, name = {"w": np.zeros(1000)}, f"wakes-{os.getpid()}"
    took, whole, bare = [], [], []
    place = mmap.mmap(-1, 4096)  # shared with a forked child: a word to sleep on, and when it woke
    word = ctypes.addressof(ctypes.c_char.from_buffer(place))
    if (sleeper := os.fork()) == 0:
        while True:
            while (seen := load32(word)) == load32(word + 4):
                wait_for_change(word, seen, 1.0)
            store64(word + 8, time.monotonic_ns())
            store32(word + 4, load32(word))
    with mv.Publication(name, like=weights) as publication:
        publication.publish(weights)
        make_current, current = publication._slots.make_current, []

        def stamped(version: int, slot: int) -> None:
            current.append(time.monotonic_ns())
            make_current(version, slot)

        publication._slots.make_current = stamped  # type: ignore[method-assign]
        with start(WAITER, name) as waiter:
            line_of(waiter)
            for _ in range(rounds):
                time.sleep(0.01)  # it sleeps again
                began = time.monotonic_ns()
                publication.publish(weights, wait_seconds=10)
                woken = int(line_of(waiter))
                took.append((woken - current.pop()) / 1e3)
                whole.append((woken - began) / 1e3)
                time.sleep(0.01)
                began = time.monotonic_ns()
                bump_and_wake(word)
                while load32(word + 4) != load32(word):
                    time.sleep(0.0005)
                bare.append((load64(word + 8) - began) / 1e3)
            waiter.kill()
    os.kill(sleeper, signal.SIGKILL)
    os.waitpid(sleeper, 0)
    found = {"wake": took, "wake_with_publish": whole, "wake_of_the_machine": bare}
    ends = {f"{name}_us_p90": sorted(each)[rounds * 9 // 10] for name, each in found.items()}
    return {f"{name}_us": statistics.median(each) for name, each in found.items()} | ends


def memory(megabytes: int, readers: int) -> dict[str, float]:
    """Proportional memory of a publisher with a model of its own, and of readers that have read everything."""
    weights, name = {"w": np.ones(megabytes * 500_000, np.uint16)}, f"memory-{os.getpid()}"
    with mv.Publication(name, like=weights) as publication:
        for _ in range(3):
            publication.publish(weights)
        programs = [start(READER, name) for _ in range(readers)]
        for program in programs:
            line_of(program)
        pids = [os.getpid(), *(program.pid for program in programs)]
        shared, all_of_it = (sum(_part(pid, kind) for pid in pids) for kind in ("Pss_Shmem:", "Pss:"))
        for program in programs:
            with program:
                program.kill()
    model = megabytes * 1e6
    return {"readers": readers, "models_shared": shared / model, "models_in_memory": all_of_it / model}


def _part(pid: int, kind: str) -> float:
    """Bytes of memory of a kind that a process has its part of."""
    rows = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(float(row.split()[1]) * 1024 for row in rows if row.startswith(kind))


def following(versions: int, hosts: int, link: str | None) -> dict[str, Any]:
    """Sends each version of a real training to other hosts, in namespaces with limited links if a rate is given."""
    if link is None:
        return _trained(versions, [[]] * hosts, "127.0.0.1")
    with star(link, 1 + hosts) as (here, *others):
        enter(here)
        prefixes = [["ip", "netns", "exec", other] for other in others]
        found = _whole(prefixes[0], link)
        return found | _trained(versions, prefixes, address_in_star(0), here, others[0])


class Host:
    """A reader on another host, with a state directory of its own, as hosts have: what it has got, by version."""

    def __init__(self, stack: contextlib.ExitStack, name: str, place: str, token: str, prefix: list[str]) -> None:
        home = stack.enter_context(tempfile.TemporaryDirectory())
        self.got: dict[int, int] = {}
        self._came = threading.Condition()
        self._process = stack.enter_context(start(FOLLOWER, name, place, token, prefix=prefix, XDG_STATE_HOME=home))
        stack.callback(self._process.kill)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        while line := line_of(self._process):
            version, sums = map(int, line.split())
            with self._came:
                self.got[version] = sums
                self._came.notify()

    def wait(self, version: int, seconds: float = 600) -> bool:
        """Waits until it has a version; whether it has."""
        with self._came:
            return self._came.wait_for(lambda: version in self.got, seconds)


def _whole(prefix: list[str], link: str) -> dict[str, Any]:
    """How long a version takes of which all has changed, beside the time that the link needs for its bytes."""
    nbytes = int(min(100e6, 2 * bytes_a_second(link)))
    draw, name, token = np.random.default_rng(0), f"whole-{os.getpid()}", secrets.token_hex()
    weights = {"w": draw.integers(0, 256, nbytes, np.uint8)}
    took = []
    with mv.Publication(name, like=weights, slots=4) as publication, contextlib.ExitStack() as stack:
        place = "{}:{}".format(*publication.forward(token=token, address=address_in_star(0)))
        version = publication.publish(weights)
        assert version is not None
        host = Host(stack, name, place, token, prefix)
        host.wait(version)
        for _ in range(7):
            weights["w"] += np.uint8(1)
            began = time.perf_counter()
            version = publication.publish(weights, wait_seconds=600)
            assert version is not None
            assert host.wait(version)
            took.append(time.perf_counter() - began)
    beside = [seconds * bytes_a_second(link) / nbytes for seconds in took]
    return {
        "link": link,
        "whole_megabytes": nbytes / 1e6,
        "whole_beside_link": {"least": min(beside), "median": statistics.median(beside)},
    }


def _trained(
    versions: int, prefixes: list[list[str]], address: str, here: str | None = None, cut: str | None = None
) -> dict[str, Any]:
    """AdamW: every host gets every version, but for one that comes late, and one whose link is cut now and then."""
    import torch

    torch.manual_seed(0)
    torch.set_num_threads(1)  # steps are small, and threads that wait for each other take what the hosts need
    text = torch.tensor(list(Path(__file__).read_bytes()))
    layer = torch.nn.TransformerEncoderLayer(256, 4, 1024, 0.0, batch_first=True)
    model = torch.nn.Sequential(
        torch.nn.Embedding(256, 256), torch.nn.TransformerEncoder(layer, 2), torch.nn.Linear(256, 256)
    ).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-6)
    name, token = f"following-{os.getpid()}", secrets.token_hex()
    sums: dict[int, int] = {}
    cuts = 0
    with mv.Publication(name, like=model, slots=3 + len(prefixes)) as publication, contextlib.ExitStack() as stack:
        place = "{}:{}".format(*publication.forward(token=token, address=address))
        seen = stack.enter_context(mv.subscribe(name))
        forwarder = publication._forwarder
        assert forwarder is not None
        late = len(prefixes) - 1 or None
        hosts = [Host(stack, name, place, token, prefix) for prefix in prefixes[:late]]
        on_link, longest, began = _sent(here), 0.0, time.perf_counter()
        down = began  # when the link went down, or up
        for number in range(versions):
            if number == versions // 2 and late:
                hosts.append(Host(stack, name, place, token, prefixes[late]))
            is_cut = cut is not None and number % 50 in range(40, 45)
            if cut is not None and number % 50 in (40, 45):
                if not is_cut:
                    time.sleep(max(0.0, down + CUT_SECONDS - time.perf_counter()))
                ip("-n", cut, "link", "set", "v", "down" if is_cut else "up")
                down = time.perf_counter()
                cuts += is_cut
                print(f"{number} versions, {forwarder.sent_bytes / 1e6:.1f} MB", file=sys.stderr)
            at = torch.randint(0, len(text) - 33, (8,))
            batch = torch.stack([text[i : i + 33] for i in at])
            loss = torch.nn.functional.cross_entropy(model(batch[:, :-1]).float().transpose(1, 2), batch[:, 1:])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            called = time.perf_counter()
            version = publication.publish(model, wait_seconds=60)
            longest = max(longest, time.perf_counter() - called)
            assert version is not None
            with seen.latest() as snapshot:
                sums[version] = sum(snapshot.checksums.values()) % 2**64
                whole = snapshot.layout.nbytes
            for host in hosts[is_cut:]:
                assert host.wait(version)
        seconds = time.perf_counter() - began
        on_link = _sent(here) - on_link
        assert hosts[0].wait(max(sums))
    got = sum(len(host.got) for host in hosts)
    return {
        "hosts": 1 + len(hosts),
        "versions": versions,
        "got_by_each": [len(host.got) for host in hosts],
        "wrong": sum(sums[version] != got for host in hosts for version, got in host.got.items()),
        "cuts": cuts,
        "late": int(late is not None),
        "megabytes": whole / 1e6,
        # with the first version of each host, and what a cut and a late one have cost
        "part_of_the_whole": forwarder.sent_bytes / whole / got,
        "part_of_the_whole_on_the_link": on_link / whole / got if here is not None else None,
        "seconds_a_version_with_its_step": seconds / versions,
        "longest_publish_seconds": longest,
    }


def _sent(host: str | None) -> int:
    """Bytes that a host has sent over its link, headers and all."""
    return int(inside(host, "cat", "/sys/class/net/v/statistics/tx_bytes")) if host is not None else 0


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
        found |= cost(options.megabytes, options.rounds) | wakes(300) | memory(options.megabytes, options.readers)
    found["following"] = following(options.versions, options.hosts, options.link)
    give_report(found, options.json)
    return int(found["following"]["wrong"] > 0)


if __name__ == "__main__":
    sys.exit(main())
