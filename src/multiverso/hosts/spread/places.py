"""Which host has which rows of a spread table, as this one knows it, and how they move.

When a host is lost, each of its groups of keys lives on that group's backup, which has the rows. What it was asked is
asked again there, a push by its number; what is asked before a host knows of the loss waits until it does.

A host that was started again in the place of a lost one has no rows. For each table that its workers make it asks the
homes to let it *rejoin*. They tell it what is to live on it beside their backups (`Backups.tell_also`), and report when
it has all that. Once all have, the coordinator says that it has *returned*, and every host counts its view up:

- A home gives nothing of the groups that leave it to others from then on (`is_moved`), and has its workers ask for them
  as for rows of another host. Once no call of theirs that found the old rows is under way, it tells their last changes,
  keeps the rows as the new home's backup, and answers that it has rejoined.
- The host that has returned asks and answers nothing else until it has all these answers. Then it has every row with
  every change, and lives with the others' view.

Whoever has asked the old home meanwhile, and was refused, asks the new one; no add is lost, and none counts twice.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from multiverso.hosts.spread.backups import NOBODY, Backups, Groups
from multiverso.hosts.spread.frames import ANSWER, FAILED, NO_KEYS, Frame
from multiverso.hosts.spread.placement import groups_of, places_of
from multiverso.hosts.spread.ways import OF_ALL, OF_EVERYONE
from multiverso.layout import desk
from multiverso.layout.keyed import EVERYWHERE, GROUPS
from multiverso.shards.keyed_rows import KeyedRows

_OVER = object()
Homes = npt.NDArray[np.int16]
"""The host of each group of keys: (GROUPS,)."""


@dataclass(eq=False)
class _Leaving:
    """What is about to live on a host that has returned.

    Attributes:
        groups: of keys.
        epoch: calls that began before it may have found their rows here.
        is_told: whether none of them is under way, so that their last changes are told.
        moves: once the new home has those.
    """

    groups: Groups
    epoch: int
    is_told: bool = False
    moves: Iterator[None] | None = None


class Places:
    """One thread at a time may call.

    Args:
        table: its number.
        host, hosts: this one, and how many there are.
        own: the rows that live here.
        backups: who else has them; None: nobody, and nothing moves.
        send: takes a frame for another host.
        show: takes the host of each group as this host's workers find it, whenever that has changed.
        apart: hosts that are no homes: they were lost, even if they were started again.
        view: how often hosts were lost or returned before.

    Attributes:
        view: the same by now.
        apart: the same by now.
        homes: of all groups.
        arriving: groups that live here, as this host's workers do not know yet: it has copies of their rows.
        is_returning: whether this host has all but returned: it asks and answers nothing until it has all rows.
    """

    def __init__(
        self,
        table: int,
        host: int,
        hosts: int,
        own: KeyedRows,
        backups: Backups | None,
        send: Callable[[int, Frame], object],
        show: Callable[[Homes], None],
        apart: Collection[int],
        view: int,
    ) -> None:
        self._table, self._host, self._hosts, self._own, self._backups = table, host, hosts, own, backups
        self._send, self._tell_workers = send, show
        self.view, self.apart = view, set(apart)
        self.arriving: Groups = np.zeros(GROUPS, np.bool_)
        self._kept: Groups = np.zeros(GROUPS, np.bool_)  # groups whose backup this host is
        self._rejoining: set[int] = set()  # hosts that have asked to
        self._leaving: dict[int, _Leaving] = {}  # by the host that has returned
        self._awaited: set[int] = set()  # homes that this host has asked to rejoin, and that have not answered
        self.is_returning = False
        self._takes: Iterator[None] | None = None  # then
        self._quiet_since = -1  # an epoch; calls that began before it keep rows from leaving
        self.homes = self._shown = self._placed()
        self._show()

    def _placed(self) -> Homes:
        """Returns the home of each group, and has backups told what they are to have."""
        if self._backups is None:
            return places_of(range(self._hosts), 1)[0]
        # when a host returns and all others are lost meanwhile, it is the only home
        there = [host for host in range(self._hosts) if host not in self.apart] or [self._host]
        homes, *rest = places_of(there, 2)
        after = rest[0] if rest else np.full_like(homes, NOBODY)
        lives_here = homes == self._host
        self._kept = after == self._host
        self._backups.place(np.where(lives_here, after, np.int16(NOBODY)))
        for host in self._rejoining:
            its = [place == host for place in places_of(sorted({*there, host}), 2)]
            self._backups.tell_also(host, lives_here & (its[0] | its[1]))
        return homes

    def _show(self) -> None:
        self._shown = np.where(self.arriving, self._shown, self.homes)
        self._tell_workers(self._shown)

    # -- what is asked of this host --------------------------------------------------------------------------

    def is_early(self, frame: Frame) -> bool:
        """Whether a question or an answer is to wait until this host has another view, or what moves has moved."""
        if self._backups is None:
            return False
        if self.is_returning:  # the homes have the next view already; one that knows of a later loss is ahead of that
            is_awaited = frame.kind & ~(ANSWER | FAILED) in (desk.BACK_UP, desk.REJOIN)
            return not is_awaited or frame.view > self.view + 1
        if frame.view > self.view:
            return True
        moves = bool(self._leaving) or self.arriving.any()
        return bool(moves) and frame.is_question and frame.kind in OF_ALL

    def is_moved(self, question: Frame) -> bool:
        """Whether who asks does not know yet that some of it lives elsewhere by now, or that there is another host."""
        if self._backups is None or question.view >= self.view:
            return False
        if question.kind in OF_EVERYONE:
            return True
        keys = (some for some in (question.pushed, question.keys) if some.size)
        return any(bool((self.homes[groups_of(some)] != self._host).any()) for some in keys)

    def still_kept(self, home: int, frame: Frame) -> Frame:
        """Returns what a home tells of its rows, without those that live elsewhere, or are kept elsewhere, by now."""
        if frame.view >= self.view or not frame.keys.size:
            return frame
        groups = groups_of(frame.keys)
        kept = self.homes[groups] == home
        if self._host not in self.apart:
            kept &= self._kept[groups]
        return replace(frame, keys=frame.keys[kept], rows=frame.rows[kept[: len(frame.rows)]])

    # -- a host is lost --------------------------------------------------------------------------------------

    def lost(self, host: int) -> None:
        """Another host is lost, with the rows that live there.

        Raises:
            OutOfMemoryError: there is no memory for what lives here instead.
        """
        self.view += 1
        self.apart.add(host)
        if self._backups is None:
            return
        its = self.homes == host
        self._rejoining.discard(host)
        self._awaited.discard(host)
        self._leaving.pop(host, None)
        self._takes = None
        self._quiet_since = -1
        self._backups.lose(host)
        if self._host in self.apart and not self.is_returning:
            self._backups.drop(its)  # their next home tells them, and no longer knows what was removed before
        self.homes = self._placed()
        its &= self.homes == self._host
        self._backups.take_over(its)
        self.arriving |= its
        self._show()

    # -- a host returns --------------------------------------------------------------------------------------

    def begin(self) -> None:
        """This host has made the table: if it was started again, it asks to rejoin."""
        if self._backups is not None and self._host in self.apart:
            for home in np.unique(self.homes).tolist():
                self._ask_to_rejoin(home)

    def _ask_to_rejoin(self, home: int) -> None:
        self._awaited.add(home)
        self._send(home, Frame(desk.REJOIN, self._table, 1))

    def rejoin(self, host: int) -> None:
        """A host that was started again asks for what is to live on it."""
        self._rejoining.add(host)
        self._quiet_since = -1
        self.homes = self._placed()

    def have_arrived(self) -> None:
        """There are no copies any more of rows that have come here."""
        self.arriving[:] = False
        self._show()

    @property
    def filled(self) -> list[int]:
        """Hosts that may return now, as far as this one knows."""
        if self._backups is None or self.is_moving or self.arriving.any():
            return []
        if self._host in self.apart:  # it has nothing for them
            return sorted(self.apart)
        filled = [host for host in sorted(self._rejoining) if self._backups.is_filled(host)]
        return filled if filled and self._is_quiet() else []

    def _is_quiet(self) -> bool:
        """Whether no call is under way that began long ago: one that raised half done, or of a worker that is stopped.

        All would wait for it, once rows have begun to leave.
        """
        if self._quiet_since < 0:
            self._quiet_since = self._next_epoch()
        return self._own.are_through(self._quiet_since)

    def _next_epoch(self) -> int:
        """Calls that begin from here on have seen what was shown."""
        self._own.remove(NO_KEYS)
        return self._own.epoch

    def returned(self, host: int) -> None:
        """A host is a home again."""
        if host == self._host:
            self.is_returning = True
            return
        assert self._backups is not None
        before = self.homes
        self.view += 1
        self.apart.discard(host)
        asked = host in self._rejoining
        self._rejoining.discard(host)
        self._quiet_since = -1
        self.homes = self._placed()
        if self._host in self.apart:
            self._backups.drop(before != self.homes)  # the new home tells them
            self._ask_to_rejoin(host)
        else:
            self._backups.drop(~self._kept)
        self._show()
        if asked:
            going = (before == self._host) & (self.homes == host)
            self._backups.tell_also(host, going)
            self._leaving[host] = _Leaving(going, self._next_epoch())

    def answered(self, host: int, answer: Frame) -> None:
        """A home has given this host all that is to live on it, and the words that hold on all hosts."""
        if host not in self._awaited:
            return
        self._awaited.discard(host)
        for place, value in zip(EVERYWHERE, answer.keys.tolist(), strict=False):
            self._own.set_word(place, value)

    @property
    def is_moving(self) -> bool:
        """Whether groups are on their way from here, or to here."""
        return bool(self._leaving) or self.is_returning

    def look(self) -> bool:
        """Moves a piece of what can be moved by now; returns whether this host lives with another view."""
        for host, leaving in list(self._leaving.items()):
            self._look_at(host, leaving)
        if not self.is_returning or self._awaited:
            return False
        assert self._backups is not None
        if self._takes is None:
            there = [host for host in range(self._hosts) if host == self._host or host not in self.apart]
            self._takes = self._backups.taking_over(places_of(there, 1)[0] == self._host)
        takes, self._takes = self._takes, None
        if next(takes, _OVER) is not _OVER:  # if that raises, it begins anew
            self._takes = takes
            return False
        self.apart.discard(self._host)
        self.view += 1
        self.is_returning = False
        self.homes = self._placed()
        self._backups.drop(~self._kept)
        self.arriving |= self.homes == self._host
        self._show()
        return True

    def _look_at(self, host: int, leaving: _Leaving) -> None:
        backups = self._backups
        assert backups is not None
        if not leaving.is_told and self._own.are_through(leaving.epoch):
            leaving.is_told = True
            backups.tell_all(host)
        if leaving.moves is None and leaving.is_told and backups.has_all(host):
            backups.tell_no_more(host)  # of what goes from here
            leaving.moves = backups.giving_up(leaving.groups)
        if leaving.moves is None or next(leaving.moves, _OVER) is not _OVER:
            return
        del self._leaving[host]
        self._show()  # who goes through all rows just now hears of it
        words = np.array([self._own.word(place) for place in EVERYWHERE])
        self._send(host, Frame(desk.REJOIN | ANSWER, self._table, 1, keys=words))
