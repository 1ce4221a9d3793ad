"""The data plane of a node: the tables' values and rounds, each over a connection to each other node.

Decisions are made in ``values/link.py`` and ``rounds/rounds.py``; the connections' threads are those of ``peer/``. One
thread here looks whether the workers have changed anything.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from multiverso.deadline import Deadline
from multiverso.errors import MultiversoError, WaitTimeoutError
from multiverso.hosts.options import Every
from multiverso.hosts.peer.peer import Peer
from multiverso.hosts.peer.peers import Address, Peers
from multiverso.hosts.peer.resources import SHARE, Pace
from multiverso.hosts.rounds.memory import RoundMemory
from multiverso.hosts.rounds.neighbour import Neighbour
from multiverso.hosts.rounds.quorum import QuorumMemory
from multiverso.hosts.rounds.rounds import Rounds
from multiverso.hosts.transport.channel import FAR
from multiverso.hosts.transport.credentials import Credentials
from multiverso.hosts.transport.handshake import ROUNDS, VALUES
from multiverso.hosts.values.copies import CHUNK_BYTES, Copy, chunk_bytes_of
from multiverso.hosts.values.held_tables import HeldTables
from multiverso.hosts.values.link import Link, Loop
from multiverso.hosts.values.state import Held, Ticket
from multiverso.in_process import Closing
from multiverso.saying import Progress
from multiverso.shards.shard import Shard

_SOON_SECONDS, _LATER_SECONDS = 0.002, 0.05
_AT_ONCE_SECONDS = 0.0002  # so long a thread that waits for another host receives frames itself
_REFUSED_SECONDS = 10.0
_PASSING_SECONDS = 0.01  # all tables are in the middle of a pass: who ends it begins the next


class Fabric(Closing):
    """A node's links.

    Args:
        host: this host's number.
        hosts: how many there are.
        credentials: the job's.
        bind: the address at which to listen.
        share: of a core, that keeping the copies near may take from the workers; 0 for no limit.

    Attributes:
        peers: the connections.
        rounds: of synchronous tables.

    Owner: the thread that made it calls ``close``; the other methods may be called by any.
    """

    def __init__(
        self,
        host: int,
        hosts: int,
        credentials: Credentials,
        *,
        bind: tuple[str, int] = ("127.0.0.1", 0),
        share: float = SHARE,
    ) -> None:
        self.host, self.hosts = host, hosts
        self.peers = Peers(host, hosts, credentials, bind)
        self._pace = Pace(share)
        self.tables = HeldTables(host, hosts)
        self._lost: set[int] = set()
        self._lock = threading.RLock()
        self._settled = threading.Condition()
        self._closing = threading.Event()
        self._turn_over, self._passing = threading.Event(), 0
        self._watching = threading.Thread(target=self._watch, name="multiverso-fabric-watch", daemon=True)
        self.rounds = Rounds(host, range(hosts), self._wake, self._end_turn)
        # by the other host's number; with a rule between hosts there is one to this host itself
        self.links: dict[int, Link] = {}
        self._loops: dict[int, Loop] = {}
        self._values = self.peers.carry(VALUES, self._new_link, self._pace)
        self._chain = self.peers.carry(ROUNDS, lambda peer: Neighbour(self.rounds, peer), self._pace)

    def _new_link(self, peer: int) -> Link:
        link = Link(self.host, peer, self._pace, settled=self._tell_settled)
        with self._lock:
            self.links[peer] = link
            if peer != self.host:  # another host's place may have been another's, which had these
                for table_id, held in self.tables.held.items():
                    link.attach(table_id, held, self.tables.epoch)
        return link

    @property
    def ends(self) -> dict[int, Peer | Loop]:
        """The peer or loop that carries each link."""
        return {**self._values, **self._loops}

    def _wake(self, peer: int) -> None:
        """There is something of a round to send."""
        if (end := self._chain.get(peer)) is not None:
            end.pump()

    # -- connections -----------------------------------------------------------------------------------------

    def listen(self) -> Address:
        """Begins to take connections; returns where.

        Raises:
            StartupError: there can be none at that address.
        """
        address = self.peers.listen()
        self._watching.start()
        return address

    def connect(self, peer: int, address: Address) -> None:
        """Begins to connect to a peer of a lower number, and to do so again whenever that is cut. Does not wait."""
        self.peers.connect(peer, address)

    # -- tables ----------------------------------------------------------------------------------------------

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
        """Begins to keep a table near the other hosts' copies of it.

        Args:
            table_id: its number in the job, the same on all hosts.
            shard: all of it mapped; its values are zero, or what they were when homes were last given out.
            wire: how differences travel, see ``hosts/codecs.py``.
            every: how often a pass over it begins; by default whenever the budget allows.
            control: address of the job's control segment, which tells whose locks are a dead worker's; 0: nobody's.
            rule: what a home makes of what hosts push, see ``hosts/options.py``; from the first ``take`` on.
        """
        chunk_bytes = chunk_bytes_of(shard.spec.elements * shard.spec.itemsize, self.hosts)
        copy = Copy(shard, chunk_bytes, control)  # it may have to compile: done before the lock is taken
        self.peers.open(VALUES)
        with self._lock:
            held = self.tables.add(table_id, copy, wire, every, rule)
            if held.outer is not None and self.host not in self.links:
                self._loops[self.host] = Loop(self._new_link(self.host))
            for link in self._links_of(held):
                link.attach(table_id, held, self.tables.epoch)
        self._poke()

    def _links_of(self, held: Held) -> list[Link]:
        return [link for peer, link in self.links.items() if peer != self.host or held.outer is not None]

    def attach_rounds(
        self,
        table_id: int,
        shard: Shard,
        control: int,
        overwritten: Mapping[int, int] | None = None,
        wire: str = "native",
    ) -> None:
        """Begins to take part in the rounds of a synchronous table; the next `settle` of it gives its initial values.

        Args:
            table_id: its number in the job, the same on all hosts.
            shard: all of it mapped.
            control: address of the job's control segment.
            overwritten: where the other hosts have the table already: the last turns that were given to
                `overwrite` before this one came, and whose values. It gets values by `refill`.
            wire: how sums travel, see ``hosts/codecs.py``.
        """
        memory = (QuorumMemory if shard.consistency.by_quorum else RoundMemory)(shard, control, wire)
        self.peers.open(ROUNDS)
        self.rounds.attach(table_id, memory, overwritten)

    def follow_rounds(self) -> float | None:
        """Does what this host's workers are ready for; returns the seconds until it is to be called at the latest."""
        self._turn_over.clear()
        left = self.rounds.look(time.monotonic())
        before, self._passing = self._passing, self.rounds.passing
        if self._passing > before:  # workers are notified of each chunk: that would wake this thread each time
            self._turn_over.wait(_SOON_SECONDS)
        return left

    def _end_turn(self) -> None:
        self._turn_over.set()
        self._tell_settled()

    def detach(self, table_id: int) -> None:
        """Releases a table: nothing more is sent, and what still comes for it is dropped."""
        if table_id in self.rounds.tables:
            self.rounds.detach(table_id)
            self._tell_settled()
            return
        with self._lock:
            held = self.tables.remove(table_id)
            for link in self._links_of(held):
                link.detach(table_id)
        held.close()
        self._tell_settled()
        self._poke()

    def settle(self, deadline: Deadline, tables: Iterable[int] | None = None) -> None:
        """Waits until all that this host's workers have added so far is at the chunks' homes.

        Where a host is lost meanwhile, and the others continue, at the new ones.

        Args:
            deadline: for all of it.
            tables: numbers of tables; all by default.

        Raises:
            WaitTimeoutError: it was not in time; says which hosts have not answered.
            MultiversoError: a peer was lost, or refuses this host.
        """
        self._settle(deadline, tables, take=False)

    def take(self, deadline: Deadline, tables: Iterable[int] | None = None) -> None:
        """Waits until all that the homes had when this was called is in this host's copies. Like `settle`."""
        self._settle(deadline, tables, take=True)

    def _settle(self, deadline: Deadline, tables: Iterable[int] | None, take: bool) -> None:
        wanted = {*self.rounds.tables, *self.tables.held} if tables is None else set(tables)
        in_rounds = wanted & self.rounds.tables.keys()
        for number in () if take else in_rounds:
            self.rounds.begin(number)
        while not self._await_settled(deadline, wanted, in_rounds, take):
            pass  # there are new homes
        if take:  # the values that all begin with are there
            with self._lock:
                ruled = {number for number, held in self.tables.held.items() if held.outer is not None}
                for table_id in wanted & ruled:
                    for link in self.links.values():
                        link.begin_ruling(table_id)

    def _await_settled(self, deadline: Deadline, wanted: set[int], in_rounds: set[int], take: bool) -> bool:
        """Returns whether it is done; False where hosts were lost meanwhile, so that others have to be asked."""
        refused = Deadline.after(_REFUSED_SECONDS)
        with self._lock:
            epoch = self.tables.epoch
            ends = {peer: end for peer, end in self.ends.items() if not self._went(peer)}
            tickets = {peer: self.links[peer].settle(take, wanted) for peer in ends}
        for end in ends.values():
            end.pump()
        # in this thread, if it comes at once: no thread has to be woken then
        until = time.monotonic() + _AT_ONCE_SECONDS
        for peer, ticket in tickets.items():
            while not ticket.done and time.monotonic() < until:
                ends[peer].receive_now()
        missing = self._missing(tickets.values(), in_rounds)
        progress = Progress(f"taking values from {len(tickets)} other host(s)", missing)
        with self._settled:
            while True:
                if take:
                    before, missing = missing, self._missing(tickets.values(), in_rounds)
                    progress.add(before - missing)
                left = {peer: ticket for peer, ticket in tickets.items() if not ticket.done}
                late = take and any(map(self.rounds.missing, in_rounds))
                if not (left or late):
                    return True
                if self.tables.epoch != epoch:
                    return False
                awaited = left or [peer for peer in range(self.hosts) if peer != self.host and not self._went(peer)]
                self._check(awaited, refused)
                if deadline.passed:
                    what = "take the values of" if take else "give its changes to"
                    peers = ", ".join(map(str, sorted(awaited)))
                    raise WaitTimeoutError(f"host {self.host} could not {what} host(s) {peers} within {deadline}")
                self._settled.wait(deadline.slice_left())

    def _missing(self, tickets: Iterable[Ticket], in_rounds: Iterable[int]) -> int:
        """Returns how many bytes are still to come, nearly: chunks count as if they were of one size."""
        chunks = sum(len(ticket.left) for ticket in tickets) + sum(map(self.rounds.missing, in_rounds))
        return chunks * CHUNK_BYTES

    def _went(self, peer: int) -> bool:
        """Returns whether a host is lost and the others continue without it."""
        survivors = self.tables.survivors
        return peer in self._lost and bool(survivors) and peer not in survivors[-1]

    def _check(self, left: Iterable[int], refused: Deadline) -> None:
        """Raises where what was asked for cannot come any more.

        Args:
            left: the hosts that have not answered.
            refused: until when a refusal may be that of another node, at the place of a host that is lost.
        """
        if self._closing.is_set():
            raise MultiversoError(f"the fabric of host {self.host} is closed")
        for peer in left:
            if peer in self._lost and not self._went(peer):
                raise MultiversoError(f"host {peer} is lost")
            for ends in (self._values, self._chain):
                if peer in ends and ends[peer].failed is not None and refused.passed:
                    raise MultiversoError(f"host {self.host} has no connection to host {peer}: {ends[peer].failed}")

    def _tell_settled(self) -> None:
        with self._settled:
            self._settled.notify_all()

    def lost(self, peer: int) -> None:
        """A host is lost: threads that wait for it get an error."""
        self._lost.add(peer)
        self._tell_settled()

    def regroup(self, live: Sequence[int]) -> None:
        """Continues without lost hosts: what lived there gets new homes. Every host that is left has to call it alike.

        The new home of a chunk begins with its own copy. Another host's adds that had reached only the lost home since
        the new one's last refresh are missing from the shared value; those of unknown fate may be in it
        twice. Nothing else is lost, and no call waits.

        Args:
            live: the numbers of the hosts that are left, in order; this one is among them.

        Raises:
            MultiversoError: this host is not among them, or the lost one was never there.
        """
        hosts = sorted(set(live))
        if self.host not in hosts or not set(hosts) <= set(range(self.hosts)):
            raise MultiversoError(f"host {self.host} cannot continue as one of the hosts {hosts}")
        gone = [(role, peer) for role in (VALUES, ROUNDS) for peer in range(self.hosts) if peer not in hosts]
        for way in gone:
            self.peers.end(*way)
        with self._lock:
            self.tables.rehome(hosts, self.links)
            self._lost |= {peer for _, peer in gone}
        for way in gone:  # it may return: nothing is known of it then
            self.peers.renew(*way)
        self.rounds.regroup(hosts)
        self._tell_settled()
        self._poke()

    def begin_anew(self, survivors: Sequence[Sequence[int]], lost: Iterable[int], epoch: int) -> None:
        """Before any table is attached, in a host that takes a lost one's place: who was left after each loss so far.

        Args:
            survivors: the hosts that were left after each loss.
            lost: those that are lost now.
            epoch: how often hosts were lost or returned.
        """
        self.tables.survivors = [list(left) for left in survivors]
        self._lost = set(lost)
        self.rounds.form([host for host in range(self.hosts) if host not in self._lost], epoch)

    def joined(self, peer: int) -> None:
        """A lost host has returned, as one that has nothing: it takes all values. The higher of two connects."""
        self._lost.discard(peer)
        self.rounds.regroup([*self.rounds.live, peer])

    # -- watching ----------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Looks whether workers have changed a table: now and then while they do, woken by them when they begin to."""
        used, resting = time.thread_time(), False
        while not self._closing.is_set():
            now = time.monotonic()
            with self._lock:
                moved = self.tables.look(resting)
            passing, waits = True, [0.0] if moved else []
            for peer, end in self.ends.items():
                link = self.links[peer]
                if (left := link.look(now)) is not None:
                    waits.append(left)
                    if left == 0.0:
                        end.pump()
                passing &= link.passing
            used = self._pace.count(used)
            if waits:
                pause = max(min(waits), _PASSING_SECONDS if passing else _SOON_SECONDS)
                self._closing.wait(min(_LATER_SECONDS, pause))
            elif resting and not self._closing.is_set():
                # it has looked since workers know that they are to wake it
                self.tables.rest.sleep(_LATER_SECONDS)
            resting = not waits

    def _poke(self) -> None:
        for end in self.ends.values():
            end.poke()

    # -- the rest ------------------------------------------------------------------------------------------------

    def statistics(self) -> dict[int, dict[str, Any]]:
        """Returns what ``multiverso top`` shows of each other host: bytes, connections, and whether one is cut now."""
        found = {}
        for peer in range(self.hosts):
            if peer != self.host:
                ends = self.peers.to(peer)
                begun = [end for end in ends if end.connections]
                state = "connected" if all(end.connected for end in begun) else "cut"
                found[peer] = {
                    "state": state if begun else "not yet connected",
                    "connections": max((end.connections_before + end.connections for end in ends), default=0),
                    "bytes_sent": sum(end.bytes_sent for end in ends),
                    "bytes_received": sum(end.bytes_received for end in ends),
                    "busy_seconds": max((end.busy_seconds() for end in ends), default=0.0),
                    "round_trip_seconds": min((end.delay() for end in ends), default=FAR),
                }
        return found

    def behind_seconds(self, peers: Iterable[int]) -> float:
        """Returns how long ago copies here last had all that was at some hosts then, and these all that was here."""
        now = time.monotonic()
        with self._lock:
            return max((self.links[peer].behind(now) for peer in peers if peer in self.links), default=0.0)

    def busy_seconds(self) -> float:
        """Returns for how long the busiest way to another host was busy."""
        return max((end.busy_seconds() for peer in range(self.hosts) for end in self.peers.to(peer)), default=0.0)

    def close(self) -> None:
        """Ends all threads and connections. May be called again."""
        self._closing.set()
        self.tables.rest.wake()
        self._tell_settled()
        self.peers.shut()
        self.tables.close()
        self.peers.close()
        if self._watching.ident is not None:
            self._watching.join()
