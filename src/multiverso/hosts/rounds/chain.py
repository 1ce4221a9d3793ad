"""What a host keeps of the rounds of all tables together, and what there is to send of it, for ``rounds.py``."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from multiverso.hosts.peer.frames import Outgoing
from multiverso.hosts.peer.resources import Buffers
from multiverso.hosts.rounds import frames, refills
from multiverso.hosts.rounds.frames import RoundHeader, at_frame
from multiverso.hosts.rounds.state import WINDOW, Giving, RoundTable, Sum
from multiverso.hosts.transport.channel import FAR, megabytes_for

_EPOCHS = 256


class Chain:
    """One host's place. It changes when hosts are lost or come again, which begins a new *epoch*.

    Args:
        host: its number.
        live: the hosts of the job.
        most: steps that may be under way.

    Attributes:
        before: the host before, None for the head.
        next: the host after it, None for the tail.
        epoch: how often the hosts have formed a chain anew, modulo 256.
        ahead: how many steps the head begins before the total of the first is there: as the way down the chain is long.
    """

    def __init__(self, host: int, live: Sequence[int], most: int) -> None:
        self._host, self._most = host, most
        self._distances: dict[int, float] = {}
        self.epoch = 0
        self._place(live)

    def regroup(self, live: Sequence[int]) -> None:
        """Continues without lost hosts, or with one that has come again."""
        self.epoch = (self.epoch + 1) % _EPOCHS
        self._place(live)

    def begin_anew(self, live: Sequence[int], epoch: int) -> None:
        """In a host that takes a lost one's place: who is there, and how often that has changed."""
        self.epoch = epoch % _EPOCHS
        self._place(live)

    @property
    def live(self) -> list[int]:
        """The hosts in their order."""
        return list(self._live)

    def at_distance(self, peer: int, seconds: float) -> None:
        """Sets the shortest round-trip time to a host."""
        self._distances[peer] = seconds
        self._look_ahead()

    def _place(self, live: Sequence[int]) -> None:
        self._live = sorted(live)
        index = self._live.index(self._host)
        self.before: int | None = self._live[index - 1] if index else None
        self.next: int | None = self._live[index + 1] if index + 1 < len(self._live) else None
        self._look_ahead()

    def _look_ahead(self) -> None:
        to_next = megabytes_for(self._distances.get(self.next, FAR)) if self.next is not None else 1
        self.ahead = min(self._most, 2 * to_next * (len(self._live) - 1) or 1)


@dataclass(eq=False)
class ChainState:
    """The state. Whoever reads or changes them has ``state_lock``, and ``memory_lock`` for tables' memory.

    Attributes:
        host: this host's number.
        chain: where it stands.
        wake: called with a peer's number when there may be something to send to it.
        moved: called when all totals of a turn have come.
        tables: by number; ``closed``: those that were released, of which frames may still come.
        early: what others have asked for of tables that are not here yet.
        outboxes: of each connected peer what is not a sum.
    """

    host: int
    chain: Chain
    wake: Callable[[int], None]
    moved: Callable[[], None]
    tables: dict[int, RoundTable] = field(default_factory=dict)
    closed: set[int] = field(default_factory=set)
    early: dict[int, dict[int, Giving]] = field(default_factory=dict)
    outboxes: dict[int, deque[Outgoing]] = field(default_factory=dict)
    pool: Buffers = field(default_factory=lambda: Buffers(2 * WINDOW))
    memory_lock: threading.RLock = field(default_factory=threading.RLock)
    state_lock: threading.RLock = field(default_factory=threading.RLock)

    # -- what there is to send ------------------------------------------------------------------------------

    def asked_by(self, peer: int) -> RoundTable | None:
        """A table whose values a peer has asked for and can have."""
        if peer not in self.outboxes:
            return None
        return next((table for table in self.tables.values() if refills.can_answer(table, peer)), None)

    def find(self, peer: int) -> Outgoing | tuple[RoundTable, int, int, Sum] | None:
        """Returns what is next for a peer: a word, or a table, a kind of frame, a step and what there is of it."""
        outbox = self.outboxes.get(peer)
        if outbox is None:
            return None
        if outbox:
            return outbox[0]
        before, after = self.chain.before, self.chain.next
        for table in self.tables.values():
            if peer not in table.theirs:
                continue
            if peer == after:
                step = max(table.pushed, table.arrived) + 1
                found = table.sums.get(step)
                if found is not None:
                    return table, frames.SUM, step, found
            elif peer == before:
                step = table.returned + 1
                found = table.totals.get(step)
                if found is not None:
                    return table, frames.TOTAL, step, found
        return None

    # -- words to other hosts -------------------------------------------------------------------------------

    def say_all(self) -> None:
        """Says to all neighbours how far this host is with all tables."""
        for peer in self.outboxes:
            for table in self.tables.values():
                self.say(peer, table)

    def say(self, peer: int, table: RoundTable) -> None:
        """Says to a peer how far this host is with a table, if it is a neighbour and connected."""
        if peer in self.outboxes and peer in (self.chain.before, self.chain.next):
            self.outboxes[peer].append(at_frame(table, self.chain.epoch))

    def say_to_next(self, table: RoundTable) -> set[int]:
        """Says it to the next host; returns which that is."""
        if self.chain.next is None:
            return set()
        self.say(self.chain.next, table)
        return {self.chain.next}

    def wake_neighbours(self) -> None:
        """There may be something to send to the neighbours."""
        for peer in (self.chain.before, self.chain.next):
            if peer is not None:
                self.wake(peer)

    def tell(self, table: RoundTable, round_number: int) -> int | None:
        """Asks the host before for a round; returns which host that is, or None where it need not be asked."""
        before = self.chain.before
        if before is None or before not in table.theirs or round_number <= table.told:
            return None
        table.told = round_number
        self.outboxes[before].append(Outgoing(RoundHeader(frames.WANT, table=table.number, number=round_number)))
        return before

    def ask(self, table: RoundTable, peer: int) -> None:
        """Asks a peer for what the table waits for; one that is not connected is asked when it is."""
        if peer in self.outboxes and table.refill is not None and not table.refill.over:
            self.outboxes[peer].append(refills.question(table))

    def forget_questions(self, peer: int) -> None:
        """What a peer has asked for over a connection that is no more: it asks again over the next."""
        for gives in (*self.early.values(), *(table.gives for table in self.tables.values())):
            gives.pop(peer, None)
