"""What a host keeps of the rounds of all tables together, and what there is to send of it, for ``rounds.py``."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from multiverso.hosts import frames, refills
from multiverso.hosts.books import Outgoing
from multiverso.hosts.buffers import Buffers
from multiverso.hosts.chain import Chain
from multiverso.hosts.frames import RoundHeader
from multiverso.hosts.round_books import WINDOW, Giving, RoundTable, Sum
from multiverso.hosts.round_frames import at_frame


@dataclass(eq=False)
class ChainBooks:
    """The books. Whoever reads or changes them has ``state_lock``, and ``memory_lock`` for tables' memory.

    Attributes:
        host: this host's number.
        chain: where it stands.
        wake: called with a peer's number when there may be something to send to it.
        moved: called when all totals of a turn have come.
        tables: by number; ``closed``: those that were let go of, of which frames may still come.
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
        self.outboxes[before].append(
            Outgoing(RoundHeader(frames.WANT, table=table.number, number=round_number))
        )
        return before

    def ask(self, table: RoundTable, peer: int) -> None:
        """Asks a peer for what the table waits for; one that is not connected is asked when it is."""
        if peer in self.outboxes and table.refill is not None and not table.refill.over:
            self.outboxes[peer].append(refills.question(table))

    def forget_questions(self, peer: int) -> None:
        """What a peer has asked for over a connection that is no more: it asks again over the next."""
        for gives in (*self.early.values(), *(table.gives for table in self.tables.values())):
            gives.pop(peer, None)
