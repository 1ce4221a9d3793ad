"""What a host keeps of each table's rounds, for ``rounds.py``: sums under way, totals, and how far everybody is."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from multiverso.hosts import codecs
from multiverso.hosts.peer.frames import NOTHING
from multiverso.hosts.peer.resources import Array, view
from multiverso.hosts.rounds.memory import RoundMemory
from multiverso.hosts.rounds.roll import Came, Roll

WINDOW = 16  # steps
FILL = -1  # in the place of a host: the first in the chain that has the values
OVERWRITES, FILLS = 1, 2  # of a sum
NO_BYTES: Array = np.empty(0, np.uint8)


@dataclass(eq=False, slots=True)
class Sum:
    """Of a chunk: how many have contributed, and the bytes; none where there is no contribution.

    Attributes:
        overwrites: `OVERWRITES`: the chunk is of a turn that overwrites the values with one host's; `FILLS`: of one
            that brings them to hosts that lack them.
        known: the last step whose total the head had when it began this one.
        earlier: it is a total that an earlier chain has made: later ones may be there, too.
        code: the number of the format in which its bytes are, see ``hosts/codecs.py``.
    """

    count: int
    buffer: Array
    length: int
    overwrites: int = 0
    known: int = 0
    earlier: bool = False
    code: int = codecs.NATIVE

    @property
    def body(self) -> memoryview:
        """What travels."""
        return view(self.buffer, self.length) if self.count else NOTHING


@dataclass(eq=False, slots=True)
class Refill:
    """The values of a table are wanted, and the turns after the one that brings them wait until they are used.

    Attributes:
        then: called once they are here, or no host has them.
        since: the last turn that had begun here when a turn that brings them was asked for; None: it was not.
        turn: the one that brings them, once it passes by here.
        here: no chunk of it was missing.
        over: it has come back, and the next turn waits for ``Rounds.release``.
    """

    then: Callable[[bool], None]
    since: int | None = None
    turn: int | None = None
    here: bool = True
    over: bool = False


@dataclass(eq=False)
class RoundTable:
    """A table's state. Steps, turns and rounds: see ``rounds.py``.

    Attributes:
        number: the table's, in the job.
        staged: how its memory is reached.
        began: this host's initial values are written.
        decided: the last turn of which it is fixed who takes part; ``members``: who of this host that is, a bit each.
        overwrites: turns that carry a host's values, and which host's; ``passed``: how many of them are forgotten.
        awaited: the last turn that a ``take`` waits for; ``expected``: as another host has its values already.
        arrived, folded, received: the last step whose total is here; to which this host has added its part; whose sum
            has come from the host before.
        pushed: the last step whose sum went to the next host.
        returned: the last step whose total went to the host before.
        incoming: sums that wait for this host's workers, by step.
        sums, totals: what was passed on and may be asked for again, by step.
        theirs: neighbours that have said how far they are, in this epoch.
        known: the last step whose total every host has: none asks for it again.
        wanted: the last round that a host behind waits for.
        requested: the last round that this host has asked the one before for.
        waits_since: since when a worker waits for the round that is due; None: none does.
        blank: the values are not here: sums and totals pass, and nothing is done with them.
        placed: it is known how far the chain is: of a blank one, once the host before has said so.
        refill: the values are wanted here.
        lacking: this host or one behind lacks the values, which a turn after this one can bring; None: no host does.
        told: up to which such turn the host before knows.
        roll: with a quorum, at the head: who has come to the next round.
        said: at another host, what it has told the head of that, and of which round.
        rest: of a table whose sums are coded, what the format has left out of those that this host has sent.
        rests: what is left of a chunk when a step's total has come; ``rests_before``: when an earlier chain made it.
    """

    number: int
    staged: RoundMemory
    began: bool = False
    decided: int = -1
    members: int = 0
    overwrites: dict[int, int] = field(default_factory=dict)
    passed: int = 0
    awaited: int = 0
    expected: int = 0
    arrived: int = 0
    folded: int = 0
    received: int = 0
    pushed: int = 0
    returned: int = 0
    incoming: dict[int, Sum] = field(default_factory=dict)
    sums: dict[int, Sum] = field(default_factory=dict)
    totals: dict[int, Sum] = field(default_factory=dict)
    theirs: set[int] = field(default_factory=set)
    known: int = 0
    wanted: int = 0
    requested: int = 0
    waits_since: float | None = None
    blank: bool = False
    placed: bool = True
    refill: Refill | None = None
    lacking: int | None = None
    told: int = -2
    roll: Roll = field(default_factory=Roll)
    said: tuple[int, Came] | None = None
    rest: npt.NDArray[Any] | None = None
    rests: dict[int, npt.NDArray[Any]] = field(default_factory=dict)
    rests_before: dict[int, npt.NDArray[Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.staged.is_coded:
            self.rest = np.zeros(self.staged.elements, self.staged.dtype)
        self.chunks = -(-self.staged.elements // self.staged.chunk)
        """How many a turn has."""

    def turn_and_chunk(self, step: int) -> tuple[int, int]:
        """Returns which turn a step belongs to, and which chunk it is."""
        return divmod(step - 1, self.chunks)

    def round_of(self, turn: int) -> int:
        """Returns which of the workers' rounds a turn is: turns that overwrite are none."""
        before = sum(other < turn for other in self.overwrites) if self.overwrites else 0
        return turn - self.passed - before

    def size_of(self, step: int, overwrites: int) -> int:
        """Bytes of a step."""
        staged, (turn, chunk) = self.staged, self.turn_and_chunk(step)
        if overwrites == FILLS:
            return staged.fill_bytes(chunk)
        extra = staged.extra if turn > 0 and not overwrites else 0
        return (min(staged.chunk, staged.elements - chunk * staged.chunk) + extra) * staged.dtype.itemsize

    def is_coded(self, step: int) -> bool:
        """Whether the sum of a step is one of differences, for a format that leaves something out."""
        turn = self.turn_and_chunk(step)[0]
        return turn > 0 and self.staged.is_coded and turn not in self.overwrites

    def place(self, arrived: int) -> None:
        """Of a blank table: the host before has said how far it is, and so far is this one."""
        self.arrived = self.folded = self.received = arrived
        self.decided, self.placed = (arrived - 1) // self.chunks, True
        self.ask_anew()

    def ask_anew(self) -> None:
        """What was asked for may have gone through without this host."""
        if self.refill is not None and not self.refill.over:
            self.refill.since = self.refill.turn = None

    @property
    def filling(self) -> bool:
        """Whether a turn that brings values is under way."""
        ends = ((turn + 1) * self.chunks for turn, host in self.overwrites.items() if host == FILL)
        return any(self.arrived < end for end in ends)

    def _waits(self, turn: int) -> bool:
        """Whether a turn waits for what is done with the values that are wanted."""
        refill = self.refill
        if refill is None or turn <= max(self.decided, 0):
            return False
        if refill.over or (refill.since is None and not self.blank):
            return True
        return refill.turn is not None and turn > refill.turn

    def is_wanted(self, round_number: int) -> bool:
        """Returns whether a worker here or behind waits for a round, and the host before does not know yet."""
        return self.requested < round_number and (self.wanted >= round_number or self.staged.wanted(round_number))

    def members_if_ready(self, turn: int, overwrites: bool, heads: bool) -> int | None:
        """Returns who of this host takes part in a turn, or None while it is not ready. Changes nothing.

        Args:
            turn: its number.
            overwrites: the host before says that it is one that overwrites.
            heads: whether this host is the first of the chain, which begins the rounds that workers wait for.
        """
        if self._waits(turn):
            return None
        if self.blank:
            return 0
        if turn <= self.decided or turn in self.overwrites:
            return self.members
        if turn == 0:
            return self.members if self.began else None
        if overwrites:
            return None  # the host before knows of it, this one does not yet
        round_number = self.round_of(turn)
        if self.staged.by_quorum:  # closed by the head: who is in it here is fixed with the turn
            return 0 if not heads or self.roll.closed >= round_number else None
        members = self.staged.members(round_number)
        if members is None or (heads and self.wanted < round_number and not self.staged.wanted(round_number)):
            return None
        return members

    def fix_members(self, turn: int, members: int) -> None:
        """At a turn's first step: who of this host takes part stays as it is for all of it."""
        if turn <= self.decided:
            return
        self.members, self.decided = members, turn
        if turn > 0 and turn not in self.overwrites and not self.blank:
            self.members = self.staged.decide(self.round_of(turn), members)

    @property
    def next_turn(self) -> int:
        """The first turn of which nothing is decided."""
        return next(turn for turn in itertools.count(max(self.decided, 0) + 1) if turn not in self.overwrites)

    @property
    def next_round(self) -> int | None:
        """With a quorum: the round that workers come to now; None while the one before is on its way."""
        over = self.placed and self.began and self.arrived >= (max(self.decided, 0) + 1) * self.chunks
        return self.round_of(self.next_turn) if over else None

    def forget_requests(self) -> None:
        """Another host may be before this one."""
        self.requested, self.told, self.said = 0, -2, None

    def forget(self) -> None:
        """Drops the turns with a host's values that no host lacks."""
        done = [turn for turn in self.overwrites if (turn + 1) * self.chunks + WINDOW <= self.arrived]
        self.passed += len(done)
        for turn in done:
            del self.overwrites[turn]


def numbers_of(table: RoundTable, found: Sum) -> npt.NDArray[np.generic]:
    """Returns the memory of a sum as the table's numbers."""
    return found.buffer[: found.length].view(table.staged.dtype)
