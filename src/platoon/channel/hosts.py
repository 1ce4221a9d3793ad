"""Several controllers, one on each host: how they find each other, and what their nodes begin with.

The launcher passes it to each controller that it starts (``platoon-launcher -H``); those that MPI has started exchange
it. From there on it is a job of `multiverso` on several hosts: the nodes keep the copies of the shared parameters near
each other, and combine what the workers reduce.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from multiverso.errors import MultiversoError
from multiverso.hosts.roster import ROSTER_VARIABLE, Roster
from multiverso.hosts.transport.addresses import ADDRESS_VARIABLE, ANY, own_addresses, reachable
from multiverso.hosts.transport.credentials import new_credentials
from multiverso.runtime.discovery.meetings.meeting import INSECURE_VARIABLE, complete, distinct, own_address
from platoon.util import PlatoonError, counted

if TYPE_CHECKING:
    from multiverso.runtime import Node
    from multiverso.runtime.several_hosts.other_hosts import OtherHosts

_LOOPBACK = "127.0.0.1"


class Hosts:
    """This controller's place among the controllers. Used by the thread that made it alone.

    Args:
        local_size: how many workers this host has.

    Raises:
        PlatoonError: there is no MPI, and no launcher that knows the hosts; or the others cannot be reached.
    """

    def __init__(self, local_size: int) -> None:
        self._mpi: Any = None
        try:
            find = self._told if ROSTER_VARIABLE in os.environ else self._meet
            self.roster, self._other_hosts = find(local_size)
        except MultiversoError as error:
            raise PlatoonError("the hosts cannot meet", error) from error
        self.size = self.roster.hosts
        self.global_size = self.roster.workers_num
        self.ranks_before = min(self.roster.local)

    def _told(self, local_size: int) -> tuple[Roster, OtherHosts | None]:
        """The launcher has said who is there."""
        from multiverso.launch.place import here

        other_hosts = here(0).other_hosts
        assert other_hosts is not None
        roster = other_hosts.roster
        if len(roster.local) != local_size:
            raise PlatoonError(
                f"{roster.names[roster.host]} was to have {counted(len(roster.local), 'worker')}, and this controller "
                f"has devices for {local_size}: give the devices to the launcher (-D), and not to the controller"
            )
        return roster, other_hosts

    def _meet(self, local_size: int) -> tuple[Roster, OtherHosts | None]:
        """The controllers are MPI processes, which exchange it."""
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:
            raise PlatoonError(
                "several controllers need a launcher: platoon-launcher -H, or MPI: pip install mpi4py mpich, and start "
                "them with that mpiexec",
                error,
            ) from error
        self._mpi = comm = MPI.COMM_WORLD
        cards = comm.allgather((local_size, socket.gethostname(), own_addresses()))
        sizes, names, addresses = zip(*cards, strict=True)
        if 0 in sizes:
            raise PlatoonError(f"every controller needs devices; they have {list(sizes)}")
        one_machine = len(set(names)) == 1
        bind = _LOOPBACK if one_machine else ANY
        first, listening = None, None
        if comm.rank == 0:
            listening = socket.create_server((bind, 0))
            encrypted = not (one_machine or os.environ.get(INSECURE_VARIABLE))
            address = os.environ.get(ADDRESS_VARIABLE) or reachable(addresses[0], addresses[1:])
            # its name often stands for 127.0.1.1 in its own /etc/hosts
            address = _LOOPBACK if one_machine else address or socket.gethostbyname(socket.gethostname())
            first = (address, listening.getsockname()[1], new_credentials(encrypted).to_text())
        address, port, credentials = comm.bcast(first)
        mine = _LOOPBACK if one_machine else own_address(comm.rank == 0, address)
        roster = Roster(comm.rank, distinct(list(names)), sizes, ("", 0), rehearsal=one_machine)
        roster = replace(complete(roster, (address, port), credentials, mine), bind=bind)
        if roster.hosts == 1:
            return roster, None
        from multiverso.runtime.several_hosts.other_hosts import other_hosts_of

        return roster, other_hosts_of(roster, None if listening is None else listening.detach())

    def node(self) -> Node:
        """Returns this host's node, which has found the first host's.

        Raises:
            PlatoonError: it cannot be reached.
        """
        from multiverso.runtime import Node

        try:
            return Node(self.global_size, on_lost="continue", other_hosts=self._other_hosts)
        except MultiversoError as error:
            raise PlatoonError("this host's node cannot begin", error) from error

    def stay(self, node: Node, stopped: Callable[[], bool]) -> bool:
        """This host's workers are done: waits until the others' are too, since they may need its copies until then.

        Args:
            node: this host's.
            stopped: returns whether to wait no longer.

        Returns:
            False: they did not come to their end.
        """
        if self._other_hosts is None:
            return True
        for worker in self.roster.local:
            node.absent(worker)  # one that never used the shared memory
        return node.stay(stopped)

    def close(self, failed: bool) -> None:
        """If this controller failed, ends all of them: the others would wait for it."""
        if self._mpi is not None and failed:
            self._mpi.Abort(1)
