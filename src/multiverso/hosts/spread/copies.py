"""This host's copies of rows that live on others: which there are, what the homes have not been sent, which go.

Workers find, read and add to copies as to any rows. Copies come and go by the node alone, so it knows the key of each
row. A copy that goes may just be added to by a worker that has found it before: its key is removed first, and what
stands beside it is taken once every call that could have found it has ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from multiverso.shards.keyed_rows import Bytes, KeyedRows, Keys

_LOOK_SECONDS = 0.1
_ROOM = 0.9  # of the most copies: how many are left when some have to go


class Copies:
    """One thread at a time may call.

    Args:
        rows: their memory.
        take, land: addresses of what is done to them, see ``updaters/cached.py``.
        most: copies.
        seconds: copies whose home has not been heard of for so long go.
        now: the time.
    """

    def __init__(
        self,
        rows: KeyedRows,
        take: int,
        land: int,
        most: int,
        seconds: float,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rows, self._now = rows, now
        self._take, self._land = take, land
        self._most, self._seconds = most, seconds
        self._keys: Keys = np.zeros(0, np.int64)  # by row
        self._heard: npt.NDArray[np.float64] = np.zeros(0)  # by row: when the home's values came; 0: no copy
        self._generation = 0
        self._added = 0
        self._look_at = 0.0
        self._leaving: tuple[Keys, Keys, int] | None = None  # keys, rows, epoch

    # -- what the homes say ----------------------------------------------------------------------------------

    def land(self, keys: Keys, values: Bytes) -> None:
        """Takes in the homes' values of copies that there are."""
        places = self.rows.find(keys)
        self.rows.apply_to_copies(self._land, places, values)
        self._heard[places[places >= 0]] = self._now()

    def enter(self, keys: Keys, values: Bytes) -> None:
        """Takes in values of keys, with or without a copy; a new one is not seen before it has them.

        Raises:
            OutOfMemoryError: there is no room for another.
        """
        places = self.rows.enter_copies(keys, values)
        self.rows.apply_to_copies(self._land, places, values)
        known = self._keys.size
        if (more := int(places.max(initial=-1)) + 1 - known) > 0:
            more = max(more, known)
            self._keys = np.concatenate([self._keys, np.zeros(more, np.int64)])
            self._heard = np.concatenate([self._heard, np.zeros(more)])
        self._keys[places], self._heard[places] = keys, self._now()

    # -- what they have not been sent ------------------------------------------------------------------------

    def changed(self, look: bool = True) -> Keys:
        """Returns the keys of copies that may have been added to since the last call.

        Args:
            look: also where no add has ended since: one may be under way, or its worker was killed.
        """
        added = self.rows.added()
        if added == self._added and not look:
            return self._keys[:0]
        generation = self.rows.next_generation()
        stamps = self.rows.stamps()[: self._heard.size]
        places = np.flatnonzero((stamps > self._generation) & (self._heard[: stamps.size] > 0))
        self._added, self._generation = added, generation
        return self._keys[places]

    def take(self, keys: Keys) -> tuple[Keys, Bytes]:
        """Returns which of the keys have been added to, and what their homes have not been sent; now they have."""
        return self._taken(keys, self.rows.find(keys))

    def _taken(self, keys: Keys, places: Keys) -> tuple[Keys, Bytes]:
        deltas = np.zeros((keys.size, self.rows.size), np.uint8)
        self.rows.apply_to_copies(self._take, places, deltas)
        some = deltas.any(axis=1)
        return (keys, deltas) if some.all() else (keys[some], deltas[some])

    # -- which go --------------------------------------------------------------------------------------------

    def unwanted(self) -> Keys:
        """Returns the keys of copies that should go: too many, or too old. It looks now and then."""
        now = self._now()
        if now < self._look_at:
            return self._keys[:0]
        self._look_at = now + _LOOK_SECONDS
        there = np.flatnonzero(self._heard)
        heard = self._heard[there]
        old = heard < now - self._seconds
        excess = there.size - int(old.sum()) - self._most
        if excess > 0:
            excess = there.size - int(_ROOM * self._most)
            old[np.argpartition(heard, excess - 1)[:excess]] = True
        return self._keys[there[old]]

    @property
    def there(self) -> bool:
        """Whether there are any copies."""
        return bool(self._heard.any())

    def everything(self) -> Keys:
        """Returns all keys that have a copy."""
        return self._keys[np.flatnonzero(self._heard)]

    @property
    def leaving(self) -> Keys:
        """The keys whose copies are about to go."""
        return self._leaving[0] if self._leaving is not None else self._keys[:0]

    def begin_leaving(self, keys: Keys) -> None:
        """These copies go; none is about to go already. Nobody finds them any more."""
        self.rows.hold()
        places = self.rows.find(keys)
        self.rows.remove(keys)
        self._heard[places[places >= 0]] = 0
        self._leaving = keys[places >= 0], places[places >= 0], self.rows.epoch

    def left(self) -> tuple[Keys, Bytes] | None:
        """Returns what of copies that have gone the homes have not been sent; None while a worker may add to one."""
        if self._leaving is None or not self.rows.are_through(self._leaving[2]):
            return None
        keys, places, _ = self._leaving
        taken = self._taken(keys, places)
        self._leaving = None
        self.rows.let_go()
        return taken
