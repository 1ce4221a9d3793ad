"""A job's nodes on a Ray cluster: on each host an actor that holds the host's node."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from multiverso.errors import MultiversoError, StartupError
from multiverso.hosts.addresses import ANY
from multiverso.hosts.credentials import new_credentials
from multiverso.hosts.roster import Roster
from multiverso.ray.metrics import Publisher
from multiverso.runtime.carrier import means
from multiverso.runtime.node import Node
from multiverso.runtime.rendezvous import complete, distinct
from multiverso.runtime.trust import SECRET_VARIABLE, new_secret

START_SECONDS = 120.0
_CLOSE_SECONDS = 10.0
_ASKED_AT_ONCE = 4


@dataclass(frozen=True)
class Host:
    """One host of a job.

    Attributes:
        node_id: Ray's name for it.
        name: what errors call it.
        address: where the others reach it.
        workers: the numbers of its workers.
    """

    node_id: str
    name: str
    address: str
    workers: tuple[int, ...]


def hosts_of(node_ids: Sequence[str]) -> list[Host]:
    """Returns the hosts on which workers are, in the order of their first workers.

    Args:
        node_ids: for each worker, Ray's name of the host that it is on.
    """
    known = {node["NodeID"]: node for node in ray.nodes()}
    workers: dict[str, list[int]] = {}
    for worker_id, node_id in enumerate(node_ids):
        workers.setdefault(node_id, []).append(worker_id)
    names = distinct([str(known[node_id]["NodeManagerHostname"]) for node_id in workers])
    return [
        Host(node_id, name, str(known[node_id]["NodeManagerAddress"]), tuple(numbers))
        for name, (node_id, numbers) in zip(names, workers.items(), strict=True)
    ]


class HostNode:
    """The actor. Ray calls it from several threads."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._listening: socket.socket | None = None
        self._node: Node | None = None
        self._publisher: Publisher | None = None

    def __repr__(self) -> str:
        return f"node of {self._name}"

    def open(self) -> int:
        """On the first host: opens the port at which the others connect, and returns it."""
        self._listening = socket.create_server((ANY, 0))
        return int(self._listening.getsockname()[1])

    def begin(
        self, workers: int, on_lost: str, secret: str, roster: str | None, replaces: bool = False
    ) -> str:
        """Begins the node; returns its socket's name."""
        descriptor = None if self._listening is None else self._listening.detach()
        abroad = None if roster is None else means(Roster.from_text(roster), descriptor)
        self._node = Node(workers, on_lost=on_lost, secret=secret, abroad=abroad, replaces=replaces)
        self._publisher = Publisher(self._name, self._node.status)
        return str(self._node.address)

    def status(self) -> dict[str, Any]:
        """What ``multiverso top`` shows, and who is lost."""
        assert self._node is not None
        return {**self._node.status(), "lost": self._node.lost_workers()}

    def absent(self, worker_id: int) -> None:
        """A worker's process has ended."""
        assert self._node is not None
        self._node.absent(worker_id)

    def close(self) -> None:
        """Ends the node."""
        if self._publisher is not None:
            self._publisher.close()
        if self._node is not None:
            self._node.close()
        if self._listening is not None:
            self._listening.close()


class Nodes:
    """A job's nodes. Owner: the process that made them, with which they end.

    Args:
        hosts: the job's hosts; the first one's node leads.
        on_lost: what `init` is to do when a worker is lost, unless it is told otherwise.
        encrypted: whether hosts encrypt what they send each other.
        replaces: whether, where the others go on, a new process may take the place of a worker that died.
        seconds: how long a node may take to begin.

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
        seconds: float = START_SECONDS,
    ) -> None:
        self._replaces = replaces
        self._hosts = hosts
        self._on_lost = on_lost
        self._secret = new_secret()
        self._workers_num = sum(len(host.workers) for host in hosts)
        self._actors: list[Any] = []
        actor = ray.remote(HostNode)
        try:
            for host in hosts:
                place = NodeAffinitySchedulingStrategy(host.node_id, soft=False)
                options = {"num_cpus": 0, "max_concurrency": _ASKED_AT_ONCE, "scheduling_strategy": place}
                self._actors.append(actor.options(**options).remote(host.name))
            self._addresses = asked("a job's node cannot begin", lambda: self._begin(encrypted, seconds))
        except BaseException:
            self.close()
            raise

    def _begin(self, encrypted: bool, seconds: float) -> list[str]:
        rosters: list[str | None] = [None]
        if len(self._hosts) > 1:
            port = ray.get(self._actors[0].open.remote(), timeout=seconds)
            credentials = new_credentials(encrypted).to_text()
            first = (self._hosts[0].address, int(port))
            names = tuple(host.name for host in self._hosts)
            counts = tuple(len(host.workers) for host in self._hosts)
            order = tuple(worker_id for host in self._hosts for worker_id in host.workers)
            roster = Roster(0, names, counts, first, order=order)
            rosters = [
                complete(roster.on(number), first, credentials, host.address).as_text()
                for number, host in enumerate(self._hosts)
            ]
        begun = [
            actor.begin.remote(self._workers_num, self._on_lost, self._secret, roster, self._replaces)
            for actor, roster in zip(self._actors, rosters, strict=True)
        ]
        return [str(address) for address in ray.get(begun, timeout=seconds)]

    def host_of(self, worker_id: int) -> Host:
        """Returns a worker's host."""
        return self._hosts[self._number_of(worker_id)]

    def environ(self, worker_id: int) -> dict[str, str]:
        """Returns what tells a worker's `init` who it is and where its node is."""
        return {
            "MULTIVERSO_NODE": self._addresses[self._number_of(worker_id)],
            "MULTIVERSO_WORKER_ID": str(worker_id),
            "MULTIVERSO_WORKERS_NUM": str(self._workers_num),
            "MULTIVERSO_ON_LOST": self._on_lost,
            SECRET_VARIABLE: self._secret,
        }

    def ask_status(self) -> Any:
        """Asks the first host's node how the job fares; returns Ray's reference of the answer."""
        return self._actors[0].status.remote()

    def absent(self, worker_id: int) -> None:
        """Tells a worker's node that its process has ended. Waits for no answer."""
        self._actors[self._number_of(worker_id)].absent.remote(worker_id)

    def close(self) -> None:
        """Ends all nodes."""
        with contextlib.suppress(Exception):  # one that is gone needs no end
            ray.wait(
                [actor.close.remote() for actor in self._actors],
                num_returns=len(self._actors),
                timeout=_CLOSE_SECONDS,
            )
        for actor in self._actors:
            with contextlib.suppress(Exception):
                ray.kill(actor)

    def _number_of(self, worker_id: int) -> int:
        return next(number for number, host in enumerate(self._hosts) if worker_id in host.workers)


def asked(what: str, ask: Callable[[], Any]) -> Any:
    """Asks Ray for something; its errors become ours.

    Raises:
        StartupError: Ray could not do it, or not in time.
    """
    try:
        return ask()
    except ray.exceptions.RayTaskError as error:
        cause = error.cause if isinstance(error.cause, MultiversoError) else None
        raise StartupError(f"{what}: {cause or _last_line(error)}") from error
    except ray.exceptions.GetTimeoutError as error:
        raise StartupError(
            f"{what}: Ray has not started it in time; is the cluster full? See `ray status`"
        ) from error
    except ray.exceptions.RayError as error:
        raise StartupError(f"{what}: {_last_line(error)}") from error


def _last_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
