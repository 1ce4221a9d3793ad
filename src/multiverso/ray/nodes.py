"""A job's nodes on a Ray cluster: on each host an actor that holds the host's node, and gives Ray its metrics."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.util.metrics import Gauge
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from multiverso.errors import MultiversoError, StartupError
from multiverso.hosts.roster import Roster
from multiverso.hosts.transport.addresses import ANY, listen_at
from multiverso.hosts.transport.credentials import new_credentials
from multiverso.runtime.discovery.meetings.meeting import complete, distinct
from multiverso.runtime.node.node import Node
from multiverso.runtime.several_hosts.other_hosts import other_hosts_of
from multiverso.wire.trust import SECRET_VARIABLE, new_secret

_EVERY_SECONDS = 5.0
_FIGURES = {
    "workers": "A job's workers on a host, by state.",
    "memory_bytes": "Memory of a host's tables.",
    "adds": "Adds and pushes that a worker has made to a table.",
    "gets": "Reads that a worker has made of a table.",
    "exchanges": "Exchanges that a worker has made with a table.",
    "bytes": "Bytes that a worker's calls have moved in its host's memory.",
    "wait_seconds": "Seconds that a worker has waited in a table's calls.",
    "staleness_max": "The most pushes of others that a worker's value has missed.",
}


class Publisher:
    """A thread that publishes a node's status every few seconds. Owner: the node's actor; ``close`` ends it.

    Args:
        host: the host's name, a tag of each figure.
        status: returns the node's status; from any thread.
    """

    def __init__(self, host: str, status: Callable[[], dict[str, Any]]) -> None:
        self._host, self._status = host, status
        self._gauges: dict[str, Gauge] = {}
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="multiverso-ray-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Publishes once more, and ends."""
        self._closing.set()
        self._thread.join(_EVERY_SECONDS)

    def _run(self) -> None:
        while not self._closing.wait(_EVERY_SECONDS):
            with contextlib.suppress(Exception):  # a figure that is missing must not end a job
                self.publish(self._status())
        with contextlib.suppress(Exception):
            self.publish(self._status())

    def publish(self, status: dict[str, Any]) -> None:
        """Publishes the figures of this host's workers."""
        here = {worker["id"] for worker in status["workers"] if worker["host"] == status["host"]}
        states = [worker["state"] for worker in status["workers"] if worker["id"] in here]
        for state in ("alive", "left", "lost"):
            self._set("workers", states.count(state), state=state)
        self._set("memory_bytes", status["memory_bytes"])
        for table in status["tables"]:
            for worker_id, line in table["workers"].items():
                if worker_id in here:
                    for name in _FIGURES.keys() & line.keys():
                        self._set(name, line[name], table=str(table["name"] or table["id"]), worker=str(worker_id))

    def _set(self, name: str, value: float, **tags: str) -> None:
        if name not in self._gauges:
            keys = ("host", *tags)
            self._gauges[name] = Gauge(f"multiverso_{name}", description=_FIGURES[name], tag_keys=keys)
        self._gauges[name].set(value, {"host": self._host, **tags})


START_SECONDS = 120.0
_CLOSE_SECONDS = 10.0
_LOOK_SECONDS = 0.02
_ASKED_AT_ONCE = 4


@dataclass(frozen=True)
class Host:
    """One host of a job.

    Attributes:
        name: what errors call it.
        address: where the others reach it.
        workers: the numbers of its workers.
        place: what makes Ray run something there, or on a host that comes in its place.
    """

    name: str
    address: str
    workers: tuple[int, ...]
    place: Any


def hosts_of(node_ids: Sequence[str]) -> list[Host]:
    """Returns the hosts on which workers are, in the order of their first workers.

    Args:
        node_ids: for each worker, Ray's name of the host that it is on.
    """
    workers: dict[str, list[int]] = {}
    for worker_id, node_id in enumerate(node_ids):
        workers.setdefault(node_id, []).append(worker_id)
    return hosts_at([(node_id, tuple(numbers)) for node_id, numbers in workers.items()])


def hosts_at(places: Sequence[tuple[str, tuple[int, ...]]]) -> list[Host]:
    """Returns hosts by Ray's names of them and the numbers of their workers."""
    known = {node["NodeID"]: node for node in ray.nodes()}
    names = distinct([str(known[node_id]["NodeManagerHostname"]) for node_id, _ in places])
    return [
        Host(
            name,
            str(known[node_id]["NodeManagerAddress"]),
            workers,
            NodeAffinitySchedulingStrategy(node_id, soft=False),
        )
        for name, (node_id, workers) in zip(names, places, strict=True)
    ]


