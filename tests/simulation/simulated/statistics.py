"""Running means and variances on simulated hosts: whatever the network does, each stays between what the hosts have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

import numpy as np

from simulated.world import Host, Memory, World, random_scene

BEGIN = 1.0


class Statistics(World):
    """Each host's workers pull all values towards the host's own, from 1 to almost nothing."""

    def own(self, host: Host) -> float:
        """What a host's workers see of the statistic."""
        return 0.01 * (host.number + 1)

    def add(self, host: Host, table: int) -> None:
        """A worker brings the values part of the way to its own."""
        if not self._when_up(host, lambda: self.add(host, table)):
            return
        values = host.copies[table].shard.values()
        values += (self.own(host) - values) * values.dtype.type(self.random.choice((0.3, 0.9, 1.0)))
        host.changes[table].version += 1
        self._adds_left -= 1
        self.look()

    def look(self) -> None:
        """Raises AssertionError where a value is none that hosts could have brought it to."""
        for host in self.hosts:
            for table, copy in host.copies.items():
                values = copy.shard.values()
                low, high = self.own(self.hosts[0]), BEGIN
                assert (values >= low - 1e-6).all(), f"table {table} of host {host.number}: {values}"
                assert (values <= high + 1e-6).all(), f"table {table} of host {host.number}: {values}"

    def run(self) -> None:
        """Lets the workers add beside all faults, then all come to a barrier, and have the same."""
        for table in self.hosts[0].copies:  # the master's value, which is there before anybody trains
            self.hosts[0].copies[table].shard.values()[:] = BEGIN
            self.hosts[0].changes[table].version += 1
        self.barrier()
        scene = self.scene
        self._adds_left = scene.adds * scene.hosts * len(scene.elements)
        for host in self.hosts:
            for table in host.copies:
                for _ in range(scene.adds):
                    self._later(scene.seconds, self.add, host, table)
        self.schedule_faults()
        self._until(lambda: self._adds_left == 0, "the adds")
        self.barrier()
        self.look()
        for table, first in self.hosts[0].copies.items():
            for host in self.hosts:
                values = host.copies[table].shard.values()
                assert np.array_equal(values, first.shard.values()), f"table {table} differs: {values}"


def run(seed: int, memory: Memory, trace: Callable[[str], None] | None = None) -> Statistics:
    """Runs the schedule of a seed; an AssertionError says what is wrong with it."""
    random = Random(seed)
    scene = random_scene(random)
    scene = replace(scene, dtypes=("float32",) * len(scene.elements), crashes=0, wire="native", convex=True)
    world = Statistics(scene, random, memory, trace)
    world.run()
    return world
