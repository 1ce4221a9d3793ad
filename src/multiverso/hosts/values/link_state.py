"""What both halves of a link share, the one that sends (``link.py``) and the one that receives (``receiving.py``)."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field

from multiverso.hosts.peer import frames
from multiverso.hosts.peer.buffers import Buffers
from multiverso.hosts.peer.frames import Header, Outgoing
from multiverso.hosts.rounds.rounds import Rounds
from multiverso.hosts.values.queues import Queues
from multiverso.hosts.values.state import Away, LinkTable, Ticket, Traffic


@dataclass(eq=False)
class LinkBooks:
    """The books of a link. Whoever reads or writes them has the lock, but for ``rounds``, which has its own.

    Attributes:
        peer: the other host's number.
        pool: memory for frames.
        queues: what is to be sent.
        rounds: of this host; their frames go over the same connections.
        tables: by number.
        closed: tables that were let go of, of which frames may still come.
        tickets: settles that are not over.
        answering: pushes of the peer whose answers are not sent yet.
        serving_urgent: somebody at the peer waits for what it pushes.
    """

    peer: int
    pool: Buffers
    queues: Queues
    rounds: Rounds
    traffic: Traffic = field(default_factory=Traffic)
    tables: dict[int, LinkTable] = field(default_factory=dict)
    closed: set[int] = field(default_factory=set)
    tickets: list[Ticket] = field(default_factory=list)
    answering: int = 0
    serving_urgent: bool = False
    connected: bool = False
    peer_left: bool = False
    lock: threading.RLock = field(default_factory=threading.RLock)

    def say_open(self, table: LinkTable) -> None:
        """Tells the peer that this side has a table."""
        if self.connected:
            body = memoryview(table.opened.pack())
            header = Header(frames.OPEN, table=table.number, length=len(body))
            self.queues.words.append(Outgoing(header, body))

    def begin_what_is_due(self, table: LinkTable, now: float) -> None:
        """Tells the peer news of what lives here, and begins a pass over what lives there, if it is time."""
        changes = table.changes
        if table.here and not table.told and table.home_changes.for_peer(self.peer) != table.marked:
            table.told = True
            self.traffic.news += 1
            self.queues.words.append(Outgoing(Header(frames.NEWS, table=table.number)))
        if table.passing or not table.away or now - table.began < table.every.seconds:
            return
        moved = changes.version - table.seen
        if table.every.changes:
            whole = moved >= table.every.changes
        else:
            whole = moved != 0 or table.news
        if whole:
            table.seen, table.news, table.first = changes.version, False, True
            parts: Iterable[Away] = table.away.values()
        elif table.again and not table.every.changes:
            parts = [table.away[number] for number in sorted(table.again)]
        else:
            return
        table.again = set()
        table.began = now
        self.traffic.passes += 1
        self.queues.begin_pass(table, parts, rest=not whole)
