"""What a node of a job on several hosts is made with."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from multiverso.hosts.control.connections import credentials_of
from multiverso.hosts.fabric import Fabric
from multiverso.hosts.roster import Roster
from multiverso.hosts.transport.listener import ListeningSocket


@dataclass(frozen=True)
class Means:
    """What a node of a job on several hosts is made with.

    Attributes:
        roster: the job's hosts.
        fabric: moves tables' values; the node closes it.
        listener: where the coordinator listens, on its own host.
    """

    roster: Roster
    fabric: Fabric
    listener: ListeningSocket | None = None


def means_of(roster: Roster, descriptor: int | None) -> Means:
    """Returns what a node of a job on several hosts is made with.

    Args:
        roster: the job's hosts.
        descriptor: a listening socket of the coordinator's, where one was opened before this process began.
    """
    listener: ListeningSocket | None = None
    if descriptor is not None:
        listener = _Inherited(descriptor)
    elif roster.leads:
        listener = ListeningSocket((roster.bind, roster.coordinator[1]))
    fabric = Fabric(roster.host, roster.hosts, credentials_of(roster), bind=(roster.bind, 0))
    return Means(roster, fabric, listener)


class _Inherited(ListeningSocket):
    """A listening socket that the launcher has opened, so that its port was known before this process began."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._socket.set_inheritable(False)
