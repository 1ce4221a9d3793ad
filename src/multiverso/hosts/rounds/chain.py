"""What a host keeps of the rounds of all tables together, and what there is to send of it, for ``rounds.py``."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from multiverso.hosts.peer.frames import Numbered, Outgoing
from multiverso.hosts.peer.resources import Buffers
from multiverso.hosts.rounds import frames
from multiverso.hosts.rounds.frames import RoundHeader, at_frame, step_frame
from multiverso.hosts.rounds.state import FILL, WINDOW, RoundTable
from multiverso.hosts.transport.channel import FAR, megabytes_for

_EPOCHS = 256


class Chain:
    """The state of `Rounds`.

    A thread that reads or changes it holds ``state_lock``, and ``memory_lock`` for tables' memory.
    It changes when hosts are lost or return, which begins a new *epoch*.

    Args:
        host: this host's number.
        live: the hosts of the job.
        wake: called with a peer's number when there may be something to send to it.
        moved: called when all totals of a turn have come.

    Attributes:
        live: the hosts in their order; ``before``: the one before this, None for the head; ``next``: the one after it,
            None for the tail.
        epoch: how often the hosts have formed a new chain, modulo 256.
        ahead: how many steps the head begins before the total of the first is there: as the way down the chain is long.
        tables: by number; ``closed``: those that were released, of which frames may still come.
        ways: to each other host.
    """

    def __init__(
        self, host: int, live: Iterable[int], wake: Callable[[int], None], moved: Callable[[], None] = lambda: None
    ) -> None:
        self.host, self.wake, self.moved = host, wake, moved
        self.tables: dict[int, RoundTable] = {}
        self.closed: set[int] = set()
        self.ways: dict[int, Numbered] = {}
        self.pool = Buffers(2 * WINDOW)
        self.memory_lock, self.state_lock = threading.RLock(), threading.RLock()
        self._distances: dict[int, float] = {}
        self.form(live, 0)

    def form(self, live: Iterable[int], epoch: int) -> None:
        """Begins an epoch, with those hosts; in a host that takes a lost one's place, before it has any table."""
        self.live, self.epoch = sorted(live), epoch % _EPOCHS
        index = self.live.index(self.host)
        self.before: int | None = self.live[index - 1] if index else None
        self.next: int | None = self.live[index + 1] if index + 1 < len(self.live) else None
        self._look_ahead()

    def at_distance(self, peer: int, seconds: float) -> None:
        """Sets the shortest round-trip time to a host."""
        self._distances[peer] = seconds
        self._look_ahead()

    def _look_ahead(self) -> None:
        to_next = megabytes_for(self._distances.get(self.next, FAR)) if self.next is not None else 1
        self.ahead = min(WINDOW, 2 * to_next * (len(self.live) - 1) or 1)

    # -- what there is to send ------------------------------------------------------------------------------

    def pass_on(self, table: RoundTable) -> None:
        """Gives the neighbours what they have not been given of a table's sums and totals."""
        if self.next is not None and self.next in table.theirs:
            while (step := max(table.pushed, table.arrived) + 1) in table.sums:
                table.pushed = step
                self.ways[self.next].post(step_frame(frames.SUM, table, self.epoch, step, table.sums[step]))
        if self.before is not None and self.before in table.theirs:
            while (step := max(table.returned, table.known) + 1) in table.totals:
                table.returned = step
                self.ways[self.before].post(step_frame(frames.TOTAL, table, self.epoch, step, table.totals[step]))

    # -- words to other hosts -------------------------------------------------------------------------------

    def report_progress(self, peer: int, table: RoundTable) -> None:
        """Tells a peer how far this host is with a table, if it is a neighbour."""
        if peer in self.ways and peer in (self.before, self.next):
            self.ways[peer].post(at_frame(table, self.epoch))

    def wake_neighbours(self) -> None:
        """There may be something to send to the neighbours."""
        for peer in (self.before, self.next):
            if peer is not None:
                self.wake(peer)

    def request_round(self, table: RoundTable, round_number: int) -> int | None:
        """Asks the host before for a round; returns which host that is, or None where it need not be asked."""
        before = self.before
        if before is None or before not in table.theirs or round_number <= table.requested:
            return None
        table.requested = round_number
        self.ways[before].post(Outgoing(RoundHeader(frames.WANT, table=table.number, step=round_number)))
        return before

    def request_values(self, table: RoundTable) -> int | None:
        """Asks the host before for a turn that brings the values, like `request_round`; the head decides on one.

        Returns:
            the host that was asked, this one if it has decided; None where nothing is to be done.
        """
        lacking, before = table.lacking, self.before
        if lacking is None:
            return None
        if any(host == FILL and turn > lacking for turn, host in table.overwrites.items()):
            table.lacking = None  # it is on its way
            return None
        if before is None:
            table.forget()
            table.overwrites[table.next_turn] = FILL
            return self.host
        if before not in table.theirs or lacking <= table.told:
            return None
        table.told = lacking
        header = RoundHeader(frames.WANT, flags=frames.LACKING, table=table.number, step=lacking + 1)
        self.ways[before].post(Outgoing(header))
        return before
