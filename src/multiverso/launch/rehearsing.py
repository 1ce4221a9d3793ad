"""A job on several hosts that are all this process: a node for each, as `multiverso run --hosts 2` has processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from multiverso.hosts.control.connections import credentials_of
from multiverso.hosts.fabric import Fabric
from multiverso.hosts.roster import Roster
from multiverso.hosts.transport.listener import open_port
from multiverso.launch.plan import rehearsal_roster
from multiverso.runtime import Node
from multiverso.runtime.several_hosts.other_hosts import OtherHosts

Address = tuple[str, int]


@contextmanager
def hosts_here(
    workers: Sequence[int],
    *,
    on_lost: str = "stop",
    secret: str | None = None,
    encrypted: bool = False,
    grace: float = 30.0,
    replaces: bool = False,
    way: Callable[[int, Address], Address] = lambda host, address: address,
) -> Iterator[tuple[Roster, list[Node]]]:
    """Makes the nodes of a job's hosts, called ``host-0``, ``host-1`` and so on, and closes them in the end.

    Args:
        workers: how many workers each host has.
        on_lost: as for `multiverso.init`.
        secret: what the workers have to know, if anything.
        encrypted: whether their messages are.
        grace: seconds without a word of a host until it counts as lost.
        replaces: whether a new process may take the place of a worker that died, where the others continue.
        way: returns where a host, by its number, reaches the coordinator, which listens at an address.

    Yields:
        Who is on which host, and the hosts' nodes in their order; workers find theirs by its ``address``.
    """
    listener = open_port(("127.0.0.1", 0))
    roster = rehearsal_roster(workers, listener, encrypted=encrypted, grace=grace)
    with ExitStack() as stack:
        nodes = []
        for host in range(roster.hosts):
            own = replace(roster.on(host), coordinator=way(host, listener.getsockname()))
            other_hosts = OtherHosts(own, Fabric(host, own.hosts, credentials_of(own)), None if host else listener)
            node = Node(own.workers_num, on_lost=on_lost, secret=secret, other_hosts=other_hosts, replaces=replaces)
            nodes.append(stack.enter_context(node))
        yield roster, nodes
