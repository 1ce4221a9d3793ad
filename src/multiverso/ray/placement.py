"""Reserves room on a Ray cluster for all workers of a job at once."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from multiverso.errors import StartupError
from multiverso.ray.nodes import START_SECONDS, Host, hosts_at, hosts_of


@dataclass(frozen=True)
class Placement:
    """The room that Ray has reserved.

    Attributes:
        hosts: the hosts, and which workers are on each.
        places: for each worker, what makes Ray run it there.
    """

    hosts: tuple[Host, ...]
    places: tuple[Any, ...]


@contextlib.contextmanager
def placement(
    workers: int, resources: Mapping[str, float], strategy: str, whole: bool, seconds: float
) -> Iterator[Placement]:
    """Gives room for all workers, until the context ends: a job never waits for its last worker with the others there.

    Args:
        workers: how many.
        resources: what each takes.
        strategy: how Ray spreads them over hosts.
        whole: whether Ray is to find room for all workers of a host together when it has lost that host.
        seconds: how long to wait for it.

    Raises:
        StartupError: the cluster does not have that much.
    """
    what = f"{workers} times {dict(resources)}, placed by {strategy}"
    with _group([dict(resources)] * workers, strategy, what, seconds) as group:
        placed = _placed(group)
        order = sorted(placed, key=lambda bundle: (list(placed.values()).index(placed[bundle]), bundle))
        hosts = hosts_of([placed[bundle] for bundle in order])
        counts = [len(host.workers) for host in hosts]
        if not whole or max(counts) == 1 or len(hosts) == 1:
            yield _placement(hosts, group, order)
            return
    # Ray moves each bundle of a lost host by itself: what has to stay together has to be one
    bundles = [{name: count * amount for name, amount in resources.items()} for count in counts]
    what = f"{' and '.join(map(str, counts))} times {dict(resources)}, each of these on one host"
    with _group(bundles, "SPREAD", what, seconds) as group:
        placed = _placed(group)
        of_workers = [bundle for bundle, count in enumerate(counts) for _ in range(count)]
        numbers = iter(range(workers))
        on = [(placed[bundle], tuple(itertools.islice(numbers, count))) for bundle, count in enumerate(counts)]
        yield _placement(hosts_at(on), group, of_workers)  # two on one machine are two hosts all the same


def _placement(hosts: Sequence[Host], group: PlacementGroup, bundles: Sequence[int]) -> Placement:
    places = tuple(PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle) for bundle in bundles)
    return Placement(tuple(replace(host, place=places[host.workers[0]]) for host in hosts), places)


def _placed(group: PlacementGroup) -> dict[int, str]:
    """Returns on which of Ray's nodes each bundle is."""
    placed: dict[int, str] = placement_group_table(group)["bundles_to_node_id"]
    return placed


@contextlib.contextmanager
def _group(
    bundles: Sequence[Mapping[str, float]], strategy: str, what: str, seconds: float
) -> Iterator[PlacementGroup]:
    group = placement_group([dict(bundle) for bundle in bundles], strategy=strategy)
    try:
        if not group.wait(min(START_SECONDS, seconds)):
            raise StartupError(
                f"multiverso.ray.run: the cluster does not have {what}; all of it is {ray.cluster_resources()}, "
                f"free {ray.available_resources()}."
            )
        yield group
    finally:
        remove_placement_group(group)
