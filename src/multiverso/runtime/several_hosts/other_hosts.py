"""This host's part in a job on several: what joins its node to the coordinator and to the other nodes.

Three threads beside the node's: one tells what this host's workers do (`telling`), one moves tables' values, one after
another (`moving`), and one receives the coordinator's orders (`hosts.control.connections`). What they find out reaches
the node's thread as orders.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping
from typing import Any, assert_never

from multiverso.errors import StartupError
from multiverso.hosts.control.connections import Centre, Outpost
from multiverso.hosts.control.messages import (
    Address,
    Bring,
    Clocks,
    Gathered,
    Hello,
    HostOrder,
    Joined,
    Lost,
    Over,
    Peers,
    Progress,
    Report,
    Statistics,
    Take,
    Welcome,
    Workers,
)
from multiverso.hosts.peer.frames import Body
from multiverso.hosts.peer.messages import Messages
from multiverso.hosts.transport.listener import ListeningSocket
from multiverso.hosts.values.options import ExchangeOptions
from multiverso.memory.segment import Segment
from multiverso.node_log import log
from multiverso.runtime.job.control import Control
from multiverso.runtime.several_hosts.barriers import HostBarriers
from multiverso.runtime.several_hosts.exchanged_tables import ExchangedTables
from multiverso.runtime.several_hosts.means import Means
from multiverso.runtime.several_hosts.mirror import write_line
from multiverso.runtime.several_hosts.moving import Mover, Order
from multiverso.runtime.several_hosts.reductions import Reductions
from multiverso.runtime.several_hosts.telling import Teller
from multiverso.shards.shard import Shard


class OtherHosts:
    """Owner: the node; ``close`` ends it.

    Args:
        means: what it is made with; its fabric is closed with this.
        post: hands an order, or something to call, to the node's thread; from any thread.

    Attributes:
        over: set when all workers of all hosts have gone, so that nobody needs this host's copies any more.
        teller: tells the coordinator what this host's workers do.
        tables: which of them travel, and how.
        barriers: who has reached which.
        reductions: arrays that workers of all hosts reduce, once the memory is there.
    """

    def __init__(self, means: Means, post: Callable[[Order], None]) -> None:
        self.roster, fabric = means.roster, means.fabric
        self.over = threading.Event()
        self.reductions: Reductions | None = None
        self._fabric = fabric
        self._post = post
        self._closing = threading.Event()
        self._lost: set[int] = set()
        self._messages = Messages(fabric.peers, self._deliver)
        try:
            self._centre = self._meet(means.listener)
        except BaseException:
            fabric.close()
            raise

    def _meet(self, listener: ListeningSocket | None) -> Centre | Outpost:
        """Begins to listen for the other hosts, and to talk with the coordinator."""
        roster = self.roster
        address = self._fabric.listen()
        if roster.addresses:  # it listens at all of its addresses; this is the one that others know
            address = (roster.addresses[roster.host], address[1])
        if not roster.leads:
            return Outpost(roster, address, self._post)
        if listener is None:
            raise StartupError("the job's first host needs to listen for the others")
        centre = Centre(roster, listener, self._post)
        centre.report(Hello(address))
        return centre

    def begin(
        self,
        control: Control,
        shards: Callable[[], Mapping[int, Shard]],
        memory: Callable[[str], Segment | None],
        comes_again: Callable[[int], bool],
    ) -> None:
        """The memory is there: from here on this host's workers are told of, and remote ones shown in it. Called once.

        Args:
            control: the control segment.
            shards: returns the tables by number; called by any thread.
            memory: returns what this host's workers share under a name; called by any thread.
            comes_again: whether another process may come for a worker of this host that died.
        """
        roster, fabric, tell = self.roster, self._fabric, self._centre.report
        self.control, self._shards = control, shards
        self.teller = Teller(roster, control, shards, tell, self._closing)
        self._mover = mover = Mover(self._post, control, self._closing)
        self.tables = ExchangedTables(roster, fabric, mover, control, shards, self.report, tell)
        self.barriers = HostBarriers(
            roster, fabric, mover, control, shards, self.tables.joined, self.report, comes_again
        )
        self.reductions = Reductions(roster, control, self._messages, memory)
        mover.begin()
        self.teller.begin()

    @property
    def needed(self) -> bool:
        """Whether another host may need this one: not where one has never come, and so no worker's `init` returned."""
        return self._centre.all_came

    def close(self) -> None:
        """Ends everything. The other hosts take it for a loss unless the job is over."""
        self._closing.set()
        self._messages.close()
        begun = self.reductions is not None
        if self.reductions is not None:
            self._mover.close()
            self.reductions.close()
            self.tables.close()
        self._fabric.close()
        self._centre.close()
        if begun:
            self._mover.join()
            self.tables.join()
            self.teller.join()

    def report(self, message: Report) -> None:
        """Tells the coordinator something, after what this host's workers have done so far."""
        self.teller.report(message)

    def _deliver(self, host: int, message: Body) -> None:
        """Takes another node's message, also from a host that has begun before this one's workers have."""
        if self.reductions is not None:
            self.reductions.arrived(host, message)

    # -- what the node's thread does -------------------------------------------------------------------------

    def obey(self, order: HostOrder) -> list[int]:
        """Does what the coordinator says of hosts, workers and barriers; returns workers that came, left or died."""
        match order:
            case Workers():
                shards = self._shards()
                lines = order.workers
                return [line[0] for line in lines if write_line(self.control, line, order.now, shards)]
            case Peers():
                for peer, address in enumerate(order.addresses[: self.roster.host]):
                    if address is not None:  # it was lost before it came
                        self._connect(peer, address)
            case Lost():
                self._lose(order.host, order.why)
            case Joined():
                self._let_in(order.host, order.address)
            case Take():
                self.barriers.take(order)
            case Bring():
                self.barriers.bring(order)
            case Gathered():
                self.barriers.gathered(order)
            case Statistics():
                self.tables.note_statistics(order.tables)
            case Progress():
                self.tables.show_progress(order.tables)
            case Clocks():
                self.tables.hear_clocks(order.tables)
            case Over():
                self.over.set()
            case _:
                assert_never(order)
        return []

    def _lose(self, host: int, why: str) -> None:
        self._lost.add(host)
        if any(self.control.worker(i).is_live for i in self.roster.workers_of(host)):
            log(f"{self.roster.names[host]} is lost: {why}")
        if self.control.continues:
            with self._mover.regrouping():
                self._fabric.regroup([h for h in range(self.roster.hosts) if h not in self._lost])
        else:
            self._fabric.lost(host)

    def _let_in(self, host: int, address: Address) -> None:
        self._lost.discard(host)
        self._fabric.joined(host)
        if host < self.roster.host:
            self._connect(host, address)

    def welcome(self, order: Welcome) -> None:
        """This host takes a lost one's place: who is there, where, and what they have done together so far."""
        self.tables.exchange = ExchangeOptions.from_message(order.options["exchange"])
        self._lost = set(order.lost)
        self._fabric.begin_anew(order.survivors, self._lost, order.epoch)
        for line in order.workers:
            write_line(self.control, line, None)
        self.barriers.begin_at(order.released)
        for peer, address in enumerate(order.addresses[: self.roster.host]):
            if address is not None and peer not in self._lost:
                self._connect(peer, address)

    def _connect(self, peer: int, address: Address) -> None:
        """Of two hosts the higher one connects."""
        self._mover.put(functools.partial(self._fabric.connect, peer, address))

    # -- what is known of the other hosts --------------------------------------------------------------------

    def links(self) -> list[dict[str, Any]]:
        """Returns what went to and came from each other host with the tables' values, for `multiverso top`."""
        counted = self._fabric.statistics()["peers"]
        return [
            {
                "host": self.roster.names[peer],
                "state": "lost" if peer in self._lost else "connected" if link["connected"] else "cut",
                "connections": link["connections"],
                "bytes_sent": link["bytes_sent"],
                "bytes_received": link["bytes_received"],
            }
            for peer, link in sorted(counted.items())
        ]

    @property
    def lost_hosts(self) -> list[str]:
        """The names of the hosts that are lost."""
        return [self.roster.names[host] for host in sorted(self._lost)]