class HostNode:
    """The actor. Ray calls it from several threads."""

    _node: Node  # once it has begun

    def __init__(self, name: str) -> None:
        self._name = name
        self._listening: socket.socket | None = None
        self._opened = contextlib.ExitStack()

    def __repr__(self) -> str:
        return f"node of {self._name}"

    def open(self) -> int:
        """On the first host: opens the port at which the others connect, and returns it."""
        self._listening = self._opened.enter_context(listen_at(ANY, 0))
        return int(self._listening.getsockname()[1])

    def begin(self, roster: str | None, how: dict[str, Any]) -> str:
        """Begins the node; returns its socket's name.

        Where it takes a lost one's place: once it has been taken in, and knows the job's workers.

        Args:
            roster: the job's hosts, where there are several.
            how: what `Node` takes besides.

        Raises:
            StartupError: the job does not take it in.
        """
        descriptor = None if self._listening is None else self._listening.detach()
        found = None if roster is None else _here(Roster.from_text(roster))
        other_hosts = None if found is None else other_hosts_of(found, descriptor)
        self._node = node = self._opened.enter_context(Node(**how, other_hosts=other_hosts))
        if found is not None and found.times_replaced > 0:
            while all(worker["state"] == "free" for worker in node.status()["workers"]):
                if node.has_ended:
                    raise StartupError("the job does not take it in again; its node has said why")
                time.sleep(_LOOK_SECONDS)
        self._opened.enter_context(contextlib.closing(Publisher(self._name, node.status)))
        return str(node.address)

    def status(self) -> dict[str, Any]:
        """What ``multiverso top`` shows, and which workers and hosts are lost."""
        status = self._node.status()
        lost_hosts = [link["host"] for link in status["links"] if link["state"] == "lost"]
        return {**status, "lost": self._node.lost_workers(), "lost_hosts": lost_hosts}

    def may_be_replaced(self, worker_id: int) -> bool | None:
        """Whether a worker whose process has failed has left something to do; None where the node has ended."""
        return None if self._node.has_ended else self._node.may_be_replaced(worker_id)

    def absent(self, worker_id: int) -> None:
        """A worker's process has ended."""
        self._node.absent(worker_id)

    def close(self) -> None:
        """Ends the node."""
        self._opened.close()


