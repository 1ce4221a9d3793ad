"""The second copy of each row, on the host that comes after its home: what homes say to it, and what it makes of that.

A home sends whole rows, values and state, as they are just then. So it makes no difference how often a row is told, or
what has changed it; a backup is filled, and hears of changes by this host's workers, in the same way. What another host
has pushed is told at once, together with the number of the question that brought it (a *mark*), and the answer to that
question waits for the backups. So whoever has no answer when the home is lost asks the backup, which knows by the mark
whether it has the push.

A host that has taken a lost one's place is told in the same way what is to live on it again, and what it is to be the
backup of, until it has all of that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from multiverso.errors import OutOfMemoryError
from multiverso.hosts.spread.frames import ANSWER, FAILED, NO_BYTES, NO_KEYS, NUMBER_BITS, Frame
from multiverso.hosts.spread.placement import groups_of
from multiverso.layout import desk
from multiverso.layout.keyed import GROUPS
from multiverso.shards.keyed_rows import KeyedRows, Keys

Groups = npt.NDArray[np.bool_]
"""Some of the groups of keys: (GROUPS,)."""
NOBODY = -1
_WINDOW = 4  # frames under way to a backup beside those with marks
_RETRY_SECONDS = 1.0


@dataclass(eq=False)
class Backup:
    """A host that keeps rows which live here.

    Attributes:
        sent, heard: numbers of the last frame, and of the last one that it has.
        all_told: number of the last frame of the pass that it is to have all of; -1: that has not ended.
        again: keys that it had no memory for, to be told again at a time.
        refused: why it had not; 0: it has all.
    """

    sent: int = 0
    heard: int = 0
    all_told: int = -1
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
        send: Callable[[int, Frame], object],
        now: Callable[[], float],
    ) -> None:
        self._table, self._own, self._kept, self._most, self._send, self._now = table, own, kept, most, send, now
        self._where = np.full(GROUPS, NOBODY, np.int16)  # of the groups that live here
        self._also: dict[int, Groups] = {}  # by host that is to be a home again: what else it is told
        self._unfilled, self._nothing = np.zeros(GROUPS, np.bool_), np.zeros(GROUPS, np.bool_)
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
        for host, groups in self._also.items():
            fresh &= ~(groups & (where == host))
        self._where = where
        self._fill(fresh)
        for host in np.unique(where[fresh]).tolist():
            self._say_marks(host)

    def tell_also(self, host: int, groups: Groups) -> None:
        """A host that is to be a home again is told of these groups, which live here, beside their backups."""
        before = self._also.get(host)
        self._also[host] = groups
        self._fill(groups if before is None else groups & ~before)
        if before is None or (groups & ~before).any():
            self.tell_all(host)
        if before is None:
            self._say_marks(host)

    def tell_no_more(self, host: int) -> None:
        """That host has all that it was to be told beside what it is the backup of."""
        self._also.pop(host, None)

    def _fill(self, groups: Groups) -> None:
        self._unfilled |= groups
        self._pass = None  # it begins again, from the same generation

    def tell_all(self, host: int) -> None:
        """Begins a pass over all rows anew, for a host that is to have all that has changed before."""
        self._pass = None
        self._of.setdefault(host, Backup()).all_told = -1

    def has_all(self, host: int) -> bool:
        """Whether that host has it."""
        backup = self._of[host]
        return 0 <= backup.all_told <= backup.heard and not backup.again

    def is_filled(self, host: int) -> bool:
        """Whether a host that is to be a home again has all of that, but for what has changed meanwhile."""
        return host in self._also and not self._unfilled.any() and self.has_all(host)

    def has_room(self, more: int) -> bool:
        """Whether there is memory for all rows that are kept, and some more, if they lived here."""
        return self._own.has_room(self._kept.count() + more)

    def tell(self, keys: Keys, sender: int = NOBODY, number: int = 0) -> dict[int, int]:
        """Tells the backups of some keys how their rows are now; returns the numbers of the frames, by host.

        Args:
            keys: `most` or fewer in each of two parts.
            sender, number: whose question has changed them; NOBODY's.
        """
        if sender != NOBODY:
            self._applied[sender] = number
        groups = groups_of(keys) if keys.size else NO_KEYS
        where = self._where[groups]
        told = {host: where == host for host in np.unique(where[where != NOBODY]).tolist()}
        for host, also in self._also.items():
            if (some := also[groups] | told.get(host, False)).any():
                told[host] = some
        return {host: self._say(host, np.unique(keys[some]), sender, number) for host, some in told.items()}

    def _say(self, host: int, keys: Keys, sender: int = NOBODY, number: int = 0) -> int:
        backup = self._of.setdefault(host, Backup())
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
        backup = self._of.get(host)
        if backup is None:
            return  # it is an earlier node's
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
            if any(self._of[host].heard < number for host, number in one.waits.items()):
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
                    groups = groups_of(keys)
                    its = (self._where[groups] == host) | self._also.get(host, self._nothing)[groups]
                    self._say(host, keys[its])  # the others have another home by now
                self._say_marks(host)
                backup.all_told = backup.sent if backup.all_told >= 0 else -1
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
                for backup in self._of.values():
                    backup.all_told = backup.sent if backup.all_told < 0 else backup.all_told
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
        refused = ((backup.refused, host) for host, backup in self._of.items() if backup.refused)
        return next((one for one in refused if one[1] in self._where), (desk.DONE_WELL, 0))

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
        self._also.pop(host, None)
        self._held = [one for one in self._held if one.host != host]
        for one in self._held:
            one.waits.pop(host, None)
        self.release()

    def take_over(self, groups: Groups) -> None:
        """From here on some groups live here: their rows, which were kept.

        Raises:
            OutOfMemoryError: there is no memory for them.
        """
        for _ in self.taking_over(groups):
            pass

    def taking_over(self, groups: Groups) -> Iterator[None]:
        """Does the same a piece at a time."""
        return self._move(groups, self._kept, self._own)

    def giving_up(self, groups: Groups) -> Iterator[None]:
        """From here on some groups, which lived here, are only kept, if there is memory for that; a piece at a time."""
        return self._move(groups, self._own, self._kept)

    def drop(self, groups: Groups) -> None:
        """Some groups are not kept here any more."""
        for _ in self._move(groups, self._kept, None):
            pass

    def _move(self, groups: Groups, source: KeyedRows, target: KeyedRows | None) -> Iterator[None]:
        pattern = 0
        while pattern >= 0:
            pattern, keys = source.list_keys(pattern)
            for some in self._pieces(keys[groups[groups_of(keys)]]):
                try:
                    if target is not None:
                        target.overwrite(*source.read_whole(some))
                except OutOfMemoryError:
                    if target is self._own:
                        raise
                    target = None  # the new home tells all of it again, and is told that there is no memory
                source.remove(some)
                yield
