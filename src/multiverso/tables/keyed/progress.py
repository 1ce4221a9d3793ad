"""Records the progress of a call on a keyed table, so that the same call after an exception does the rest once.

The rule is that of all tables (``docs/decisions/0045-a-call-that-raised.md``). What a kernel has done stands in arrays
that it writes in one step with its effects: the row of each key that was admitted, whether each key was removed; and in
this worker's undo slot, how many rows were added to. The rows that an unfinished add has found stay pinned, so none of
them is another key's by the time that it continues.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from msgspec import Struct, field

from multiverso.layout.keyed import ELSEWHERE
from multiverso.tables.convert import Array
from multiverso.tables.keyed.keys import Keys
from multiverso.tables.operations import equal_bits

NOT_YET = -(1 << 62)  # in place of a row, or of whether there was one


def done(marks: Keys) -> int:
    """Returns how many of a call's keys, from the first on, a kernel has come to."""
    if marks.size and marks[0] == NOT_YET:
        return 0
    left = marks == NOT_YET
    return int(left.argmax()) if left.any() else marks.size


def unmarked(keys: Keys) -> Keys:
    """Returns a mark for each key, for a kernel to write."""
    return np.full(keys.size, NOT_YET)


class Adding(Struct, eq=False):
    """An add.

    Attributes:
        updater: address of its code.
        keys, delta: what is added; not kept beyond the call, unless it raises.
        call: what `admit` keeps for itself: whether the safe epoch is known, it, and how many adds a key needs.
        rows: of the keys.
        complete: all is done, but the caller may not know it.
        here: on several hosts: the part of it that is done to rows that live on this one.
    """

    updater: int
    keys: Keys
    delta: Array
    call: Keys
    rows: Keys
    complete: bool = False
    here: Adding | None = None

    @classmethod
    def of(cls, updater: int, keys: Keys, delta: Array, after: int) -> Adding:
        """Returns one that has not begun; ``after``: how many adds a key needs to get a row."""
        return cls(updater, keys, delta, np.array([0, 0, after]), unmarked(keys))

    def is_same(self, other: object) -> bool:
        """Returns whether another call is the repetition of this one."""
        return (
            isinstance(other, Adding)
            and self.updater == other.updater
            and equal_bits(self.keys, other.keys)
            and equal_bits(self.delta, other.delta)
        )

    def has_begun(self, rows_done: int) -> bool:
        """Returns whether anything was added, or counted for a key that has no row yet."""
        entered = (self.rows != NOT_YET) & (self.rows != ELSEWHERE)
        return bool(rows_done or (self.call[2] > 1 and entered.any()))

    def keep(self) -> None:
        """Takes copies: the caller may write to its arrays before the rest is done."""
        self.keys, self.delta = self.keys.copy(), self.delta.copy()
        if self.here is not None:
            self.here.keys, self.here.delta = self.keys, self.delta

    def forget(self) -> None:
        """Begins again if it is made again: the rows that it has found are pinned no more, and may be other keys'."""
        self.rows[:] = NOT_YET
        if self.here is not None:
            self.here.forget()


class Removing(Struct, eq=False):
    """A removal. ``removed``: for each key, whether it had a row; ``here``, ``there``: its parts on several hosts."""

    keys: Keys
    removed: Keys
    complete: bool = False
    here: Removing | None = None
    there: Removing | None = None

    @classmethod
    def of(cls, keys: Keys) -> Removing:
        """Returns one that has not begun."""
        return cls(keys, unmarked(keys))

    def is_same(self, other: object) -> bool:
        """Returns whether another call is the repetition of this one."""
        return isinstance(other, Removing) and equal_bits(self.keys, other.keys)

    def has_begun(self, rows_done: int) -> bool:
        """Returns whether any key was looked at."""
        return bool((self.removed != NOT_YET).any())

    def keep(self) -> None:
        """Takes a copy."""
        self.keys = self.keys.copy()

    def forget(self) -> None:
        """Begins again if it is made again."""
        self.removed[:] = NOT_YET


class Evicting(Struct, eq=False):
    """An eviction, or a tick. What it has done is never half done; only its result would be lost.

    Attributes:
        tick: what the table's time becomes; None: it stays.
        seen: how much of the table was looked at, and how many keys went.
    """

    tick: int | None
    seen: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(2, np.int64))

    def is_same(self, other: object) -> bool:
        """Returns whether another call is the repetition of this one."""
        return isinstance(other, Evicting) and (self.tick is None) == (other.tick is None)

    def keep(self) -> None:
        """It has no arrays of its caller's."""


class Call(Struct, eq=False):
    """A user's call, from its beginning until it has returned.

    Attributes:
        work: what it does; the one that raised and its repetition share it.
        outer: the call of the same thread that this one, a signal handler's, has come in between of.
        raised: whether an exception has ended it; else it is under way. A repetition of a call that raised, and a
            handler's call made when the one that it has interrupted has done all its work, look the same otherwise.
    """

    work: Adding | Removing | Evicting
    outer: Call | None = None
    raised: bool = False
