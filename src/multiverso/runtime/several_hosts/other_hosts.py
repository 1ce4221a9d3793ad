"""This host's part in a job on several: what joins its node to the coordinator and to the other nodes.

Three threads beside the node's: one reports what this host's workers do (`reporting`), one moves tables' values, one
after another (`moving`), and one receives the coordinator's orders (`hosts.control.connections`). What they find out
reaches the node's thread as orders.
"""

from __future__ import annotations

import functools
import math
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any, assert_never

import msgspec

from multiverso.errors import StartupError
from multiverso.hosts.control.connections import CoordinatorEnd, NodeEnd, credentials_of
from multiverso.hosts.control.messages import (
    Address,
    Agreed,
    AllGathered,
    Alone,
    Answer,
    Begin,
    Bring,
    Clocks,
    Drop,
    Free,
    Gather,
    Hello,
    HostFacts,
    Joined,
    Lost,
    Make,
    Note,
    Options,
    Order,
    Over,
    Part,
    Peers,
    Published,
    Refuse,
    Report,
    Returned,
    Take,
    Used,
    Welcome,
    Workers,
)
from multiverso.hosts.fabric import Fabric
from multiverso.hosts.options import ExchangeOptions
from multiverso.hosts.peer.messages import Messages
from multiverso.hosts.roster import Roster
from multiverso.hosts.transport.channel import FAR
from multiverso.hosts.transport.listener import open_port
from multiverso.layout import words as at
from multiverso.node_log import log
from multiverso.runtime.job.control import Control
from multiverso.runtime.job.options import check_exchange
from multiverso.runtime.node.catalogue import Catalogue
from multiverso.runtime.node.connection import Connection
from multiverso.runtime.node.creation import Creations
from multiverso.runtime.node.membership import Membership
from multiverso.runtime.node.one_host import Hosts
from multiverso.runtime.node.refusals import lost_error
from multiverso.runtime.several_hosts.barriers import HostBarriers
from multiverso.runtime.several_hosts.exchanged_tables import ExchangedTables
from multiverso.runtime.several_hosts.mirror import write_line
from multiverso.runtime.several_hosts.publishers import Publishers
from multiverso.runtime.several_hosts.questions import Questions
from multiverso.runtime.several_hosts.reductions import Reductions
from multiverso.runtime.several_hosts.reporting import Reporter
from multiverso.runtime.several_hosts.spread_tables import SpreadTables
from multiverso.runtime.several_hosts.this_host import Post, ThisHost
from multiverso.spec.modes import MODES
from multiverso.spec.table import TableSpec
from multiverso.wire import requests as asked
from multiverso.wire.messages import Message

_LOOK_SECONDS = 0.5


