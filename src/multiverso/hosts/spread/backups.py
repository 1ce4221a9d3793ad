"""The second copy of each row, on the host that comes after its home: what homes say to it, and what it makes of that.

A home sends whole rows, values and state, as they are just then. So it makes no difference how often a row is told, or
what has changed it; a backup is filled, and hears of changes by this host's workers, in the same way. What another host
has pushed is told at once, together with the number of the question that brought it (a *mark*), and the answer to that
question waits for the backups. So whoever has no answer when the home is lost asks the backup, which knows by the mark
whether it has the push.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from multiverso.errors import OutOfMemoryError
from multiverso.hosts.spread.frames import ANSWER, FAILED, NO_BYTES, NO_KEYS, NUMBER_BITS, Frame
from multiverso.hosts.spread.homes import groups_of
from multiverso.layout import desk
from multiverso.layout.keyed import GROUPS
from multiverso.shards.keyed_rows import KeyedRows, Keys

NOBODY = -1
_WINDOW = 4  # frames under way to a backup beside those with marks
_RETRY_SECONDS = 1.0


@dataclass(eq=False)
class Backup:
    """A host that keeps rows which live here.

    Attributes:
        sent, heard: numbers of the last frame, and of the last one that it has.
        again: keys that it had no memory for, to be told again at a time.
        refused: why it had not; 0: it has all.
    """

    sent: int = 0
    heard: int = 0
    again: list[Keys] = field(default_factory=list)
    not_before: float = 0.0
    refused: int = 0


@dataclass(frozen=True)
class Held:
    """An answer that waits until backups have what the question has changed: the numbers of frames, by host."""

    host: int
    answer: Frame
    waits: dict[int, int]


class Backups:
    """One thread at a time may call.

    Args:
        table: its number.
        own: the rows that live here.
        kept: rows that live on others, whose backup this host is.
        most: rows in a frame.
        send: takes a frame for another host.
        now: the time.
    """

    def __init__(
        self,
        table: int,
        own: KeyedRows,
        kept: KeyedRows,
        most: int,
        send: Callable[[int, Frame], None],
        now: Callable[[], float],
    ) -> None:
        self._table, self._own, self._kept, self._most, self._send, self._now = table, own, kept, most, send, now
        self._where = np.full(GROUPS, NOBODY, np.int16)  # of the groups that live here
        self._unfilled = np.zeros(GROUPS, np.bool_)
        self._of: dict[int, Backup] = {}
        self._applied: dict[int, int] = {}  # by host: the last question of its whose push is in the rows here
        self._marks: dict[tuple[int, int], int] = {}  # by home and host: the same of the rows that are kept
        self._held: list[Held] = []
        self._pass: Iterator[Keys] | None = None
        self._since = self._removed = 0
        self._added = NOBODY

    # -- what a home says --------------------------------------------------------------------------------------

    def place(self, where: npt.NDArray[np.int16]) -> None:
        """From here on these are the backups of groups that live here; NOBODY: it has none, or lives elsewhere."""
        fresh = (where != self._where) & (where != NOBODY)
        self._where = where
        self._unfilled |= fresh
        self._pass = None  # it begins again, from the same generation
        for host in np.unique(where[fresh]).tolist():
            self._of.setdefault(host, Backup())
            self._say_marks(host)

    def tell(self, keys: Keys, sender: int = NOBODY, number: int = 0) -> dict[int, int]:
        """Tells the backups of some keys how their rows are now; returns the numbers of the frames, by host.

        Args:
            keys: `most` or fewer in each of two parts.
            sender, number: whose question has changed them; NOBODY's.
        """
        if sender != NOBODY:
            self._applied[sender] = number
        where = self._where[groups_of(keys)] if keys.size else NO_KEYS
        told = {}
        for host in np.unique(where[where != NOBODY]).tolist():
            told[host] = self._say(host, np.unique(keys[where == host]), sender, number)
        return told

    def _say(self, host: int, keys: Keys, sender: int = NOBODY, number: int = 0) -> int:
        backup = self._of[host]
        there, rows = self._own.read_whole(keys) if keys.size else (NO_KEYS, NO_BYTES)
        gone = np.setdiff1d(keys, there)
        backup.sent += 1
        mark = 0 if sender == NOBODY else sender << NUMBER_BITS | number
        every = np.concatenate([there, gone])
        self._send(host, Frame(desk.BACK_UP, self._table, backup.sent, mark, keys=every, rows=rows))
        return backup.sent

    def _say_marks(self, host: int) -> None:
        """All pushes so far are in the rows that a backup is told from here on."""
        for sender, number in self._applied.items():
            self._say(host, NO_KEYS, sender, number)

    def hold(self, host: int, answer: Frame, waits: dict[int, int]) -> None:
        """Keeps an answer to a host until the backups have some frames."""
        self._held.append(Held(host, answer, waits))

    def heard(self, host: int, answer: Frame) -> None:
        """A backup has a frame, or has no memory for its keys."""
        backup = self._of[host]
        backup.heard = answer.number
        if answer.kind & FAILED:
            backup.refused, backup.not_before = answer.argument, self._now() + _RETRY_SECONDS
            backup.again.append(answer.keys.copy())
        elif not backup.again:
            backup.refused = 0
        self.release()

    def release(self) -> None:
        """Sends the answers that have waited for long enough."""
        held, self._held = self._held, []
        for one in held:
            if any(host in self._of and self._of[host].heard < number for host, number in one.waits.items()):
                self._held.append(one)
            else:
                self._send(one.host, one.answer)

    def look(self, always: bool, to_the_end: bool = False) -> bool:
        """Tells what workers of this host have changed; returns whether the backups are known to have everything.

        Args:
            always: also where no add has ended since the last look.
            to_the_end: as much of it as may be under way.
        """
        for host, backup in self._of.items():
            if backup.again and self._now() >= backup.not_before:
                again, backup.again = backup.again, []
                for keys in again:
                    self._say(host, keys)
                self._say_marks(host)
        found = self._pass is not None
        added = self._own.added()
        if self._pass is None and (always or added != self._added or self._unfilled.any()):
            self._added, self._pass = added, self._changes()
        while self._pass is not None and not self._is_behind(_WINDOW):
            for keys in self._pass:
                found = True
                self.tell(keys)
                break
            else:
                self._pass = None
            if not to_the_end:
                break
        return self._pass is None and not found and not self._is_behind(1)

    def _is_behind(self, frames: int) -> bool:
        return any(backup.sent - backup.heard >= frames for backup in self._of.values())

    def _changes(self) -> Iterator[Keys]:
        """Gives the keys that live here and have changed since the last pass, or whose backup is to be filled."""
        removed = self._own.removed
        generation = self._own.next_generation()
        yield from self._pieces(self._own.removals(self._removed, removed))
        pattern = 0 if self._unfilled.any() or bool((self._own.stamps() > self._since).any()) else -1
        while pattern >= 0:
            pattern, keys, changed = self._own.list_changed(pattern, self._since)
            yield from self._pieces(keys[changed | self._unfilled[groups_of(keys)]])
        self._since, self._removed = generation, removed
        self._unfilled[:] = False

    def _pieces(self, keys: Keys) -> Iterator[Keys]:
        for low in range(0, keys.size, self._most):
            yield keys[low : low + self._most]

    @property
    def trouble(self) -> tuple[int, int]:
        """Why a backup does not take rows, and which one: a code of ``layout/desk.py``."""
        return next(
            ((backup.refused, host) for host, backup in self._of.items() if backup.refused), (desk.DONE_WELL, 0)
        )

    # -- what a backup makes of it -----------------------------------------------------------------------------

    def keep(self, home: int, frame: Frame) -> Frame:
        """Takes in what a home says; returns the answer."""
        known = len(frame.rows)
        try:
            if known:
                self._kept.overwrite(frame.keys[:known], frame.rows)
        except OutOfMemoryError:
            return replace(frame.refusal(desk.HOST_FULL), keys=frame.keys.copy())
        self._kept.remove(frame.keys[known:])
        sender, number = divmod(frame.argument, 1 << NUMBER_BITS)
        if number:
            self._marks[home, sender] = number
        return Frame(frame.kind | ANSWER, self._table, frame.number)

    def has(self, home: int, sender: int, number: int) -> bool:
        """Whether a question to a lost home has changed the rows that were kept for it."""
        return self._marks.get((home, sender), 0) >= number

    # -- the loss of a host --------------------------------------------------------------------------------------

    def lose(self, host: int) -> None:
        """Nobody waits for a host any more, or answers it."""
        self._of.pop(host, None)
        self._held = [one for one in self._held if one.host != host]
        self.release()

    def take_over(self, groups: npt.NDArray[np.bool_]) -> None:
        """From here on some groups live here: their rows, which were kept.

        Raises:
            OutOfMemoryError: there is no memory for them.
        """
        pattern = 0
        while pattern >= 0:
            pattern, keys = self._kept.list_keys(pattern)
            for some in self._pieces(keys[groups[groups_of(keys)]]):
                self._own.overwrite(*self._kept.read_whole(some))
                self._kept.remove(some)
