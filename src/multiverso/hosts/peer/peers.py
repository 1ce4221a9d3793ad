"""A node's port, and its connections to all other nodes.

Of each two nodes the higher connects. Connections of different roles come in at the same port, and are independent: a
role whose frames wait for a slow reader keeps no other one waiting.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterable

from multiverso.deadline import Deadline
from multiverso.errors import MultiversoError
from multiverso.hosts.peer.frames import Carried
from multiverso.hosts.peer.peer import Peer
from multiverso.hosts.peer.resources import Pace
from multiverso.hosts.transport.channel import Channel, RefusedError
from multiverso.hosts.transport.credentials import Credentials
from multiverso.hosts.transport.handshake import ROLES, Begun, Hello, connect
from multiverso.hosts.transport.listener import Listener, open_port

Address = tuple[str, int]


class Peers:
    """Owner: its maker calls `shut` and `close`; the other methods may be called by any thread.

    Args:
        host: this host's number.
        hosts: how many there are.
        credentials: the job's.
        bind: the address at which to listen.
    """

    def __init__(self, host: int, hosts: int, credentials: Credentials, bind: Address) -> None:
        self.host, self.hosts = host, hosts
        self._credentials, self._bind = credentials, bind
        self._incarnation = int.from_bytes(os.urandom(8), "big")
        self._addresses: dict[int, Address] = {}
        self._peers: dict[tuple[int, int], Peer] = {}  # by role and host
        self._opens: dict[int, Callable[[], None]] = {}  # by role: called when the first connection comes
        self._fenced: set[int | None] = set()  # incarnations of hosts that were lost
        self._listener: Listener | None = None  # once it listens

    def listen(self) -> Address:
        """Begins to take connections; returns where.

        Raises:
            StartupError: there can be none at that address.
        """
        me = Hello(self.host, self.hosts, self._incarnation)
        self._listener = Listener(open_port(self._bind), self._credentials, me, self._let_in, "multiverso-fabric")
        for peer in list(self._peers.values()):
            self._start(peer)
        return self._listener.address

    @property
    def address(self) -> Address:
        """Where it listens, once it does."""
        if self._listener is None:
            raise MultiversoError(f"the node of host {self.host} does not listen yet")
        return self._listener.address

    def connect(self, number: int, address: Address) -> None:
        """Sets where a lower host is reached, and begins to connect to it, now and whenever that is cut.

        Raises:
            MultiversoError: the other one connects.
        """
        if not number < self.host:
            raise MultiversoError(f"of each two hosts the higher connects: host {self.host} waits for host {number}")
        self._addresses[number] = address
        for (_, other), peer in list(self._peers.items()):
            if other == number:
                self._start(peer)

    def open(self, role: int, number: int, carried: Carried, pace: Pace) -> Peer:
        """Keeps up a connection to a host in a role, in place of one that was there before.

        Args:
            role: of `handshake.ROLES`.
            number: the host.
            carried: what goes over it.
            pace: the node's budget.
        """
        dial = functools.partial(self._dial, role, number) if number < self.host else None
        peer = self._peers[role, number] = Peer(number, carried, pace, dial, ROLES[role])
        self._start(peer)
        return peer

    def on_first(self, role: int, open_all: Callable[[], None]) -> None:
        """Sets what opens a role that is not open yet, when another host connects in it."""
        self._opens[role] = open_all

    def end(self, peer: Peer) -> threading.Thread | None:
        """Ends the connection to a lost host, whose node is refused from now on; see `Peer.end`."""
        self._fenced.add(peer.incarnation)
        return peer.end()

    def _start(self, peer: Peer) -> None:
        if peer.number in self._addresses if peer.number < self.host else self._listener is not None:
            peer.start()

    def _dial(self, role: int, number: int, generation: int, deadline: Deadline, begun: Begun) -> tuple[Channel, Hello]:
        me = Hello(self.host, self.hosts, self._incarnation, generation, role)
        channel, theirs = connect(self._addresses[number], self._credentials, me, deadline, begun)
        if (theirs.host, theirs.hosts) != (number, self.hosts):
            channel.close()
            raise RefusedError(f"host {theirs.host} of {theirs.hosts} listens where host {number} should")
        return channel, theirs

    def _let_in(self, channel: Channel, theirs: Hello) -> None:
        wanted = theirs.host > self.host and theirs.hosts == self.hosts
        if not wanted or theirs.incarnation in self._fenced:
            channel.close()
            return
        if (theirs.role, theirs.host) not in self._peers and theirs.role in self._opens:
            self._opens[theirs.role]()
        peer = self._peers.get((theirs.role, theirs.host))
        if peer is None:
            channel.close()
        else:
            peer.offer(channel, theirs)

    def shut(self) -> None:
        """Takes no more connections. May be called again."""
        if self._listener is not None:
            self._listener.shut()

    def close(self, peers: Iterable[Peer]) -> None:
        """Ends the threads of peers, within a second."""
        deadline = Deadline.after(1.0)
        for peer in peers:
            peer.close(deadline)

    def join(self) -> None:
        """After `shut`, and once all peers are closed: waits for the threads of the port."""
        if self._listener is not None:
            self._listener.join()
