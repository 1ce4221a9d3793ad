"""The state of a link: tables, their chunks, frames under way, and what is to be sent in which order.

Plain records that ``link.py``, which sends, and ``receiving.py`` change under one lock.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from multiverso.hosts.codecs import Wire
from multiverso.hosts.options import Every
from multiverso.hosts.peer.frames import Header
from multiverso.hosts.peer.resources import Array, Pace
from multiverso.hosts.values.copies import Changes, Chunk, Copy
from multiverso.hosts.values.frames import Opened
from multiverso.hosts.values.shared_values import SharedValues


@dataclass(eq=False)
class UnderWay:
    """A push that is not answered yet."""

    header: Header
    buffer: Array
    rest: bool  # S is not V itself after it
    ticket: int


@dataclass(eq=False, slots=True)
class Away:
    """A chunk whose home is the peer."""

    chunk: Chunk
    agreed: Array
    fresh: bool = True  # nothing of it was pushed yet
    busy: bool = False
    frame: UnderWay | None = None
    goal: int = 0  # the last ticket that asks for it
    done: int = 0
    tries: int = 0
    take: bool = False
    rest: bool = False  # the pass under way takes what an earlier one has left
    passing: bool = False  # the pass under way waits for it


@dataclass(eq=False, slots=True)
class Here:
    """A chunk whose home is this host, with one peer."""

    chunk: Chunk
    agreed: Array
    fresh: bool = True


@dataclass(eq=False)
class Held:
    """A table on this host, which all links share.

    Attributes:
        copy: the host's own.
        changes: of it, counted by all links together.
        homes: of each chunk, the host where it lives.
        wire: the format of what this host sends.
        every: how often a pass begins.
        outer: the rule between hosts, with the shared values of what lives here; None where they are summed.
    """

    copy: Copy
    changes: Changes
    homes: list[int]
    wire: Wire
    every: Every
    outer: SharedValues | None = None

    @property
    def home(self) -> Copy:
        """The shared values of the chunks that live here."""
        return self.copy if self.outer is None else self.outer.copy

    @property
    def home_changes(self) -> Changes:
        """Of these."""
        return self.changes if self.outer is None else self.outer.changes

    def close(self) -> None:
        """Releases the memory: nothing is in it afterwards."""
        self.copy.close()
        self.home.close()


@dataclass(eq=False)
class LinkTable:
    """A table as one link has it."""

    number: int
    held: Held
    opened: Opened
    theirs: Opened | None = None
    away: dict[int, Away] = field(default_factory=dict)
    here: dict[int, Here] = field(default_factory=dict)
    passing: int = 0  # chunks of the pass under way that are not answered yet
    began: float = float("-inf")
    whole: bool = False  # the pass under way is over all chunks
    alike_at: float | None = (
        None  # the last time that nothing differed, as is known now; the first is when both sides have it
    )
    first: bool = False
    seen: int = 0
    news: bool = False
    again: set[int] = field(default_factory=set)
    marked: int = 0  # home: changes when the peer's last pass began
    announced: bool = False
    closed: bool = False  # by the peer

    ruling: bool = False  # pushes go through the rule: not those of initial values

    @property
    def chunk_bytes(self) -> int:
        """The most that a frame of it carries."""
        return self.opened.chunk * self.held.copy.dtype.itemsize

    @property
    def differs(self) -> bool:
        """Whether something is known that is not at the peer, or not here, yet."""
        return bool(self.passing or self.again or self.news or self.seen != self.held.changes.version) and bool(
            self.away
        )

    @property
    def ready(self) -> bool:
        """Whether both sides have it, and mean the same homes."""
        return self.theirs is not None and self.theirs.epoch == self.opened.epoch


@dataclass(eq=False)
class Ticket:
    """A settle: over when nothing is left in it."""

    number: int
    left: set[Away]

    @property
    def done(self) -> bool:
        """Whether all of it was pushed (and taken) since."""
        return not self.left


class Queues:
    """A link's queues.

    Args:
        window: chunks that are under way at a time, at most.
        pace: the node's budget, for what no worker waits for.
    """

    def __init__(self, window: int, pace: Pace) -> None:
        self.bytes_window: float = math.inf  # no chunk begins while so many bytes are under way
        self._window = window
        self._under_way = self._bytes_under_way = 0
        self._pace = pace
        self._urgent: OrderedDict[Away, LinkTable] = OrderedDict()  # what threads wait for
        self._todo: OrderedDict[Away, LinkTable] = OrderedDict()  # of passes

    def pause(self, now: float) -> float:
        """Returns the seconds until the budget allows more: 0 where a thread here waits for a settle."""
        return 0.0 if self._urgent else self._pace.wait(now)

    def ask(self, table: LinkTable, part: Away) -> None:
        """A thread waits for a chunk; one that is under way is asked for when it comes back."""
        if not part.busy:
            self._urgent.setdefault(part, table)

    def begin_pass(self, table: LinkTable, parts: Iterable[Away], rest: bool) -> None:
        """Chunks of a table that go when the budget allows; ``rest``: what earlier pushes have left."""
        for part in parts:
            part.passing, part.rest = True, rest
            table.passing += 1
            self._todo[part] = table

    def passed(self, table: LinkTable, part: Away, again: bool) -> bool:
        """A chunk has come back, and goes ``again`` with the next pass. Returns whether a pass is over."""
        if again:
            table.again.add(part.chunk.number)
        if not part.passing or part in self._todo:
            return False
        part.passing = False
        table.passing -= 1
        return table.passing == 0

    def forget(self, table: LinkTable) -> None:
        """Drops all frames of a table."""
        for part in table.away.values():
            for queue in (self._urgent, self._todo):
                queue.pop(part, None)
            if part.frame is not None:
                self.came_back(part)  # a part of it may still be to send: its memory is not used again
            part.passing = False
        table.passing = 0

    @property
    def has_something(self) -> bool:
        """Whether a chunk is to be pushed."""
        return bool(self._todo or self._urgent)

    def wait(self, now: float) -> float | None:
        """Returns the seconds until there is something to push: 0 for at once, None to wait for an event."""
        if self._is_full:
            return None
        if any(table.ready for table in self._urgent.values()):
            return 0.0
        return self._pace.wait(now) if self._todo else None

    def choose(self, now: float, most: int) -> tuple[LinkTable, Away] | None:
        """Returns the chunk to push next, which is under way from now on."""
        if self._is_full:
            return None
        found = self._choose_urgent(most) or self._choose_todo(now, most)
        if found is not None:
            self._urgent.pop(found[1], None)
            found[1].busy = True
            self._under_way += 1
            self._bytes_under_way += found[1].agreed.nbytes
        return found

    @property
    def _is_full(self) -> bool:
        return self._under_way >= self._window or self._bytes_under_way >= self.bytes_window

    def _choose_urgent(self, most: int) -> tuple[LinkTable, Away] | None:
        for part, table in self._urgent.items():
            if table.ready and table.chunk_bytes <= most:
                return table, part
        return None

    def _choose_todo(self, now: float, most: int) -> tuple[LinkTable, Away] | None:
        while self._todo and self._pace.wait(now) == 0.0:
            part, table = next(iter(self._todo.items()))
            if table.chunk_bytes > most:
                break
            del self._todo[part]
            if table.ready and not part.busy:
                return table, part
            self.passed(table, part, again=True)  # under way for a settle: the next pass has the rest
        return None

    def came_back(self, part: Away) -> None:
        """A chunk is under way no more."""
        part.frame, part.busy = None, False
        self._under_way -= 1
        self._bytes_under_way -= part.agreed.nbytes
