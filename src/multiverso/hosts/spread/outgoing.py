"""What a host asks and pushes of a spread table, and which home that goes to.

To each other home one question is under way at a time, and what has come meanwhile goes with the next. Messages arrive
once and in order, so a question that follows an add has it counted, and nothing has to be remembered of either.

What was on its way to a host that is lost, or to a home whose rows have moved, is dealt out anew.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from functools import partial

import numpy as np

from multiverso.errors import OutOfMemoryError
from multiverso.hosts.spread.copies import Copies
from multiverso.hosts.spread.frames import ANSWER, FAILED, NO_BYTES, NO_KEYS, NUMBER_BITS, Frame
from multiverso.hosts.spread.home import Home
from multiverso.hosts.spread.placement import groups_of
from multiverso.hosts.spread.places import Homes, Places
from multiverso.hosts.spread.ways import (
    NOTHING,
    OF_ALL,
    OF_EVERYONE,
    Asking,
    Done,
    Part,
    Way,
    end_part,
    fail,
    next_parts,
    next_push,
)
from multiverso.layout import desk
from multiverso.shards.keyed_rows import Bytes, Keys

RETRY_SECONDS = 1.0
_OF_KEYS = (desk.REMOVE, desk.CONTAINS, desk.READ, desk.OVERWRITE)


class Outgoing:
    """One thread at a time may call.

    Args:
        number: of the table.
        spec: what hosts have to mean alike by it, as a hash.
        host: this one.
        others: the other hosts.
        most: keys in a question.
        copies: of rows that live on other hosts.
        home: the rows that live here.
        places: which live where.
        send: stamps a frame with this host's view, and sends it.
        now: the time.

    Attributes:
        ways: to each other host.
        refused_here: what there was no memory for, of what was to be added to rows that live here.
        asks_in: the last view in which no push of an earlier one was under way.
    """

    def __init__(
        self,
        number: int,
        spec: int,
        host: int,
        others: Collection[int],
        most: int,
        copies: Copies,
        home: Home,
        places: Places,
        send: Callable[[int, Frame], Frame],
        now: Callable[[], float],
    ) -> None:
        self._number, self._spec, self._host, self._most = number, spec, host, most
        self._copies, self._home, self._places, self._send, self._now = copies, home, places, send, now
        self._has_backups = home.backups is not None
        self.asks_in = places.view
        self.refused_here: list[tuple[Keys, Bytes]] = []
        self._again_here_at = 0.0
        # what waits until this host's workers find what has arrived here
        self._until_arrived: list[Callable[[], None]] = []
        self.ways = {other: self.new_way(other) for other in others}

    def homes_of(self, keys: Keys) -> Homes:
        """Returns where keys live."""
        return self._places.homes[groups_of(keys) if keys.size else NO_KEYS]

    def _by_home(self, keys: Keys) -> Iterable[tuple[int, Keys]]:
        """Yields each home of some keys, and the places of its own among them."""
        homes = self.homes_of(keys)
        for home in np.unique(homes).tolist():
            yield home, np.flatnonzero(homes == home)

    def ask(
        self,
        kind: int,
        keys: Keys,
        done: Done,
        took: Callable[[Frame, Keys], None] | None = None,
        rows: Bytes = NO_BYTES,
        argument: int = 0,
        host: int | None = None,
    ) -> None:
        """Asks the homes of keys, which live on other hosts; or one host; or all others the same."""
        if kind in OF_ALL and self._places.arriving.any():
            self._until_arrived.append(partial(self.ask, kind, keys, done, took, rows, argument, host))
            return
        if kind in OF_ALL:
            self.sort_out(self._copies.changed())  # what this host's workers have added before counts
        asking = Asking(done, 1, took)
        whole = Part(asking, kind, keys, np.arange(keys.size), rows, argument)
        if host is not None or kind in OF_EVERYONE:
            gone = self._places.apart if self._has_backups else set()  # which have nothing any more
            hosts = [host] if host is not None else [one for one in self.ways if one not in gone]
            asking.left += len(hosts)
            for one in hosts:
                if one in gone:
                    self._ask_again(whole)
                else:
                    self._put(self.ways[one], whole)
        else:
            self._deal_out(whole)
            hosts = np.unique(self.homes_of(keys)).tolist()
        end_part(replace(whole, places=NO_KEYS), NOTHING)  # all parts are on their ways
        for one in hosts:
            if one != self._host:
                self.end_if_lost(self.ways[one])
                self.pump(self.ways[one])

    def _put(self, way: Way, part: Part) -> None:
        after = way.begun + len(way.changed) if part.kind in OF_ALL else 0
        way.parts.append(replace(part, after=after, waited=way.under_way is not None or bool(way.parts)))

    def _deal_out(self, whole: Part) -> None:
        """Puts the parts of a question about keys on the ways to their homes; answers those of keys that live here."""
        for home, places in self._by_home(whole.keys):
            for low in range(0, places.size, self._most):
                some = places[low : low + self._most]
                rows = whole.rows[some] if whole.rows.size else NO_BYTES
                part = replace(whole, keys=whole.keys[some], places=whole.places[some], rows=rows)
                whole.asking.left += 1
                if home != self._host:
                    self._put(self.ways[home], part)
                elif self._places.arriving.any():
                    self._until_arrived.append(partial(self._end_here, part))
                else:
                    self._end_here(part)

    def _end_here(self, part: Part) -> None:
        if part.kind == desk.FETCH:
            end_part(part, NOTHING)
            return
        answer = self._home.answer(self._host, Frame(part.kind, self._number, 0, keys=part.keys, rows=part.rows))
        if answer.kind & FAILED:
            fail(self._host, answer.argument, [part])
        else:
            end_part(part, answer)

    def push(self, keys: Keys, deltas: Bytes) -> None:
        """What copies that have gone had been added goes home, which may be here by now."""
        for home, places in self._by_home(keys):
            some = keys[places], deltas[places]
            if home == self._host:
                self._add_here(*some)
            elif not self.ways[home].lost:
                self.ways[home].pushes.append(some)

    def _add_here(self, keys: Keys, deltas: Bytes) -> None:
        try:
            self._home.add(keys, deltas)
        except OutOfMemoryError:  # it is kept, as what another home refuses
            self.refused_here.append((keys, deltas))
            self._again_here_at = self._now() + RETRY_SECONDS

    @property
    def asks(self) -> bool:
        """Whether there is something to ask a home now, or again later as it has refused it."""
        return any(way.under_way is None and (way.parts or way.has_adds) for way in self.ways.values() if not way.lost)

    def sort_out(self, keys: Keys) -> None:
        """Copies of these keys may have been added to, which their homes are to be sent."""
        for home, places in self._by_home(keys):
            if home != self._host:  # what has come here takes its copies' adds with it
                mine = keys[places]
                self.ways[home].changed.extend(mine[low : low + self._most] for low in range(0, mine.size, self._most))

    def pump(self, way: Way) -> None:
        """Sends a home what there is, unless it has not answered yet."""
        if way.under_way is not None or way.lost or self._now() < way.not_before or not self._may_ask():
            return
        if way.again:
            argument, pushed, deltas = way.again.popleft()
            self._ask(way, [], Frame(desk.PUSH_AGAIN, self._number, way.number + 1, argument, pushed, deltas))
            return
        pushed, deltas = next_push(way, self._copies, self._most, self._now())
        # others may not answer the latter now, but have to take pushes
        alone = bool(pushed.size and way.parts and way.parts[0].kind in OF_ALL)
        parts = [] if alone else next_parts(way, self._copies, self._most)
        if not parts and not pushed.size:
            return
        kind, argument, rows = desk.FETCH, self._spec, NO_BYTES
        keys = np.concatenate([NO_KEYS, *(part.keys for part in parts)])
        if parts and parts[0].kind != desk.FETCH:
            kind, argument, rows = parts[0].kind, parts[0].argument, parts[0].rows
            if kind in _OF_KEYS:  # what was added to these keys before counts before
                taken, more = self._copies.take(keys)
                pushed = np.concatenate([pushed, taken])
                deltas = np.concatenate([deltas.reshape(-1, self._home.own.size), more])
        self._ask(way, parts, Frame(kind, self._number, way.number + 1, argument, pushed, deltas, keys, rows))

    def _may_ask(self) -> bool:
        """Whether no push of an earlier view is under way, which may yet go to another home: it goes before others."""
        if self._places.is_returning:
            return False
        if self.asks_in != self._places.view and (not self._has_backups or not self.has_old_pushes):
            self.asks_in = self._places.view
        return self.asks_in == self._places.view

    @property
    def has_old_pushes(self) -> bool:
        """Whether a push of an earlier view is under way."""
        pushes = (way.under_way[0] for way in self.ways.values() if way.under_way and way.under_way[0].pushed.size)
        return any(push.view != self._places.view for push in pushes)

    def _ask(self, way: Way, parts: list[Part], frame: Frame) -> None:
        way.number = frame.number
        way.under_way = self._send(way.host, frame), parts

    def end_if_lost(self, way: Way) -> None:
        """What is on the way to a lost host goes to its backups, if rows have such, or fails."""
        if not way.lost:
            return
        (question, parts), way.under_way = way.under_way or (None, []), None
        if not self._has_backups:
            fail(way.host, desk.HOST_LOST, [*parts, *way.parts])
        waiting = way.take_waiting()
        if not self._has_backups:
            return
        if question is not None and question.pushed.size:  # what it has perhaps applied, and told its backups
            argument = way.host << NUMBER_BITS | question.number
            self._push_again(argument, question.pushed, question.deltas)
        waiting.parts.extendleft(reversed(parts))
        self._deal(waiting)
        self.pump_all()

    def deal_anew(self) -> None:
        """What is on the way to homes goes where they are now."""
        ways = [way for way in self.ways.values() if not way.lost]
        under_way = [part for way in ways if way.under_way for part in way.under_way[1]]
        for waiting in [way.take_waiting() for way in ways]:
            self._deal(waiting)
        for part in under_way:
            if part.kind in OF_EVERYONE:
                self._ask_everyone_again(part)
        self.pump_all()

    def deal_back(self, question: Frame, parts: list[Part]) -> None:
        """A home has refused a question as a whole, since some of it lives elsewhere, as is known here by now."""
        if question.kind == desk.PUSH_AGAIN:
            self._push_again(question.argument, question.pushed, question.deltas)
        else:
            self.push(question.pushed, question.deltas)
        self.ask_all_again(parts)

    def ask_all_again(self, parts: list[Part]) -> None:
        """Asks where the keys live now, or all others, what was not answered."""
        for part in parts:
            self._ask_again(part)
        self.pump_all()

    def pump_all(self) -> None:
        """Sends each home what there is."""
        for way in self.ways.values():
            self.pump(way)

    def _deal(self, waiting: Way) -> None:
        for again in waiting.again:
            self._push_again(*again)
        for some in waiting.pushes:
            self.push(*some)
        for keys in waiting.changed:
            self.sort_out(keys)
        for part in waiting.parts:
            if not waiting.lost and part.kind in (desk.LIST, desk.READ):
                self._put(self.ways[waiting.host], part)
            else:
                self._ask_again(part)

    def _push_again(self, argument: int, keys: Keys, deltas: Bytes) -> None:
        for home, places in self._by_home(keys):
            some = keys[places], deltas[places]
            if home != self._host:
                self.ways[home].again.append((argument, *some))
            elif not self._home.has(self._host, argument):
                self._add_here(*some)

    def _ask_again(self, part: Part) -> None:
        if not part.asking.left:
            return
        if part.kind in OF_EVERYONE:
            self._ask_everyone_again(part)
        elif part.kind == desk.LIST and not part.argument:  # others have what it had
            end_part(part, Frame(desk.LIST | ANSWER, self._number, 0, -1))
        elif part.kind in (desk.LIST, desk.READ):
            fail(self._host, desk.MOVED, [part])
        else:
            self._deal_out(part)
            end_part(replace(part, places=NO_KEYS), NOTHING)

    def _ask_everyone_again(self, part: Part) -> None:
        """Some have counted without what comes to them, or with what has gone; others are asked for the first time."""
        if part.asking.left:
            part.asking.left = 0
            self.ask(part.kind, part.keys, part.asking.done)

    def new_way(self, host: int) -> Way:
        """Returns a way to a host that nothing was sent to yet."""
        return Way(host, number=self._places.view << 32)

    def go_on(self, way: Way) -> None:
        """A home has answered: asks it what there is to ask, or all if they have waited for that."""
        if self.asks_in == self._places.view:
            self.pump(way)
        else:
            self.pump_all()

    def try_again_here(self) -> None:
        """Adds what there was no memory for a while ago."""
        if self.refused_here and self._now() >= self._again_here_at:
            refused, self.refused_here = self.refused_here, []
            for some in refused:
                self.push(*some)

    def arrived(self) -> None:
        """This host's workers find all rows that live here: what has waited for that goes on."""
        waiting, self._until_arrived = self._until_arrived, []
        for go_on in waiting:
            go_on()