class Nodes:
    """A job's nodes. Owner: the process that made them, with which they end.

    Args:
        hosts: the job's hosts; the first one's node leads.
        on_lost: the default of `init`: what to do when a worker is lost.
        encrypted: whether hosts encrypt what they send each other.
        replaces: whether, where the others continue, a new process may take the place of a worker that died.
        grace: seconds without a word of a host until it counts as lost.

    Attributes:
        hosts: the job's hosts.

    Raises:
        StartupError: one cannot begin.
    """

    def __init__(
        self,
        hosts: Sequence[Host],
        *,
        on_lost: str,
        encrypted: bool = True,
        replaces: bool = False,
        grace: float = 30.0,
    ) -> None:
        self._grace = grace
        self.hosts = tuple(hosts)
        workers = sum(len(host.workers) for host in hosts)
        self._how = {"workers": workers, "on_lost": on_lost, "secret": new_secret(), "replaces": replaces}
        self._roster: Roster | None = None
        self._times_replaced = [0] * len(hosts)
        self._coming: dict[int, Any] = {}  # Ray's references: answered once the process of one that begins again runs
        self._actors: list[Any] = []
        try:
            for host in hosts:
                self._actors.append(_actor(host))
            self._addresses = asked("a job's node cannot begin", lambda: self._begin(encrypted))
        except BaseException:
            self.close()
            raise

    def _begin(self, encrypted: bool) -> list[str]:
        if len(self.hosts) > 1:
            port = ray.get(self._actors[0].open.remote(), timeout=START_SECONDS)
            credentials = new_credentials(encrypted).to_text()
            first = (self.hosts[0].address, int(port))
            names = tuple(host.name for host in self.hosts)
            counts = tuple(len(host.workers) for host in self.hosts)
            order = tuple(worker_id for host in self.hosts for worker_id in host.workers)
            roster = Roster(0, names, counts, first, order=order, grace=self._grace)
            self._roster = complete(roster, first, credentials, first[0])
        begun = [self._begin_on(number) for number in range(len(self.hosts))]
        return [str(address) for address in ray.get(begun, timeout=START_SECONDS)]

    def _begin_on(self, host: int) -> Any:
        text = None
        if self._roster is not None:
            text = replace(self._roster.on(host), times_replaced=self._times_replaced[host]).as_text()
        return self._actors[host].begin.remote(text, self._how)

    def begin_again(self, host: int) -> Any:
        """A lost host's node begins again, wherever Ray has room for that; returns Ray's reference of the answer."""
        with contextlib.suppress(Exception):  # it may be there, and only be cut off
            ray.kill(self._actors[host])
        self._times_replaced[host] += 1
        self._actors[host] = _actor(self.hosts[host])
        self._coming[host] = self._actors[host].__ray_ready__.remote()
        return self._begin_on(host)

    def never_ran(self, host: int) -> bool:
        """Returns whether Ray could not even start what `begin_again` has asked for, which has failed.

        Then no other host knows of it, and it does not count as a replacement.
        """
        try:
            ray.get(self._coming[host], timeout=0)
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
            self._times_replaced[host] -= 1
            return True
        return False

    def begun(self, host: int, address: str) -> None:
        """What `begin_again` has asked for is done: from here on its workers find this one."""
        self._addresses[host] = address
        del self._coming[host]

    def number_of(self, worker_id: int) -> int:
        """Returns the number of a worker's host."""
        return next(number for number, host in enumerate(self.hosts) if worker_id in host.workers)

    def environ(self, worker_id: int) -> dict[str, str]:
        """Returns the environment that gives a worker's `init` its number and its node."""
        return {
            "MULTIVERSO_NODE": self._addresses[self.number_of(worker_id)],
            "MULTIVERSO_WORKER_ID": str(worker_id),
            "MULTIVERSO_WORKERS_NUM": str(self._how["workers"]),
            "MULTIVERSO_ON_LOST": str(self._how["on_lost"]),
            SECRET_VARIABLE: str(self._how["secret"]),
        }

    def ask_status(self) -> Any:
        """Asks the first host's node how the job fares; returns Ray's reference of the answer."""
        return self._actors[0].status.remote()

    def ask_replaced(self, worker_id: int) -> Any:
        """Asks a worker's node whether another may take its place; returns Ray's reference of the answer."""
        return self._actors[self.number_of(worker_id)].may_be_replaced.remote(worker_id)

    def absent(self, worker_id: int) -> None:
        """Tells a worker's node that its process has ended. Waits for no answer."""
        self._actors[self.number_of(worker_id)].absent.remote(worker_id)

    def close(self) -> None:
        """Ends all nodes."""
        there = [actor for host, actor in enumerate(self._actors) if host not in self._coming]
        with contextlib.suppress(Exception):  # one that is gone needs no end
            closed = [actor.close.remote() for actor in there]
            ray.wait(closed, num_returns=len(closed), timeout=_CLOSE_SECONDS)
        for actor in self._actors:
            with contextlib.suppress(Exception):
                ray.kill(actor)


def _actor(host: Host) -> Any:
    """Has Ray start the actor of a host's node."""
    options = {"num_cpus": 0, "max_concurrency": _ASKED_AT_ONCE, "scheduling_strategy": host.place}
    return ray.remote(HostNode).options(**options).remote(host.name)


def _here(roster: Roster) -> Roster:
    """Returns a roster with where the others reach this host."""
    me = ray.get_runtime_context().get_node_id()
    mine = next(str(node["NodeManagerAddress"]) for node in ray.nodes() if node["NodeID"] == me)
    return complete(roster, roster.coordinator, roster.credentials, mine)


def asked(what: str, ask: Callable[[], Any]) -> Any:
    """Asks Ray for something; its errors become ours.

    Raises:
        StartupError: Ray could not do it, or not in time.
    """
    try:
        return ask()
    except ray.exceptions.GetTimeoutError as error:
        raise StartupError(f"{what}: Ray has not started it in time; is the cluster full? See `ray status`") from error
    except ray.exceptions.RayError as error:
        cause = getattr(error, "cause", None)
        last_line = str(error).strip().rpartition("\n")[2].strip()
        raise StartupError(f"{what}: {cause if isinstance(cause, MultiversoError) else last_line}") from error
