"""One spread table on this host: it serves the rows that live here, and fetches and pushes those that do not.

What it asks of other homes is `Outgoing`. Where each row has a backup (`Backups`), a host that is lost or returns moves
groups of keys (`Places`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

import numpy as np

from multiverso.errors import OutOfMemoryError
from multiverso.hosts.spread.backups import Backups, Groups
from multiverso.hosts.spread.copies import Copies
from multiverso.hosts.spread.frames import ANSWER, FAILED, WITH_VALUES, Frame
from multiverso.hosts.spread.home import Home
from multiverso.hosts.spread.outgoing import RETRY_SECONDS, Outgoing
from multiverso.hosts.spread.placement import groups_of
from multiverso.hosts.spread.places import Homes, Places
from multiverso.hosts.spread.ways import Way, check_answer, end_part, fail
from multiverso.layout import desk
from multiverso.shards.keyed_rows import Bytes, KeyedRows, Keys

_FRAME_BYTES = 1 << 20
_FRAME_ROWS = 8192


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
        row = self.own.size if self.kept is None else self.own.whole
        most = max(1, min(_FRAME_ROWS, _FRAME_BYTES // (row + 8)))
        self.backups: Backups | None = None
        if self.kept is not None:
            self.backups = Backups(self.number, self.own, self.kept, most, self._send, self.now)
        self.home = Home(self.number, self.spec, self.own, self.updater, self.after, self.backups)
        self.places = Places(
            self.number, self.host, self.hosts, self.own, self.backups, self._send, self.show, self.apart, self.view
        )
        others = [other for other in range(self.hosts) if other != self.host]
        about = (self.number, self.spec, self.host, others, most, self.copies)
        self.outgoing = Outgoing(*about, self.home, self.places, self._send, self.now)
        self.ways, self.ask = self.outgoing.ways, self.outgoing.ask
        for other in self.ways.keys() & set(self.away):
            self.ways[other].lost = True
        self.places.begin()

    def _send(self, host: int, frame: Frame) -> Frame:
        stamped = replace(frame, view=self.places.view)
        self.send(host, *stamped.parts())
        return stamped

    # -- what goes to other homes ----------------------------------------------------------------------------

    def look(self, always: bool, now: bool = False) -> bool:
        """Looks for copies that workers have added to, and for those that should go; returns whether there are any.

        Args:
            always: also where no add has ended since the last look.
            now: what they have been added is sent at once.
        """
        self.outgoing.sort_out(self.copies.changed(always))
        if not self.copies.leaving.size and (unwanted := self._unwanted()).size:
            self.copies.begin_leaving(unwanted)
        self.take_left()
        self.outgoing.try_again_here()
        if self.places.look():
            self.outgoing.deal_anew()
        self._show_what_arrived()
        for way in self.ways.values():
            if way.parts or way.has_adds:
                way.pushed_at = 0.0 if now else way.pushed_at
                self.outgoing.pump(way)
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
            self.outgoing.push(*left)

    @property
    def is_settled(self) -> bool:
        """Whether the homes have taken in all that copies had been added, or cannot."""
        left = (way.has_adds for way in self.ways.values() if not (way.lost or way.refused))
        return not (self.copies.leaving.size or self.places.arriving.any() or any(left))

    @property
    def asks(self) -> bool:
        """Whether there is something to ask a home now, or again later as it has refused it."""
        return self.outgoing.asks

    @property
    def trouble(self) -> tuple[int, int]:
        """Why adds do not reach a host, and which one: a code of ``layout/desk.py``."""
        if self.outgoing.refused_here:
            return desk.HOST_FULL, self.host
        found = next(((way.refused, way.host) for way in self.ways.values() if way.refused), (desk.DONE_WELL, 0))
        return self.backups.trouble if found[0] == desk.DONE_WELL and self.backups is not None else found

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
            self.outgoing.deal_back(question, parts)
            return
        if answer.kind & FAILED:
            if question.pushed.size and question.view != self.places.view:
                self.outgoing.push(question.pushed, question.deltas)
            elif question.pushed.size:
                way.refused = answer.argument
                way.pushes.appendleft((question.pushed, question.deltas))
                way.not_before = self.now() + RETRY_SECONDS
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
                        self.outgoing.ask_all_again(parts)
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
        self.outgoing.go_on(way)

    def _land(self, way: Way, question: Frame, keys: Keys, values: Bytes) -> None:
        """A home has answered: its values hold of keys that live there; others' new homes may have had later pushes."""
        there = self._live_there(way, question, keys)
        self.copies.land(*((keys, values) if there.all() else (keys[there], values[there])))

    def _live_there(self, way: Way, question: Frame, keys: Keys) -> Groups:
        """Returns which keys still live where they lived when a question was asked."""
        if question.view == self.places.view:
            return np.ones(keys.size, np.bool_)
        there: Groups = self.outgoing.homes_of(keys) == way.host
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
        self.outgoing.end_if_lost(way)

    def joined(self, host: int) -> None:
        """A lost host was started again: where rows have backups it asks for them, as others do, and has none."""
        if self.backups is not None:
            self.ways[host] = self.outgoing.new_way(host)

    def returned(self, host: int) -> None:
        """It is a home again, as all its homes have told it what is to live on it."""
        self.places.returned(host)
        if host != self.host:
            self.outgoing.deal_anew()

    @property
    def filled(self) -> list[int]:
        """Hosts that may return now, as far as this one knows: what has been pushed to a lost one is where it goes to.

        Whether a lost host had applied it, its backup knows, and nobody after that.
        """
        is_again = (
            way.again or (way.under_way and way.under_way[0].kind == desk.PUSH_AGAIN) for way in self.ways.values()
        )
        return [] if any(is_again) else self.places.filled

    def _show_what_arrived(self) -> None:
        """Groups that have come here: once there are no copies of theirs, this host's workers find the rows."""
        arriving = self.places.arriving
        if arriving.any():
            if self.copies.leaving.size or arriving[groups_of(self.copies.everything())].any():
                return
            if self.outgoing.has_old_pushes:
                return  # some of it may have been for here
            self.places.have_arrived()
        self.outgoing.arrived()