class OtherHosts(Hosts):
    """Owner: the node; ``close`` ends it.

    Args:
        roster: the job's hosts.
        fabric: moves tables' values between them; closed with this.
        listener: where the coordinator listens, on its own host.

    Attributes:
        over: set when all workers of all hosts have gone, so that this host's copies are no longer needed.
        here: what the parts share, once the memory is there; and with it the parts:
        reporter: reports to the coordinator what this host's workers do.
        tables: which of them travel, and how.
        barriers: who has reached which.
        reductions: arrays that workers of all hosts reduce.
        rows: tables whose rows live on one host each.
    """

    several = True
    here: ThisHost  # once all of it is there
    _centre: CoordinatorEnd | NodeEnd  # once the coordinator was met

    def __init__(self, roster: Roster, fabric: Fabric, listener: socket.socket | None = None) -> None:
        super().__init__()
        self.roster = roster
        self.leads, self.job = roster.leads, roster.job
        self.places = roster.places(), roster.names[roster.host]
        self.is_entering = roster.times_replaced > 0
        self.over = threading.Event()
        self.fabric, self._listener = fabric, listener
        self._closing = threading.Event()
        self._lost: set[int] = set()
        self._notes: dict[int, Note] = {}
        self._published: dict[str, Address] = {}  # where the workers' publications are followed

    def meet(self, post: Post, address: str) -> None:
        """See `Hosts.meet`."""
        self._post, self._node = post, address

    def begin(self, control: Control, catalogue: Catalogue, fixed: bool) -> Creations:
        """Begins to report this host's workers, and to show remote ones in its memory. Called once."""
        fabric = self.fabric
        control.span_hosts()
        self.control = control
        here = ThisHost(self.roster, control, catalogue, fabric, self._post, self._tell, self._closing)
        self.rows = SpreadTables(here)
        self.reporter = Reporter(here, self._facts)
        self.tables = ExchangedTables(here, self.rows, self.reporter)
        self.barriers = HostBarriers(here, self.tables, lambda worker: self.replaces and worker not in self.ended)
        self._publishers = Publishers(self._node, here)
        self._questions = Questions(self.reporter.report)
        self._messages = Messages(fabric.peers, lambda host, message: self.reductions.arrived(host, message))
        self.reductions = Reductions(here, self._messages)
        self._creations = Creations(catalogue, control, fixed, self.tables)
        self._centre = self._meet(self._listener)  # last: what other nodes send finds all of it there
        self.here = here
        here.thread("hosts-move", here.move)
        here.thread("hosts-report", self.reporter.run)
        here.thread("reductions", self.reductions.run)
        return self._creations

    @property
    def all_came(self) -> bool:
        """Whether no host is known not to have come yet."""
        return not hasattr(self, "_centre") or self._centre.all_came

    def _meet(self, listener: socket.socket | None) -> CoordinatorEnd | NodeEnd:
        """Begins to listen for the other hosts, and to talk with the coordinator."""
        roster = self.roster
        self.fabric.tables.rest.share(self.control.address)
        address = self.fabric.listen()
        if roster.addresses:  # it listens at all of its addresses; this is the one that others know
            address = (roster.addresses[roster.host], address[1])
        self._address = address  # where other hosts reach this one
        if not roster.leads:
            return NodeEnd(roster, address, self._post)
        if listener is None:
            raise StartupError("the job's first host needs to listen for the others")
        centre = CoordinatorEnd(roster, listener, self._post)
        centre.report(Hello(address))
        return centre

    def _tell(self, report: Report) -> None:
        self._centre.report(report)

    def stay(self, closing: threading.Event, stopped: Callable[[], bool] | None) -> bool:
        """Waits until no other host needs this one's copies, as none does where one has never come."""
        while not self.over.wait(_LOOK_SECONDS):
            if closing.is_set() or (stopped() if stopped else not self.all_came):
                return False
        return True

    def close(self) -> None:
        """See `Hosts.close`."""
        self._closing.set()
        begun = hasattr(self, "here")
        if begun:
            self.here.stop_moving()
            self.reductions.close()
            self.rows.ring()
            self.control.notify()  # those that follow the workers
        self.fabric.close()
        if hasattr(self, "_centre"):
            self._centre.close()
        if begun:
            self.here.join()

    # -- what happens on this host ---------------------------------------------------------------------------

    def options_of(self, request: asked.Attach) -> Message:
        """See `Hosts.options_of`."""
        exchange = ExchangeOptions.from_message(request.exchange)
        check_exchange(MODES[request.consistency.mode], exchange)
        return {"exchange": exchange.as_message()}

    def agree_on(self, options: Message) -> bool:
        """Tells the coordinator, which says whether all hosts' are the same."""
        self.tables.how = ExchangeOptions.from_message(options["exchange"])
        self.reporter.report(Options(options))
        return False

    def answer(self, connection: Connection, request: asked.Request) -> None:
        """See `Hosts.answer`."""
        worker_id = connection.attached_id  # others are refused
        match request:
            case asked.Arrived():
                self.barriers.look()
            case asked.Gather():
                self.reporter.report(Gather(request.number))
            case asked.AllGather():
                self._questions.all_gather(connection, request)
                self._refuse_told()
            case asked.Ask():
                self._questions.ask(connection, request)
            case asked.Notify():
                self._questions.notify(connection, request)
            case asked.Combine():
                self.reductions.contribute(worker_id, request)
            case asked.Spread():
                self.rows.open(request)
                connection.reply(request.id, {})
            case asked.Publish():
                self._publishers.watch()
                here = (self._address[0], request.port)
                if request.port:
                    self.reporter.report(Published(request.name, here, request.instead_of))
                connection.reply(request.id, {"bind": self.roster.bind, "here": here, **self._how_to_follow})

    @property
    def _how_to_follow(self) -> Message:
        return {"token": self.roster.token, "encrypted": credentials_of(self.roster).encrypted}

    def find(self, publication: str) -> Message:
        """See `Hosts.find`."""
        if publication in self._published:
            self._publishers.watch()
        return {"address": self._published.get(publication), **self._how_to_follow}

    def look(self) -> None:
        """A worker of this host has come, left or died."""
        self._refuse_told()
        self.reporter.report()
        self.barriers.look()

    def _refuse_told(self) -> None:
        if lost := self.control.missed():
            self._questions.refuse(lost_error(lost, "before it had sent what others wait for"))

    def forget(self, connection: Connection) -> None:
        """A process no longer waits for an answer."""
        self._questions.forget(connection)

    # -- what happens on others ------------------------------------------------------------------------------

    def obey(self, order: Order | Alone, members: Membership, end: Callable[[], None]) -> None:
        """See `Hosts.obey`."""
        match order:
            case Workers():
                shards = members.catalogue.shards
                remote = [line for line in order.workers if line.worker_id not in self.roster.local]
                notes = {line.worker_id: line.note for line in remote if line.note is not None}
                self._notes |= notes
                if any(note.keyed for note in notes.values()):
                    self.rows.used_elsewhere()
                changed = [line.worker_id for line in remote if write_line(self.control, line, shards)]
                if changed:
                    self._refuse_told()
                for worker_id in changed:
                    members.changed(worker_id)
            case Agreed():
                members.agree()
            case Refuse():
                members.refuse(order.options)
            case Welcome():
                self.welcome(order)
            case AllGathered() | Answer():
                self._questions.answer(order)
            case Alone():
                if not self.over.is_set() and (self.control.continues or not self._lost):
                    if not self.control.missed():  # or all know why it ends
                        log(order.why)
                    end()
            case Make() | Begin() | Drop() | Used() | Part() | Free():
                self._creations.obey(order)
            case Peers():
                # all hosts begin: what was lost of this one had not come to the others
                self.is_entering = False
                self._connect(order.addresses)
            case Lost():
                self._lose(order.host, order.why)
            case Joined():
                self._let_in(order.host, order.address)
            case Returned():
                self.rows.returned(order)
            case Take():
                self.barriers.take(order)
            case Bring():
                self.barriers.bring(order)
            case Gather():
                self.barriers.gathered(order)
            case Clocks():
                self.tables.clocks.hear(order.tables)
            case Published():
                self._published[order.name] = order.address
            case Over():
                self.over.set()
            case _:
                assert_never(order)

    def _lose(self, host: int, why: str) -> None:
        self._lost.add(host)
        self.rows.lost(host)
        if any(self.control.worker(i).is_live for i in self.roster.workers_of(host)):
            log(f"{self.roster.names[host]} is lost: {why}")
        if self.control.continues:
            self.fabric.regroup([h for h in range(self.roster.hosts) if h not in self._lost])
        else:
            self.fabric.lost(host)

    def _connect(self, addresses: Sequence[Address | None]) -> None:
        """Begins to connect to lower hosts; of one that was lost before it came there is no address."""
        for peer, address in enumerate(addresses[: self.roster.host]):
            if address is not None and peer not in self._lost:
                self.fabric.connect(peer, address)

    def _let_in(self, host: int, address: Address) -> None:
        self._lost.discard(host)
        self.fabric.joined(host)
        self.rows.joined(host)
        if host < self.roster.host:
            self.fabric.connect(host, address)  # of two hosts the higher one connects

    def welcome(self, order: Welcome) -> None:
        """This host takes a lost one's place: it gets everything as it is, and then lets its workers come.

        Raises:
            OutOfMemoryError: there is no room for a table.
        """
        self.control.continue_without_lost(True)
        self.times_replaced = self.roster.times_replaced
        self.tables.how = ExchangeOptions.from_message(order.options["exchange"])
        self._lost = set(order.lost)
        self.fabric.begin_anew(order.survivors, self._lost, order.epoch)
        self.rows.begin_at(order.survivors, self._lost, order.returns)
        for line in order.workers:
            write_line(self.control, line)
        self.barriers.begin_at(order.released)
        self._published = {published.name: published.address for published in order.published}
        self._connect(order.addresses)
        catalogue = self.here.catalogue
        remote = [worker for worker in self.control.live() if worker not in self.roster.local]
        for table in sorted(order.tables, key=lambda table: table.number):
            piece = catalogue.make(table.key, TableSpec.from_message(table.spec), table.mode, table.number)
            if piece.shard is not None and piece.shard.mode != at.ASYNCHRONOUS:
                for worker in remote:
                    piece.shard.enrol(worker)
            self.tables.move("join", piece, lambda: None, order.overwritten.get(table.number, {}))
            self.tables.move("finish", piece, functools.partial(self._creations.note_unused, piece))
        catalogue.ordered = order.ordered

        def enter() -> None:
            self.tables.show_all(order.workers, order.clocks)
            self.is_entering = False

        self.here.do(lambda: None, enter)  # once all that was asked for before is done

    def notes(self) -> dict[int, Note]:
        """See `Hosts.notes`."""
        return dict(self._notes)

    def remote_publications(self) -> list[dict[str, Any]]:
        """See `Hosts.remote_publications`."""
        return [
            {"host": self.roster.names[peer], **msgspec.to_builtins(publication)}
            for peer in range(self.roster.hosts)
            for publication in self._facts_of(peer).publications
        ]

    def links(self) -> list[dict[str, Any]]:
        """Returns what went to and came from each other host beside the coordinator's orders, for `multiverso top`."""
        links, here = [], self._facts()
        for peer, link in self.fabric.statistics().items():
            seconds = link.pop("round_trip_seconds")
            link["round_trip_seconds"] = None if seconds == FAR else seconds
            if peer in self._lost:
                link["state"] = "lost"
            elif link["state"] == "cut" and self._has_ended(peer):
                link["state"] = "ended"
            there = self._facts_of(peer)
            # from there to a home and from that to here: of two hosts one is the home
            behind = (max if self.roster.hosts == 2 else math.fsum)((here.behind_seconds, there.behind_seconds))
            link |= {"busy_back_seconds": there.busy_seconds, "behind_seconds": behind}
            links.append({"host": self.roster.names[peer], **link})
        return links

    def _has_ended(self, peer: int) -> bool:
        return all(self.control.worker(worker).has_left for worker in self.roster.workers_of(peer))

    def _facts(self) -> HostFacts:
        others = set(range(self.roster.hosts)) - {self.roster.host} - self._lost
        behind = self.fabric.behind_seconds([peer for peer in others if not self._has_ended(peer)])
        return HostFacts(self.fabric.busy_seconds(), behind, self._publishers.seen)

    def _facts_of(self, peer: int) -> HostFacts:
        note = self._notes.get(self.roster.workers_of(peer)[0])
        is_there = peer not in self._lost and not self._has_ended(peer)
        return note.host if is_there and note is not None and note.host is not None else HostFacts()


def other_hosts_of(roster: Roster, descriptor: int | None) -> OtherHosts:
    """Returns what a node of a job on several hosts is made with.

    Args:
        roster: the job's hosts.
        descriptor: of the coordinator's port, where the launcher has opened it before this process began.
    """
    listener: socket.socket | None = None
    if descriptor is not None:
        listener = socket.socket(fileno=descriptor)
        listener.set_inheritable(False)
    elif roster.leads:
        listener = open_port((roster.bind, roster.coordinator[1]))
    fabric = Fabric(roster.host, roster.hosts, credentials_of(roster), bind=(roster.bind, 0))
    return OtherHosts(roster, fabric, listener)
