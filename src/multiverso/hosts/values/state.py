"""What a link keeps in its books: tables, their chunks, frames under way. Plain records that ``link.py`` moves."""

from __future__ import annotations

from dataclasses import dataclass, field

from multiverso.hosts.peer.buffers import Array
from multiverso.hosts.peer.frames import Header, Opened
from multiverso.hosts.values.codecs import Wire
from multiverso.hosts.values.copies import Changes, Chunk, Copy
from multiverso.hosts.values.pace import Every
from multiverso.hosts.values.shared_values import SharedValues


@dataclass
class Traffic:
    """What a link has done since it was made."""

    pushes: int = 0
    answers: int = 0
    empty: int = 0
    repeated: int = 0
    news: int = 0
    passes: int = 0
    connections: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0


@dataclass(eq=False)
class UnderWay:
    """A push that is not answered yet."""

    header: Header
    body: memoryview
    buffer: Array
    some: bool
    rest: bool  # S is not V itself after it
    ticket: int


@dataclass(eq=False, slots=True)
class Away:
    """A chunk whose home is the peer."""

    chunk: Chunk
    agreed: Array
    number: int = 0
    busy: bool = False
    frame: UnderWay | None = None
    goal: int = 0  # the last ticket that asks for it
    done: int = 0
    tries: int = 0
    take: bool = False
    urgent: bool = False  # it is in that queue
    rest: bool = False  # the pass under way takes what an earlier one has left
    queued: bool = False  # it is in the queue of passes
    passing: bool = False  # the pass under way waits for it


@dataclass(eq=False, slots=True)
class Here:
    """A chunk whose home is this host, with one peer."""

    chunk: Chunk
    agreed: Array
    applied: int = 0


@dataclass(eq=False)
class LinkTable:
    """A table as one link has it."""

    number: int
    copy: Copy
    changes: Changes
    outer: SharedValues | None  # where the shared values are no host's own
    wire: Wire
    every: Every
    opened: Opened
    theirs: Opened | None = None
    away: dict[int, Away] = field(default_factory=dict)
    here: dict[int, Here] = field(default_factory=dict)
    passing: int = 0  # chunks of the pass under way that are not answered yet
    began: float = float("-inf")
    first: bool = False
    seen: int = 0
    news: bool = False
    again: set[int] = field(default_factory=set)
    marked: int = 0  # home: changes when the peer's last pass began
    told: bool = False
    closed: bool = False  # by the peer

    ruling: bool = False  # pushes go through the rule: not those of initial values

    @property
    def home(self) -> Copy:
        """The shared values of the chunks that live here."""
        return self.copy if self.outer is None else self.outer.copy

    @property
    def home_changes(self) -> Changes:
        """Of these."""
        return self.changes if self.outer is None else self.outer.changes

    @property
    def chunk_bytes(self) -> int:
        """The most that a frame of it carries."""
        return self.opened.chunk * self.copy.dtype.itemsize

    @property
    def ready(self) -> bool:
        """Whether both sides have it, and mean the same homes."""
        return self.theirs is not None and self.theirs.epoch == self.opened.epoch


@dataclass(eq=False)
class Ticket:
    """A settle: over when nothing is left in it."""

    number: int
    left: set[int]
    parts: dict[int, Away] = field(repr=False)

    @property
    def done(self) -> bool:
        """Whether all of it was pushed (and taken) since."""
        return not self.left
