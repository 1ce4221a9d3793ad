"""Staleness, bytes and the time to settle for a number of hosts: ``python -m simulated.staleness [HOSTS...]``, JSON.

The links' own code moves a model of 40 chunks of 1 MiB between hosts whose workers add all the while. A chunk stands
here for 16 numbers, and the rate is scaled by that. Beside each figure is what the model says::

    a pass moves 2 M (H - 1) / H bytes out of each host, so it takes P = 2 M (H - 1) / (H R) at the rate R
"""

from __future__ import annotations

import json
import sys
from random import Random
from typing import Any

import numpy as np

from multiverso.hosts.frames import HEADER_BYTES
from multiverso.hosts.pace import Every
from simulated.network import Line
from simulated.world import CHUNK_BYTES, Memory, Scene, World

CHUNKS = 40
CHUNK = 1 << 20
RATE = 125e6  # 1 Gbit/s
ADD_SECONDS = 0.01
_SCALE = (CHUNK_BYTES + HEADER_BYTES) / (CHUNK + HEADER_BYTES)


def model(hosts: int, chunks: int = CHUNKS, rate: float = RATE) -> dict[str, float]:
    """What follows from the bytes alone."""
    out = 2 * chunks * CHUNK * (hosts - 1) / hosts
    return {
        "pass_seconds": out / rate,
        "connections_of_a_host": hosts - 1,
        "connections": hosts * (hosts - 1) // 2,
    }


def measure(
    hosts: int,
    *,
    chunks: int = CHUNKS,
    rate: float = RATE,
    every: float = 0.0,
    add_seconds: float = ADD_SECONDS,
    seconds: float | None = None,
    seed: int = 1,
) -> dict[str, Any]:
    """Lets hosts exchange a model for some seconds, or six passes; returns seconds and bytes as they would be there.

    Args:
        hosts: how many.
        chunks: how large the model is, in MiB.
        rate: bytes that a host can send in a second.
        every: seconds from one pass to the next; 0: without pause.
        add_seconds: from one add of a host to the next.
        seconds: how long.
        seed: decides when what happens at no given moment does.
    """
    line = Line(latency=1e-4, rate=rate * _SCALE, shared=True)
    elements = chunks * CHUNK_BYTES // 4
    scene = Scene(
        hosts=hosts,
        elements=(elements,),
        line=line,
        adds=0,
        cuts=0,
        stalls=0,
        silences=0,
        replays=0,
        window=8,
        every=Every(seconds=every),
    )
    world = World(scene, Random(seed), Memory())
    span = 6 * model(hosts, chunks, rate)["pass_seconds"] if seconds is None else seconds
    added = [0]
    behind: list[float] = []

    def add(number: int) -> None:
        host = world.hosts[number]
        host.copies[1].shard.values()[:] += 1
        host.changes[1].version += 1
        added[0] += 1
        if number == 0 and world.clock.now > span / 3:
            missing = [added[0] - float(np.mean(other.copies[1].shard.values())) for other in world.hosts]
            behind.append(float(np.mean(missing)) * add_seconds / (hosts - 1))
        if world.clock.now < span:
            world.clock.after(add_seconds, lambda: add(number))

    for number in range(hosts):
        world._later(add_seconds, add, number)
    while world.clock.now < span:
        world.clock.step()
    sent = sum(link.traffic.bytes_sent for host in world.hosts for link in host.links.values())
    ended = world.clock.now
    world.barrier()
    return {
        "hosts": hosts,
        "staleness_seconds": float(np.mean(behind)),
        "megabytes_a_second_of_a_host": sent / _SCALE / hosts / ended / 1e6,
        "settle_seconds": world.clock.now - ended,
        **{f"model_{name}": value for name, value in model(hosts, chunks, rate).items()},
    }


if __name__ == "__main__":
    print(json.dumps([measure(int(number)) for number in sys.argv[1:] or ("2", "3", "10", "30")], indent=1))
