"""What moves tables' values between hosts, as a node sees it, and what a node of a job on several is made with."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from multiverso.deadline import Deadline
from multiverso.hosts.control.connections import credentials_of
from multiverso.hosts.fabric import Fabric
from multiverso.hosts.roster import Roster
from multiverso.hosts.transport.channel import Channel
from multiverso.hosts.transport.handshake import Hello
from multiverso.hosts.transport.listener import Listener
from multiverso.hosts.values.pace import Every
from multiverso.shards.shard import Shard


class Carrier(Protocol):
    """What moves values between hosts: `multiverso.hosts.fabric.Fabric`. Every method may be called by any thread."""

    def listen(self) -> tuple[str, int]:
        """Begins to take connections; returns where."""

    def connect(self, peer: int, address: tuple[str, int]) -> None:
        """Begins to connect to a host of a lower number, and keeps it up."""

    def attach(
        self,
        table_id: int,
        shard: Shard,
        *,
        wire: str = "native",
        every: Every | None = None,
        rule: str = "sum",
        control: int = 0,
    ) -> None:
        """Begins to keep a table near the other hosts' copies."""

    def attach_rounds(
        self,
        table_id: int,
        shard: Shard,
        control: int,
        local: Iterable[int],
        overwritten: Mapping[int, int] | None = None,
    ) -> None:
        """Begins to take part in the rounds of a synchronous table; of one that the others have, without values."""

    def refill(self, table_id: int, then: Callable[[bool], None]) -> None:
        """Holds the rounds of a table, and gets its values where they are not here, then calls `then`."""

    def release(self, table_id: int) -> None:
        """Lets the rounds go on."""

    def turns(self) -> dict[int, int]:
        """Returns how far each synchronous table is here."""

    def overwrite(self, written: Mapping[int, Sequence[int]]) -> None:
        """At a barrier: what workers have overwritten synchronous tables with becomes everybody's."""

    def follow_rounds(self) -> float | None:
        """Does what this host's workers are ready for; returns the seconds until it is to be called at the latest."""

    def detach(self, table_id: int) -> None:
        """Forgets a table: its memory may be freed afterwards."""

    def settle(self, deadline: Deadline, tables: Iterable[int] | None = None) -> None:
        """Waits until what is in this host's copies now is at the homes."""

    def take(self, deadline: Deadline, tables: Iterable[int] | None = None) -> None:
        """Waits until what is at the homes now is in this host's copies."""

    def lost(self, peer: int) -> None:
        """Marks a host as lost: waits for it end with an error."""

    def regroup(self, live: Sequence[int]) -> None:
        """Goes on without lost hosts: what had its home there gets a new one. Waits for them end with an error."""

    def begin_anew(self, survivors: Sequence[Sequence[int]], lost: Iterable[int], epoch: int) -> None:
        """In a host that takes a lost one's place, before any table: who was left after each loss, who is lost now.

        The epoch is how often hosts were lost or came again.
        """

    def joined(self, peer: int) -> None:
        """A lost host has come again; a higher one then connects to it."""

    def statistics(self) -> dict[str, Any]:
        """Returns what went to and came from each peer."""

    def answer(self, role: int, taker: Callable[[Channel, Hello], None]) -> None:
        """Registers who takes connections of another role; call it before `listen`."""

    def close(self) -> None:
        """Ends all connections."""


@dataclass(frozen=True)
class Means:
    """What a node of a job on several hosts is made with.

    Attributes:
        roster: the job's hosts.
        carrier: moves tables' values; the node closes it.
        listener: where the coordinator listens, on its own host.
    """

    roster: Roster
    carrier: Carrier
    listener: Listener | None = None


def means_of(roster: Roster, descriptor: int | None) -> Means:
    """Returns what a node of a job on several hosts is made with.

    Args:
        roster: the job's hosts.
        descriptor: a listening socket of the coordinator's, where one was opened before this process began.
    """
    listener: Listener | None = None
    if descriptor is not None:
        listener = _Inherited(descriptor)
    elif roster.leads:
        listener = Listener((roster.bind, roster.coordinator[1]))
    fabric = Fabric(roster.host, roster.hosts, credentials_of(roster), bind=(roster.bind, 0))
    return Means(roster, fabric, listener)


class _Inherited(Listener):
    """A listening socket that the launcher has opened, so that its port was known before this process began."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._socket.set_inheritable(False)
