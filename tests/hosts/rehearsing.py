"""A job on several hosts in one process: a node for each host, a thread for each worker."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from core_support import in_threads
from relay import Relay

from multiverso.hosts.roster import Roster
from multiverso.launch.rehearsing import hosts_here
from multiverso.layout import words as at
from multiverso.runtime import Node, Session
from multiverso.runtime.node.deaths import Ended

HOW_FAR = (
    *(
        "decided",
        "arrived",
        "folded",
        "received",
        "pushed",
        "returned",
        "known",
        "wanted",
        "requested",
        "awaited",
        "passed",
    ),
    *("theirs", "blank", "placed", "refill", "overwrites"),
)


def seeds(number: int) -> range:
    """Returns the seeds of a test: so many, or as many as are asked for (`make exact`)."""
    return range(int(os.environ.get("MULTIVERSO_TEST_SEEDS", number)))


@dataclass
class Rehearsal:
    """The nodes of a job's hosts, all in this process."""

    roster: Roster
    nodes: list[Node]
    relays: dict[int, Relay] = field(default_factory=dict)  # between each host and the coordinator

    def session(self, worker_id: int, **options: Any) -> Session:
        """Returns a worker's session, attached to its host's node."""
        options = {"timeout_seconds": 30, "start_timeout_seconds": 30, **options}
        return Session(self.nodes[self.roster.host_of(worker_id)].address, worker_id, **options)

    def lose(self, worker_id: int) -> None:
        """Does what the node does when a worker's process is gone."""
        node = self.nodes[self.roster.host_of(worker_id)]
        life = node._members.attached[worker_id].life
        assert life is not None
        node._mailbox.post(Ended(worker_id, life, at.LOST))

    def show_rounds(self) -> None:
        """Prints how far each host is in the rounds of synchronous tables."""
        for node in self.nodes:
            chain = node.hosts.fabric.rounds
            print(f"host {chain.host} of {chain.live}, epoch {chain.epoch}, ways to {list(chain.ways)}")
            for table in list(chain.tables.values()):
                print(f"  table {table.number}:", *(f"{name}={getattr(table, name)}" for name in HOW_FAR))
                print("   ", *(f"{name}={list(getattr(table, name))}" for name in ("incoming", "sums", "totals")))

    def run(self, function: Callable[[Session], Any], **options: Any) -> list[Any]:
        """Runs ``function(session)`` as each worker of the job; returns their results in the workers' order."""

        def work(worker_id: int) -> Any:
            with self.session(worker_id, **options) as session:
                return function(session)

        return in_threads([lambda i=i: work(i) for i in range(self.roster.workers_num)])  # type: ignore[misc]


@contextmanager
def rehearsal(
    *workers: int,
    on_lost: str = "stop",
    encrypted: bool = False,
    grace: float = 30.0,
    relayed: bool = False,
    replaces: bool = False,
) -> Iterator[Rehearsal]:
    """Makes the nodes of a job with so many workers on each host."""
    relays: dict[int, Relay] = {}
    with ExitStack() as stack:

        def way(host: int, address: tuple[str, int]) -> tuple[str, int]:
            if not (relayed and host):
                return address
            relays[host] = stack.enter_context(Relay(address))
            return relays[host].address

        options: Any = {"on_lost": on_lost, "encrypted": encrypted, "grace": grace, "replaces": replaces}
        roster, nodes = stack.enter_context(hosts_here(workers, way=way, **options))
        job = Rehearsal(roster, nodes, relays)
        try:
            yield job
        except BaseException:
            job.show_rounds()  # a wait that timed out does not say which host kept the others waiting
            raise
