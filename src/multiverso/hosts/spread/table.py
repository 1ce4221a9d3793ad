"""One spread table on this host: it serves the rows that live here, and fetches and pushes those that do not.

To each other home one question is under way at a time, and what has come meanwhile goes with the next. Messages arrive
once and in order, so a question that follows an add has it counted, and nothing has to be remembered of either.

Where each row has a backup (`Backups`), a host that is lost or returns moves groups of keys (`Places`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from multiverso.errors import OutOfMemoryError
from multiverso.hosts.spread.backups import Backups, Groups
from multiverso.hosts.spread.copies import Copies
from multiverso.hosts.spread.frames import ANSWER, FAILED, NO_BYTES, NO_KEYS, NUMBER_BITS, WITH_VALUES, Frame
from multiverso.hosts.spread.home import Home
from multiverso.hosts.spread.homes import groups_of
from multiverso.hosts.spread.places import Homes, Places
from multiverso.hosts.spread.ways import (
    NOTHING,
    OF_ALL,
    OF_EVERYONE,
    Asking,
    Done,
    Part,
    Way,
    check_answer,
    end_part,
    fail,
    next_parts,
    next_push,
)
from multiverso.layout import desk
from multiverso.shards.keyed_rows import Bytes, KeyedRows, Keys

_FRAME_BYTES = 1 << 20
_FRAME_ROWS = 8192
_RETRY_SECONDS = 1.0
_OF_KEYS = (desk.REMOVE, desk.CONTAINS, desk.READ, desk.OVERWRITE)


@dataclass(eq=False)
class SpreadTable:
    """One thread at a time may call.

    Attributes:
        number: of the table, the same on all hosts.
        spec: what hosts have to mean alike by it, as a hash.
        host, hosts: this one, and how many there are.
        own: the rows that live here.
        copies: of those that do not.
        updater: address of the table's updater.
        after: how many adds a key needs to get a row.
        send: takes a message for another host.
        show: takes the host of each group of keys, as this host's workers find it, whenever that has changed.
        kept: memory for rows of other homes whose backup this host is; None: rows have no backups.
        apart: hosts that are no homes, as they were lost.
        away: those of them that are not there; without backups, all of them.
        view: how often hosts were lost or returned before; questions are numbered from there, so that those of a host
            that was started again are later ones.
        now: the time.
    """

    number: int
    spec: int
    host: int
    hosts: int
    own: KeyedRows
    copies: Copies
    updater: int
    after: int
    send: Callable[..., None]
    show: Callable[[Homes], None]
    kept: KeyedRows | None = None
    apart: Collection[int] = ()
    away: Collection[int] = ()
    view: int = 0
    now: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._most = max(1, min(_FRAME_ROWS, _FRAME_BYTES // (self.own.size + 8)))
        self.backups: Backups | None = None
        if self.kept is not None:
            self._most = max(1, min(_FRAME_ROWS, _FRAME_BYTES // (self.own.whole + 8)))
            self.backups = Backups(self.number, self.own, self.kept, self._most, self._send, self.now)
        self.home = Home(self.number, self.spec, self.own, self.updater, self.after, self.backups)
        # what waits until this host's workers find what has come here
        self._until_arrived: list[Callable[[], None]] = []
        self._refused_here: list[tuple[Keys, Bytes]] = []  # what there was no memory for, and when to try again
        self._again_here_at = 0.0
        self._asks_in = self.view  # no push of an earlier view is under way
        self.places = Places(
            self.number, self.host, self.hosts, self.own, self.backups, self._send, self.show, self.apart, self.view
        )
        self.ways = {other: self._new_way(other) for other in range(self.hosts) if other != self.host}
        for other in self.ways.keys() & set(self.away):
            self.ways[other].lost = True
        self.places.begin()

    def _new_way(self, host: int) -> Way:
        return Way(host, number=self.places.view << 32)

    def _send(self, host: int, frame: Frame) -> Frame:
        stamped = replace(frame, view=self.places.view)
        self.send(host, *stamped.parts())
        return stamped

    def _homes_of(self, keys: Keys) -> Homes:
        return self.places.homes[groups_of(keys) if keys.size else NO_KEYS]

    def _by_home(self, keys: Keys) -> Iterable[tuple[int, Keys]]:
        """Yields each home of some keys, and the places of its own among them."""
        homes = self._homes_of(keys)
        for home in np.unique(homes).tolist():
            yield home, np.flatnonzero(homes == home)

    # -- what workers of this host ask -----------------------------------------------------------------------

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
        if kind in OF_ALL and self.places.arriving.any():
            self._until_arrived.append(partial(self.ask, kind, keys, done, took, rows, argument, host))
            return
        if kind in OF_ALL:
            self._sort_out(self.copies.changed())  # what this host's workers have added before counts
        asking = Asking(done, 1, took)
        whole = Part(asking, kind, keys, np.arange(keys.size), rows, argument)
        if host is not None or kind in OF_EVERYONE:
            gone = self.places.apart if self.backups is not None else set()  # which have nothing any more
            hosts = [host] if host is not None else [one for one in self.ways if one not in gone]
            asking.left += len(hosts)
            for one in hosts:
                if one in gone:
                    self._ask_again(whole)
                else:
                    self._put(self.ways[one], whole)
        else:
            self._deal_out(whole)
            hosts = np.unique(self._homes_of(keys)).tolist()
        end_part(replace(whole, places=NO_KEYS), NOTHING)  # all parts are on their ways
        for one in hosts:
            if one != self.host:
                self._end_if_lost(self.ways[one])
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
                if home != self.host:
                    self._put(self.ways[home], part)
                elif self.places.arriving.any():
                    self._until_arrived.append(partial(self._end_here, part))
                else:
                    self._end_here(part)

    def _end_here(self, part: Part) -> None:
        if part.kind == desk.FETCH:
            end_part(part, NOTHING)
            return
        answer = self.home.answer(self.host, Frame(part.kind, self.number, 0, keys=part.keys, rows=part.rows))
        if answer.kind & FAILED:
            fail(self.host, answer.argument, [part])
        else:
            end_part(part, answer)

    # -- what goes to other homes ----------------------------------------------------------------------------

    def look(self, always: bool, now: bool = False) -> bool:
        """Looks for copies that workers have added to, and for those that should go; returns whether there are any.

        Args:
            always: also where no add has ended since the last look.
            now: what they have been added is sent at once.
        """
        self._sort_out(self.copies.changed(always))
        if not self.copies.leaving.size and (unwanted := self._unwanted()).size:
            self.copies.begin_leaving(unwanted)
        self.take_left()
        if self._refused_here and self.now() >= self._again_here_at:
            refused, self._refused_here = self._refused_here, []
            for some in refused:
                self._push(*some)
        if self.places.look():
            self._deal_anew()
        self._show_what_arrived()
        for way in self.ways.values():
            if way.parts or way.has_adds:
                way.pushed_at = 0.0 if now else way.pushed_at
                self.pump(way)
        moves = self.places.is_moving
        is_kept = self.backups is None or self.backups.look(always or moves, now)
        return not (is_kept and self.is_settled) or moves

    def _unwanted(self) -> Keys:
        """Copies of a lost host's rows go: who adds to one hears of the loss, or finds the row that came here."""
        gone = self.places.arriving
        for host in self.places.apart & self.ways.keys():
            if self.ways[host].lost:
                gone = gone | (self.places.homes == host)
        if gone.any():
            keys = self.copies.everything()
            if (found := keys[gone[groups_of(keys)]]).size:
                return found
        return self.copies.unwanted()

    def leave_all(self) -> bool:
        """All copies go; returns whether none are left, and the homes have their adds. To be called until then.

        Other hosts may go on meanwhile, so that backups have new changes to hear of all the time.
        """
        for way in self.ways.values():
            way.anew = way.under_way is not None
        if not self.copies.leaving.size:
            everything = self.copies.everything()
            if not everything.size:
                self.look(True, now=True)
                return self.is_settled
            self.copies.begin_leaving(everything)
        self.take_left()
        return False

    def take_left(self) -> None:
        """Takes what copies that have gone had been added, once no worker can be adding to one."""
        if (left := self.copies.left()) is not None:
            self._push(*left)

    def _push(self, keys: Keys, deltas: Bytes) -> None:
        """What copies that have gone had been added goes home, which may be here by now."""
        for home, places in self._by_home(keys):
            some = keys[places], deltas[places]
            if home == self.host:
                self._add_here(*some)
            elif not self.ways[home].lost:
                self.ways[home].pushes.append(some)

    def _add_here(self, keys: Keys, deltas: Bytes) -> None:
        try:
            self.home.add(keys, deltas)
        except OutOfMemoryError:  # it is kept, as what another home refuses
            self._refused_here.append((keys, deltas))
            self._again_here_at = self.now() + _RETRY_SECONDS

    @property
    def is_settled(self) -> bool:
        """Whether the homes have taken in all that copies had been added, or cannot."""
        left = (way.has_adds for way in self.ways.values() if not (way.lost or way.refused))
        return not (self.copies.leaving.size or self.places.arriving.any() or any(left))

    @property
    def asks(self) -> bool:
        """Whether there is something to ask a home now, or again later as it has refused it."""
        return any(way.under_way is None and (way.parts or way.has_adds) for way in self.ways.values() if not way.lost)

    @property
    def trouble(self) -> tuple[int, int]:
        """Why adds do not reach a host, and which one: a code of ``layout/desk.py``."""
        if self._refused_here:
            return desk.HOST_FULL, self.host
        found = next(((way.refused, way.host) for way in self.ways.values() if way.refused), (desk.DONE_WELL, 0))
        return self.backups.trouble if found[0] == desk.DONE_WELL and self.backups is not None else found

    def _sort_out(self, keys: Keys) -> None:
        for home, places in self._by_home(keys):
            if home != self.host:  # what has come here takes its copies' adds with it
                mine = keys[places]
                self.ways[home].changed.extend(mine[low : low + self._most] for low in range(0, mine.size, self._most))

    def pump(self, way: Way) -> None:
        """Sends a home what there is, unless it has not answered yet."""
        if way.under_way is not None or way.lost or self.now() < way.not_before or not self._may_ask():
            return
        if way.again:
            argument, pushed, deltas = way.again.popleft()
            self._ask(way, [], Frame(desk.PUSH_AGAIN, self.number, way.number + 1, argument, pushed, deltas))
            return
        pushed, deltas = next_push(way, self.copies, self._most, self.now())
        # others may not answer the latter now, but have to take pushes
        alone = bool(pushed.size and way.parts and way.parts[0].kind in OF_ALL)
        parts = [] if alone else next_parts(way, self.copies, self._most)
        if not parts and not pushed.size:
            return
        kind, argument, rows = desk.FETCH, self.spec, NO_BYTES
        keys = np.concatenate([NO_KEYS, *(part.keys for part in parts)])
        if parts and parts[0].kind != desk.FETCH:
            kind, argument, rows = parts[0].kind, parts[0].argument, parts[0].rows
            if kind in _OF_KEYS:  # what was added to these keys before counts before
                taken, more = self.copies.take(keys)
                pushed = np.concatenate([pushed, taken])
                deltas = np.concatenate([deltas.reshape(-1, self.own.size), more])
        self._ask(way, parts, Frame(kind, self.number, way.number + 1, argument, pushed, deltas, keys, rows))

    def _may_ask(self) -> bool:
        """Whether no push of an earlier view is under way, which may yet go to another home: it goes before others."""
        if self.places.is_returning:
            return False
        if self._asks_in != self.places.view and (self.backups is None or not self._has_old_pushes):
            self._asks_in = self.places.view
        return self._asks_in == self.places.view

    @property
    def _has_old_pushes(self) -> bool:
        pushes = (way.under_way[0] for way in self.ways.values() if way.under_way and way.under_way[0].pushed.size)
        return any(push.view != self.places.view for push in pushes)

    def _ask(self, way: Way, parts: list[Part], frame: Frame) -> None:
        way.number = frame.number
        way.under_way = self._send(way.host, frame), parts

    # -- what other homes ask and answer ---------------------------------------------------------------------

    def is_early(self, frame: Frame) -> bool:
        """Whether what another host asks or answers is to wait, see `Places.is_early`."""
        return self.places.is_early(frame)

    def serve(self, host: int, question: Frame) -> Frame | None:
        """Returns the answer to another host's question; None: there is none yet."""
        answer = self._serve(host, question)
        return answer and replace(answer, view=self.places.view)

    def _serve(self, host: int, question: Frame) -> Frame | None:
        if question.kind == desk.REJOIN:
            if self.backups is None:
                return question.refusal(desk.REFUSED)
            self.places.rejoin(host)
            return None
        if question.kind == desk.BACK_UP:
            question = self.places.still_kept(host, question)
            if self.host in self.places.apart and self.backups and not self.backups.has_room(len(question.rows)):
                return replace(question.refusal(desk.HOST_FULL), keys=question.keys.copy())
        elif self.places.is_moved(question):
            return question.refusal(desk.MOVED)
        return self.home.serve(host, question)

    def answered(self, host: int, answer: Frame) -> None:
        """Takes in what a home has answered, and asks it what there is to ask; or what a backup has."""
        way, kind = self.ways[host], answer.kind & ~(FAILED | ANSWER)
        if kind in (desk.BACK_UP, desk.REJOIN):
            if self.backups is not None and not way.lost:
                (self.backups.heard if kind == desk.BACK_UP else self.places.answered)(host, answer)
            return
        if way.under_way is None or way.under_way[0].number != answer.number:
            return  # of a host that is lost
        check_answer(way.under_way[0], answer, self.own.size)
        (question, parts), way.under_way = way.under_way, None
        if answer.kind & FAILED and answer.argument == desk.MOVED:
            self._deal_back(question, parts)
            return
        if answer.kind & FAILED:
            if question.pushed.size and question.view != self.places.view:
                self._push(question.pushed, question.deltas)
            elif question.pushed.size:
                way.refused = answer.argument
                way.pushes.appendleft((question.pushed, question.deltas))
                way.not_before = self.now() + _RETRY_SECONDS
            fail(host, answer.argument, parts)
            return
        pushed = question.pushed.size
        way.refused = 0 if pushed else way.refused
        if question.kind == desk.FETCH:
            try:
                self._land(way, question, question.pushed, answer.rows[:pushed])
                live = self._live_there(way, question, question.keys)
                if way.anew or not live.all() or self._is_older(way, question.keys):
                    if question.view == self.places.view:
                        way.parts.extendleft(reversed(parts))
                    else:
                        self._ask_all_again(parts)
                    parts = []
                else:
                    self.copies.enter(question.keys, answer.rows[pushed:])
            except OutOfMemoryError:
                fail(self.host, desk.HOST_FULL, parts)
        elif question.kind in WITH_VALUES:
            self._land(way, question, np.concatenate([question.pushed, question.keys]), answer.rows)
        way.anew = False
        for part in parts:
            end_part(part, answer)
        if self._asks_in == self.places.view:
            self.pump(way)
        else:
            self._pump_all()

    def _land(self, way: Way, question: Frame, keys: Keys, values: Bytes) -> None:
        """A home has answered: its values hold of keys that live there; others' new homes may have had later pushes."""
        there = self._live_there(way, question, keys)
        self.copies.land(*((keys, values) if there.all() else (keys[there], values[there])))

    def _live_there(self, way: Way, question: Frame, keys: Keys) -> Groups:
        """Returns which keys still live where they lived when a question was asked."""
        if question.view == self.places.view:
            return np.ones(keys.size, np.bool_)
        there: Groups = self._homes_of(keys) == way.host
        return there

    def _is_older(self, way: Way, keys: Keys) -> bool:
        """Returns whether a copy of one of the keys has gone with adds that the home did not have when it answered."""
        pushes = [self.copies.leaving, *(pushed for pushed, _ in way.pushes)]
        return any(np.isin(keys, pushed).any() for pushed in pushes if pushed.size)

    # -- what moves ------------------------------------------------------------------------------------------

    def lost(self, host: int) -> None:
        """Another host is lost, with the rows that live there."""
        way = self.ways[host]
        way.lost, way.refused = True, 0
        self.places.lost(host)
        self._end_if_lost(way)

    def joined(self, host: int) -> None:
        """A lost host was started again: where rows have backups it asks for them, as others do, and has none."""
        if self.backups is not None:
            self.ways[host] = self._new_way(host)

    def returned(self, host: int) -> None:
        """It is a home again, as all its homes have told it what is to live on it."""
        self.places.returned(host)
        if host != self.host:
            self._deal_anew()

    @property
    def filled(self) -> list[int]:
        """Hosts that may return now, as far as this one knows: what has been pushed to a lost one is where it goes to.

        Whether a lost host had applied it, its backup knows, and nobody after that.
        """
        is_again = (
            way.again or (way.under_way and way.under_way[0].kind == desk.PUSH_AGAIN) for way in self.ways.values()
        )
        return [] if any(is_again) else self.places.filled

    def _end_if_lost(self, way: Way) -> None:
        """What is on the way to a lost host goes to its backups, if rows have such, or fails."""
        if not way.lost:
            return
        (question, parts), way.under_way = way.under_way or (None, []), None
        if self.backups is None:
            fail(way.host, desk.HOST_LOST, [*parts, *way.parts])
        waiting = way.take_waiting()
        if self.backups is None:
            return
        if question is not None and question.pushed.size:  # what it has perhaps applied, and told its backups
            argument = way.host << NUMBER_BITS | question.number
            self._push_again(argument, question.pushed, question.deltas)
        waiting.parts.extendleft(reversed(parts))
        self._deal(waiting)
        self._pump_all()

    def _deal_anew(self) -> None:
        """What is on the way to homes goes where they are now."""
        ways = [way for way in self.ways.values() if not way.lost]
        under_way = [part for way in ways if way.under_way for part in way.under_way[1]]
        for waiting in [way.take_waiting() for way in ways]:
            self._deal(waiting)
        for part in under_way:
            if part.kind in OF_EVERYONE:
                self._ask_everyone_again(part)
        self._pump_all()

    def _deal_back(self, question: Frame, parts: list[Part]) -> None:
        """A home has refused a question as a whole, since some of it lives elsewhere, as is known here by now."""
        if question.kind == desk.PUSH_AGAIN:
            self._push_again(question.argument, question.pushed, question.deltas)
        else:
            self._push(question.pushed, question.deltas)
        self._ask_all_again(parts)

    def _ask_all_again(self, parts: list[Part]) -> None:
        for part in parts:
            self._ask_again(part)
        self._pump_all()

    def _pump_all(self) -> None:
        for way in self.ways.values():
            self.pump(way)

    def _deal(self, waiting: Way) -> None:
        for again in waiting.again:
            self._push_again(*again)
        for some in waiting.pushes:
            self._push(*some)
        for keys in waiting.changed:
            self._sort_out(keys)
        for part in waiting.parts:
            if not waiting.lost and part.kind in (desk.LIST, desk.READ):
                self._put(self.ways[waiting.host], part)
            else:
                self._ask_again(part)

    def _push_again(self, argument: int, keys: Keys, deltas: Bytes) -> None:
        for home, places in self._by_home(keys):
            some = keys[places], deltas[places]
            if home != self.host:
                self.ways[home].again.append((argument, *some))
            elif not self.home.has(self.host, argument):
                self._add_here(*some)

    def _ask_again(self, part: Part) -> None:
        if not part.asking.left:
            return
        if part.kind in OF_EVERYONE:
            self._ask_everyone_again(part)
        elif part.kind == desk.LIST and not part.argument:  # others have what it had
            end_part(part, Frame(desk.LIST | ANSWER, self.number, 0, -1))
        elif part.kind in (desk.LIST, desk.READ):
            fail(self.host, desk.MOVED, [part])
        else:
            self._deal_out(part)
            end_part(replace(part, places=NO_KEYS), NOTHING)

    def _ask_everyone_again(self, part: Part) -> None:
        """Some have counted without what comes to them, or with what has gone; others are asked for the first time."""
        if part.asking.left:
            part.asking.left = 0
            self.ask(part.kind, part.keys, part.asking.done)

    def _show_what_arrived(self) -> None:
        """Groups that have come here: once there are no copies of theirs, this host's workers find the rows."""
        arriving = self.places.arriving
        if arriving.any():
            if self.copies.leaving.size or arriving[groups_of(self.copies.everything())].any():
                return
            if self._has_old_pushes:
                return  # some of it may have been for here
            self.places.have_arrived()
        waiting, self._until_arrived = self._until_arrived, []
        for go_on in waiting:
            go_on()
