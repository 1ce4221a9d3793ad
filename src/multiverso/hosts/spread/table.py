"""One spread table on this host: it serves the rows that live here, and fetches and pushes those that do not.

To each other home one question is under way at a time, and what has come meanwhile goes with the next. Messages arrive
once and in order, so a question that follows an add has it counted, and nothing has to be remembered of either.

Where each row has a backup (`Backups`), the loss of a host moves its groups of keys there. What it was asked is asked
again there, a push by its number; what is asked before a host knows of the loss waits until it does.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from multiverso.errors import OutOfMemoryError
from multiverso.hosts.peer.frames import ProtocolError
from multiverso.hosts.spread.backups import NOBODY, Backups
from multiverso.hosts.spread.copies import Copies
from multiverso.hosts.spread.frames import ANSWER, FAILED, NO_BYTES, NO_KEYS, NUMBER_BITS, WITH_VALUES, Frame
from multiverso.hosts.spread.home import Home
from multiverso.hosts.spread.homes import groups_of, places_of
from multiverso.hosts.spread.ways import NOTHING, OF_ALL, Asking, Done, Part, Way, end_part, fail, next_parts, next_push
from multiverso.layout import desk
from multiverso.layout.keyed import GROUPS
from multiverso.shards.keyed_rows import Bytes, KeyedRows, Keys

_FRAME_BYTES = 1 << 20
_FRAME_ROWS = 8192
_RETRY_SECONDS = 1.0
_OF_KEYS = (desk.REMOVE, desk.CONTAINS, desk.READ, desk.OVERWRITE)
_OF_EVERYONE = (desk.COUNT_KEYS, desk.SET_WORD)


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
        losses: how many hosts had been lost in this job before; questions are numbered from there, so that those of a
            host that was started again are later ones.
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
    show: Callable[[npt.NDArray[np.int16]], None]
    kept: KeyedRows | None = None
    losses: int = 0
    now: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self.ways = {other: self._new_way(other) for other in range(self.hosts) if other != self.host}
        self._gone: set[int] = set()  # hosts that were lost, and are no homes even if they were started again
        self._most = max(1, min(_FRAME_ROWS, _FRAME_BYTES // (self.own.size + 8)))
        self.backups: Backups | None = None
        if self.kept is not None:
            self._most = max(1, min(_FRAME_ROWS, _FRAME_BYTES // (self.own.whole + 8)))
            self.backups = Backups(self.number, self.own, self.kept, self._most, self._send, self.now)
        self.home = Home(self.number, self.spec, self.own, self.updater, self.after, self.backups)
        self._coming = np.zeros(GROUPS, np.bool_)  # groups that live here, as this host's workers do not know yet
        self._until_here: list[Part] = []  # fetches that wait for that
        self._homes = self._shown = self._place()
        self.show(self._shown)

    def _new_way(self, host: int) -> Way:
        return Way(host, number=self.losses << 32)

    def _send(self, host: int, frame: Frame) -> None:
        self.send(host, *replace(frame, view=self.losses).parts())

    def _place(self) -> npt.NDArray[np.int16]:
        """Returns the home of each group, with the hosts that are left if rows have backups."""
        if self.backups is None:
            return places_of(range(self.hosts), 1)[0]
        homes, *rest = places_of([host for host in range(self.hosts) if host not in self._gone], 2)
        self.backups.place(
            np.where(homes == self.host, rest[0], np.int16(NOBODY)) if rest else np.full_like(homes, NOBODY)
        )
        return homes

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
        if kind in OF_ALL:
            self._sort_out(self.copies.changed())  # what this host's workers have added before counts
        asking = Asking(done, 1, took)
        whole = Part(asking, kind, keys, np.arange(keys.size), rows, argument)
        if host is not None or kind in _OF_EVERYONE:
            gone = self._gone if self.backups is not None else set()  # which have nothing any more
            hosts = [host] if host is not None else [one for one in self.ways if one not in gone]
            asking.left += len(hosts)
            for one in hosts:
                if one in gone:
                    self._ask_again(one, whole)
                else:
                    self._put(self.ways[one], whole)
        else:
            self._deal_out(whole)
            hosts = np.unique(self._homes[groups_of(keys)]).tolist() if keys.size else []
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
        homes = self._homes[groups_of(whole.keys)] if whole.keys.size else NO_KEYS
        for home in np.unique(homes).tolist():
            places = np.flatnonzero(homes == home)
            for low in range(0, places.size, self._most):
                some = places[low : low + self._most]
                rows = whole.rows[some] if whole.rows.size else NO_BYTES
                part = replace(whole, keys=whole.keys[some], places=whole.places[some], rows=rows)
                whole.asking.left += 1
                if home != self.host:
                    self._put(self.ways[home], part)
                elif part.kind != desk.FETCH:
                    self._end_here(part)
                elif self._coming.any():
                    self._until_here.append(part)
                else:
                    end_part(part, NOTHING)

    def _end_here(self, part: Part) -> None:
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
        self._show_what_came()
        for way in self.ways.values():
            if way.parts or way.has_adds:
                way.pushed_at = 0.0 if now else way.pushed_at
                self.pump(way)
        is_kept = self.backups is None or self.backups.look(always, now)
        return not (is_kept and self.is_settled)

    def _unwanted(self) -> Keys:
        """Copies of a lost host's rows go: who adds to one hears of the loss, or finds the row that came here."""
        gone = self._coming
        for host in self._gone & self.ways.keys():
            if self.ways[host].lost:
                gone = gone | (self._homes == host)
        if self._gone and gone.any():
            keys = self.copies.everything()
            if (found := keys[gone[groups_of(keys)]]).size:
                return found
        return self.copies.unwanted()

    def leave_all(self) -> bool:
        """All copies go; returns whether there are none. To be called until then."""
        for way in self.ways.values():
            way.anew = way.under_way is not None
        if not self.copies.leaving.size:
            everything = self.copies.everything()
            if not everything.size:
                return True
            self.copies.begin_leaving(everything)
        self.take_left()
        return False

    def take_left(self) -> None:
        """Takes what copies that have gone had been added, once no worker can be adding to one."""
        if (left := self.copies.left()) is not None:
            self._push(*left)

    def _push(self, keys: Keys, deltas: Bytes) -> None:
        """What copies that have gone had been added goes home, which may be here by now."""
        homes = self._homes[groups_of(keys)] if keys.size else NO_KEYS
        for home in np.unique(homes).tolist():
            some = keys[homes == home], deltas[homes == home]
            if home == self.host:
                self.home.add(*some)
            elif not self.ways[home].lost:
                self.ways[home].pushes.append(some)

    @property
    def is_settled(self) -> bool:
        """Whether the homes have taken in all that copies had been added, or cannot."""
        left = (way.has_adds for way in self.ways.values() if not (way.lost or way.refused))
        return not (self.copies.leaving.size or self._coming.any() or any(left))

    @property
    def asks(self) -> bool:
        """Whether there is something to ask a home now, or again later as it has refused it."""
        return any(way.under_way is None and (way.parts or way.has_adds) for way in self.ways.values() if not way.lost)

    @property
    def trouble(self) -> tuple[int, int]:
        """Why adds do not reach a host, and which one: a code of ``layout/desk.py``."""
        found = next(((way.refused, way.host) for way in self.ways.values() if way.refused), (desk.DONE_WELL, 0))
        return self.backups.trouble if found[0] == desk.DONE_WELL and self.backups is not None else found

    def _sort_out(self, keys: Keys) -> None:
        if not keys.size:
            return
        homes = self._homes[groups_of(keys)]
        for home in np.unique(homes[homes != self.host]).tolist():  # what has come here takes its copies' adds with it
            mine = keys[homes == home]
            self.ways[home].changed.extend(mine[low : low + self._most] for low in range(0, mine.size, self._most))

    def pump(self, way: Way) -> None:
        """Sends a home what there is, unless it has not answered yet."""
        if way.under_way is not None or way.lost or self.now() < way.not_before:
            return
        if way.again:
            argument, pushed, deltas = way.again.popleft()
            self._ask(way, [], Frame(desk.PUSH_AGAIN, self.number, way.number + 1, argument, pushed, deltas))
            return
        pushed, deltas = next_push(way, self.copies, self._most, self.now())
        parts = next_parts(way, self.copies, self._most)
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

    def _ask(self, way: Way, parts: list[Part], frame: Frame) -> None:
        way.number, way.under_way = frame.number, (frame, parts)
        self._send(way.host, frame)

    # -- what other homes answer -----------------------------------------------------------------------------

    def answered(self, host: int, answer: Frame) -> None:
        """Takes in what a home has answered, and asks it what there is to ask; or what a backup has."""
        if answer.kind & ~FAILED == desk.BACK_UP | ANSWER:
            if self.backups is not None and not self.ways[host].lost:
                self.backups.heard(host, answer)
            return
        way = self.ways[host]
        if way.under_way is None or way.under_way[0].number != answer.number:
            return  # of a host that is lost
        self._check_answer(way.under_way[0], answer)
        (question, parts), way.under_way = way.under_way, None
        if answer.kind & FAILED:
            if question.pushed.size:
                way.refused = answer.argument
                way.pushes.appendleft((question.pushed, question.deltas))
                way.not_before = self.now() + _RETRY_SECONDS
            fail(host, answer.argument, parts)
            return
        pushed = question.pushed.size
        way.refused = 0 if pushed else way.refused
        if question.kind == desk.FETCH:
            try:
                self.copies.land(question.pushed, answer.rows[:pushed])
                if way.anew or self._is_older(way, question.keys):
                    way.parts.extendleft(reversed(parts))
                    parts = []
                else:
                    self.copies.enter(question.keys, answer.rows[pushed:])
            except OutOfMemoryError:
                fail(self.host, desk.HOST_FULL, parts)
        elif question.kind in WITH_VALUES:
            self.copies.land(np.concatenate([question.pushed, question.keys]), answer.rows)
        way.anew = False
        for part in parts:
            end_part(part, answer)
        self.pump(way)

    def _is_older(self, way: Way, keys: Keys) -> bool:
        """Returns whether a copy of one of the keys has gone with adds that the home did not have when it answered."""
        pushes = [self.copies.leaving, *(pushed for pushed, _ in way.pushes)]
        return any(np.isin(keys, pushed).any() for pushed in pushes if pushed.size)

    def _check_answer(self, question: Frame, answer: Frame) -> None:
        if answer.kind == question.kind | ANSWER | FAILED:
            return
        asked = question.pushed.size + question.keys.size
        right = answer.kind == question.kind | ANSWER
        if question.kind in WITH_VALUES:
            right = right and answer.rows.shape == (asked, self.own.size)
        if question.kind in (desk.REMOVE, desk.CONTAINS):
            right = right and answer.keys.size == question.keys.size
        if not right:
            raise ProtocolError(f"an answer of kind {answer.kind} to a question of kind {question.kind}")

    def lost(self, host: int, losses: int) -> None:
        """A host is lost, with the rows that live there.

        Args:
            host: its number; its own: it was started again in the place of one that was lost.
            losses: of the job so far.
        """
        self.losses = losses
        self._gone.add(host)
        if host != self.host:
            self.ways[host].lost, self.ways[host].refused = True, 0
        if self.backups is not None:
            coming = self._homes == host
            self.backups.lose(host)
            self._homes = self._place()
            coming &= self._homes == self.host
            self.backups.take_over(coming)
            self._coming |= coming
            self._shown = np.where(self._coming, self._shown, self._homes)
            self.show(self._shown)
        if host != self.host:
            self._end_if_lost(self.ways[host])

    def joined(self, host: int) -> None:
        """A lost host was started again: where rows have backups it asks for them, as others do, and has none."""
        if self.backups is not None:
            self.ways[host] = self._new_way(host)

    def _end_if_lost(self, way: Way) -> None:
        """What is on the way to a lost host goes to its backups, if rows have such, or fails."""
        if not way.lost:
            return
        question, parts = way.under_way or (None, [])
        parts, way.under_way = [*parts, *way.parts], None
        again, pushes, changed = list(way.again), list(way.pushes), list(way.changed)
        for waiting in (way.parts, way.again, way.pushes, way.changed):
            waiting.clear()
        if self.backups is None:
            fail(way.host, desk.HOST_LOST, parts)
            return
        if question is not None and question.pushed.size:
            self._push_again(way.host, question)
        for argument, keys, deltas in again:
            self._deal_again(argument, keys, deltas)
        for some in pushes:
            self._push(*some)
        for keys in changed:
            self._sort_out(keys)
        for part in parts:
            self._ask_again(way.host, part)
        for other in self.ways.values():
            self.pump(other)

    def _push_again(self, lost: int, question: Frame) -> None:
        """What a lost host has perhaps applied, and told its backups."""
        self._deal_again(lost << NUMBER_BITS | question.number, question.pushed, question.deltas)

    def _deal_again(self, argument: int, keys: Keys, deltas: Bytes) -> None:
        homes = self._homes[groups_of(keys)]
        for home in np.unique(homes).tolist():
            some = keys[homes == home], deltas[homes == home]
            if home != self.host:
                self.ways[home].again.append((argument, *some))
            elif not self.home.has(self.host, argument):
                self.home.add(*some)

    def _ask_again(self, lost: int, part: Part) -> None:
        asking = part.asking
        if not asking.left:
            return
        if part.kind == desk.COUNT_KEYS:  # some have counted without what comes to them
            asking.left = 0
            self.ask(part.kind, part.keys, asking.done)
        elif part.kind == desk.LIST and not part.argument:  # others have what it had
            end_part(part, Frame(desk.LIST | ANSWER, self.number, 0, -1))
        elif part.kind in (desk.LIST, desk.READ):
            fail(lost, desk.MOVED, [part])
        else:
            if part.kind != desk.SET_WORD:
                self._deal_out(part)
            end_part(replace(part, places=NO_KEYS), NOTHING)

    def _show_what_came(self) -> None:
        """Groups that live here since a host was lost: once there are no copies of theirs, workers find the rows."""
        keys = self.copies.everything() if self._coming.any() and not self.copies.leaving.size else None
        if keys is None or self._coming[groups_of(keys)].any():
            return
        self._coming[:] = False
        self._shown = self._homes
        self.show(self._shown)
        waiting, self._until_here = self._until_here, []
        for part in waiting:
            end_part(part, NOTHING)

    def is_early(self, question: Frame) -> bool:
        """Whether another host knows of a loss that this one has not heard of yet: the question is to wait for that."""
        return self.backups is not None and question.view > self.losses
