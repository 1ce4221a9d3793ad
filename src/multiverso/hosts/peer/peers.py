"""A node's port, and its connections to all other nodes.

Of each two nodes the higher connects. Connections of different roles come in at the same port, and are independent: a
role whose frames wait for a slow reader keeps no other one waiting.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Mapping

from multiverso.deadline import Deadline
from multiverso.errors import MultiversoError
from multiverso.hosts.peer.frames import Numbered
from multiverso.hosts.peer.peer import Peer
from multiverso.hosts.peer.receiver import Receiver
from multiverso.hosts.peer.resources import Pace
from multiverso.hosts.transport.channel import Channel, RefusedError
from multiverso.hosts.transport.credentials import Credentials
from multiverso.hosts.transport.handshake import HANDSHAKE_SECONDS, ROLES, Begun, Hello, connect
from multiverso.hosts.transport.listener import Listener, open_port

Address = tuple[str, int]
# Hosts that a node connects to at a time. In a rehearsal of 64 all 2,016 pairs of nodes once began together, and on two
# cores hardly one of them was through before its deadline.
_AT_A_TIME = 4
_TURN_SECONDS = 5.0  # that a host waits for its turn at most: those before it may not answer at all


class Peers:
    """Owner: its maker calls `shut` and `close`; the other methods may be called by any thread.

    Each protocol that is *carried* has a role, and in it a connection to each other host: made when a host first needs
    it, and by the others when that one connects.

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
        # by role
        self._carried: dict[int, tuple[Callable[[int], Numbered], Pace, Receiver | None]] = {}
        self._peers: dict[int, dict[int, Peer]] = {}  # by role and host, once it is open
        self._incarnations: dict[int, int] = {}  # of the hosts that have been connected
        self._fenced: set[int] = set()  # those of hosts that were lost
        self._listener: Listener | None = None  # once it listens
        self._turns = threading.Semaphore(_AT_A_TIME)
        self._dialling: list[threading.Thread] = []  # to hosts that are lost
        self._closed = False
        self._lock = threading.RLock()

    def listen(self) -> Address:
        """Begins to take connections; returns where.

        Raises:
            StartupError: there can be none at that address.
        """
        me = Hello(self.host, self.hosts, self._incarnation)
        self._listener = Listener(open_port(self._bind), self._credentials, me, self._let_in, "multiverso-fabric")
        with self._lock:
            for peer in self._all():
                self._start(peer)
        return self._listener.address

    def connect(self, number: int, address: Address) -> None:
        """Sets where a lower host is reached, and begins to connect to it, now and whenever that is cut.

        Raises:
            MultiversoError: the other one connects.
        """
        if not number < self.host:
            raise MultiversoError(f"of each two hosts the higher connects: host {self.host} waits for host {number}")
        with self._lock:
            self._addresses[number] = address
            for peer in self.to(number):
                self._start(peer)

    def carry(
        self, role: int, make: Callable[[int], Numbered], pace: Pace, receiver: Receiver | None = None
    ) -> Mapping[int, Peer]:
        """Sets what goes over the connections of a role; before `listen`.

        Args:
            role: of `handshake.ROLES`.
            make: makes this host's end of the protocol with another host.
            pace: the node's budget.
            receiver: one for all of them, which is closed with them; None: each has a thread that receives.

        Returns:
            the connection to each other host, once the role is open.
        """
        self._carried[role] = make, pace, receiver
        return self._peers.setdefault(role, {})

    def open(self, role: int) -> None:
        """Begins to connect to all other hosts in a role, unless that has begun."""
        with self._lock:
            if self._peers[role] or self._closed:
                return
            # from the next lower one down, so that not all hosts begin at the same one
            others = sorted(set(range(self.hosts)) - {self.host}, key=lambda number: (self.host - number) % self.hosts)
            made = {number: self._new_peer(role, number) for number in others}
            self._peers[role].update(made)
            for peer in made.values():
                self._start(peer)

    def renew(self, role: int, number: int) -> None:
        """After `end`: another node may take the lost host's place, of which nothing is known."""
        with self._lock:
            lost = self._peers[role].get(number)
            if self._incarnations.get(number) in self._fenced:
                del self._incarnations[number]
            if lost is not None and not self._closed:
                peer = self._peers[role][number] = self._new_peer(role, number)
                peer.count_on(lost)
                self._start(peer)

    def end(self, role: int, number: int) -> None:
        """Ends the connection to a lost host, whose node is refused from now on; what it carried is left alone then."""
        if number in self._incarnations:
            self._fenced.add(self._incarnations[number])
        peer = self._peers[role].get(number)
        if peer is not None and (dialling := peer.end()) is not None:
            self._dialling.append(dialling)

    def _new_peer(self, role: int, number: int) -> Peer:
        make, pace, receiver = self._carried[role]
        dial = functools.partial(self._dial, role, number) if number < self.host else None
        return Peer(number, make(number), pace, dial, ROLES[role], receiver=receiver)

    def to(self, number: int) -> list[Peer]:
        """Returns the connections to a host, one of each role that is open."""
        with self._lock:  # another thread may open one
            return [peer for peer in self._all() if peer.number == number]

    def _all(self) -> list[Peer]:
        return [peer for peers in self._peers.values() for peer in peers.values()]

    def _start(self, peer: Peer) -> None:
        if peer.number in self._addresses if peer.number < self.host else self._listener is not None:
            peer.start()

    def _dial(self, role: int, number: int, generation: int, begun: Begun) -> tuple[Channel, Hello]:
        me = Hello(self.host, self.hosts, self._incarnation, generation, role)
        has_turn = self._turns.acquire(timeout=_TURN_SECONDS)
        try:
            deadline = Deadline.after(HANDSHAKE_SECONDS)
            channel, theirs = connect(self._addresses[number], self._credentials, me, deadline, begun)
        finally:
            if has_turn:
                self._turns.release()
        if (theirs.host, theirs.hosts) != (number, self.hosts):
            channel.close()
            raise RefusedError(f"host {theirs.host} of {theirs.hosts} listens where host {number} should")
        if not self._is_known(theirs):
            channel.close()
            raise OSError(f"another node listens where host {number} did, whose loss is not known yet")
        return channel, theirs

    def _is_known(self, theirs: Hello) -> bool:
        """Whether a node is the one that has its place here: another one may come before this one's loss is known."""
        with self._lock:
            return self._incarnations.setdefault(theirs.host, theirs.incarnation) == theirs.incarnation

    def _let_in(self, channel: Channel, theirs: Hello) -> None:
        wanted = theirs.host > self.host and theirs.hosts == self.hosts
        if wanted and theirs.incarnation not in self._fenced and theirs.role in self._carried:
            self.open(theirs.role)
            peer = self._peers[theirs.role].get(theirs.host)
            if peer is not None and self._is_known(theirs):  # else this end is closing, or it comes again
                peer.offer(channel, theirs)
                return
        channel.close()

    def shut(self) -> None:
        """Takes no more connections. May be called again."""
        with self._lock:
            self._closed = True
        self._turns.release(len(ROLES) * self.hosts)  # nobody waits for one any more
        if self._listener is not None:
            self._listener.shut()

    def close(self) -> None:
        """After `shut`: ends all connections within a second, and waits for the threads of the port."""
        deadline = Deadline.after(1.0)
        for peer in self._all():
            peer.close(deadline)
        for thread in self._dialling:
            thread.join()
        for *_, receiver in self._carried.values():
            if receiver is not None:
                receiver.close()
        if self._listener is not None:
            self._listener.join()
