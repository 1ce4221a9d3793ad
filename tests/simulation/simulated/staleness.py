"""Staleness, bytes and the time to settle for a number of hosts: ``python -m simulated.staleness [HOSTS...]``, JSON.

The links' own code moves a model of 40 MiB between hosts whose workers add all the while. 16 numbers stand here for a
chunk, and the rate is scaled by that. Beside each figure is what the model says::

    a pass moves 2 M (H - 1) / H bytes out of each host, so it takes P = 2 M (H - 1) / (H R) at the rate R

From 100 hosts on (``--one-home`` for any number) one home is simulated with all other hosts, which are homes of a chunk
or of none, too. Its card carries all that it would; the others' cards carry only what goes to it, so that frames wait
in one queue instead of two. With 20 hosts of one chunk each, staleness is a tenth higher that way, and settling takes
a quarter longer.
"""

from __future__ import annotations

import json
import sys
from random import Random
from typing import Any

import numpy as np

from multiverso.hosts.options import Every
from multiverso.hosts.peer.frames import HEADER_BYTES
from multiverso.hosts.values.copies import chunk_bytes_of
from simulated.network import Line
from simulated.world import CHUNK_BYTES, Memory, Scene, World

MODEL_BYTES = 40 << 20
RATE = 125e6  # 1 Gbit/s
ADD_SECONDS = 0.01


def model(hosts: int, nbytes: int = MODEL_BYTES, rate: float = RATE) -> dict[str, float]:
    """What follows from the bytes alone."""
    out = 2 * nbytes * (hosts - 1) / hosts
    return {"pass_seconds": out / rate, "connections_of_a_host": hosts - 1, "connections": hosts * (hosts - 1) // 2}


def measure(
    hosts: int,
    *,
    nbytes: int = MODEL_BYTES,
    rate: float = RATE,
    one_home: bool = False,
    every: float = 0.0,
    add_seconds: float = ADD_SECONDS,
    seconds: float | None = None,
    seed: int = 1,
) -> dict[str, Any]:
    """Lets hosts exchange a model for some seconds, or six passes; returns seconds and bytes as they would be there.

    Args:
        hosts: how many.
        nbytes: how large the model is.
        rate: bytes that a host can send in a second.
        one_home: simulate one home only, with all that ask it.
        every: seconds from one pass to the next; 0: without pause.
        add_seconds: from one add of a host to the next.
        seconds: how long.
        seed: decides when what happens at no given moment does.
    """
    chunk = chunk_bytes_of(nbytes, hosts)
    scale = (CHUNK_BYTES + HEADER_BYTES) / (chunk + HEADER_BYTES)
    line = Line(latency=1e-4, rate=rate * scale, shared=True)
    pieces = -(-nbytes // chunk)
    scene = Scene(
        hosts=hosts,
        elements=(pieces * CHUNK_BYTES // 4,),
        line=line,
        star=one_home,
        adds=0,
        cuts=0,
        stalls=0,
        silences=0,
        replays=0,
        window=8,
        every=Every(seconds=every),
    )
    world = World(scene, Random(seed), Memory())
    span = 6 * model(hosts, nbytes, rate)["pass_seconds"] if seconds is None else seconds
    counted = CHUNK_BYTES // 4 if one_home else scene.elements[0]
    added = [0]
    behind: list[float] = []

    def add(number: int) -> None:
        host = world.hosts[number]
        host.copies[1].shard.values()[:] += 1
        host.changes[1].version += 1
        added[0] += 1
        if number == 0 and world.clock.now > span / 3:
            seen = [host.copies[1].shard.values()[:counted] for host in world.hosts]
            missing = [added[0] - float(np.mean(values)) for values in seen]
            behind.append(float(np.mean(missing)) * add_seconds / (hosts - 1))
        if world.clock.now < span:
            world.clock.after(add_seconds, lambda: add(number))

    for number in range(hosts):
        world._later(add_seconds, add, number)
    while world.clock.now < span:
        world.clock.step()
    sending = world.hosts[:1] if one_home else world.hosts
    numbers = [host.number for host in sending]
    sent = sum(len(data) for (by, _), kept in world.history.items() if by in numbers for data in kept) / len(sending)
    ended = world.clock.now
    world.barrier()
    return {
        "hosts": hosts,
        "staleness_seconds": float(np.mean(behind)),
        "megabytes_a_second_of_a_host": sent / scale / ended / 1e6,
        "settle_seconds": world.clock.now - ended,
        **{f"model_{name}": value for name, value in model(hosts, nbytes, rate).items()},
    }


if __name__ == "__main__":
    numbers = [int(word) for word in sys.argv[1:] if word != "--one-home"] or [2, 3, 10, 30, 100, 1000]
    force = "--one-home" in sys.argv
    print(json.dumps([measure(number, one_home=force or number >= 100) for number in numbers], indent=1))
