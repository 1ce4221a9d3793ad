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
from simulated.network import Line
from simulated.world import CHUNK_BYTES, Memory, Scene, World

CHUNKS = 40
CHUNK = 1 << 20
RATE = 125e6  # 1 Gbit/s
ADD_SECONDS = 0.01
_SCALE = (CHUNK_BYTES + HEADER_BYTES) / (CHUNK + HEADER_BYTES)


def model(hosts: int) -> dict[str, float]:
    """What follows from the bytes alone."""
    out = 2 * CHUNKS * CHUNK * (hosts - 1) / hosts
    return {
        "pass_seconds": out / RATE,
        "connections_of_a_host": hosts - 1,
        "connections": hosts * (hosts - 1) // 2,
    }


def measure(hosts: int, passes: float = 6.0, seed: int = 1) -> dict[str, Any]:
    """Runs some passes; returns seconds and bytes as they would be on hosts of that kind."""
    line = Line(latency=1e-4, rate=RATE * _SCALE, shared=True)
    elements = CHUNKS * CHUNK_BYTES // 4
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
    )
    world = World(scene, Random(seed), Memory())
    span = passes * model(hosts)["pass_seconds"]
    added = [0]
    behind: list[float] = []

    def add(number: int) -> None:
        host = world.hosts[number]
        host.copies[1].shard.values()[:] += 1
        host.changes[1].version += 1
        added[0] += 1
        if number == 0 and world.clock.now > span / 3:
            missing = [added[0] - float(np.mean(other.copies[1].shard.values())) for other in world.hosts]
            behind.append(float(np.mean(missing)) * ADD_SECONDS / (hosts - 1))
        if world.clock.now < span:
            world.clock.after(ADD_SECONDS, lambda: add(number))

    for number in range(hosts):
        world._later(ADD_SECONDS, add, number)
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
        **{f"model_{name}": value for name, value in model(hosts).items()},
    }


if __name__ == "__main__":
    print(json.dumps([measure(int(number)) for number in sys.argv[1:] or ("2", "3", "10", "30")], indent=1))
