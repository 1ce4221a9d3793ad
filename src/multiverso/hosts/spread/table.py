"""One spread table on this host: it serves the rows that live here, and fetches and pushes those that do not.

To each other home one question is under way at a time, and what has come meanwhile goes with the next. Messages arrive
once and in order, so a question that follows an add has it counted, and nothing has to be remembered of either.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from multiverso.errors import MultiversoError, OutOfMemoryError
from multiverso.hosts.peer.frames import ProtocolError
from multiverso.hosts.spread.copies import Copies
from multiverso.hosts.spread.frames import ANSWER, FAILED, NO_BYTES, NO_KEYS, Frame
from multiverso.hosts.spread.homes import groups_of, homes_of
from multiverso.layout import desk
from multiverso.shards.keyed_rows import Bytes, KeyedRows, Keys

_FRAME_BYTES = 1 << 20
_FRAME_ROWS = 8192
_RETRY_SECONDS = 1.0
# so long adds to a copy wait for others, and where nothing is asked of the home, with which they could go
_TOGETHER_SECONDS, _PUSH_SECONDS = 0.003, 0.01
_OF_KEYS = (desk.REMOVE, desk.CONTAINS, desk.READ, desk.OVERWRITE)
_OF_ALL = (desk.COUNT_KEYS, desk.LIST)
_WITH_VALUES = (desk.FETCH, desk.REMOVE, desk.OVERWRITE)  # what it answers is what copies become
_NOTHING = Frame(desk.FETCH | ANSWER, 0, 0)
Done = Callable[[int, int, Frame | None], None]
"""How a question ended: a code of ``layout/desk.py``, the host that it is about, and the answer of the last home."""


@dataclass(eq=False)
class Asking:
    """A question of a worker's, in as many parts as homes are asked.

    Attributes:
        done: called once, when the last part is answered, or the first one cannot be.
        left: parts without an answer; 0 once it is over.
        took: called with each answer, and the places of its keys among the question's.
        total: of numbers that the homes have answered.
    """

    done: Done
    left: int
    took: Callable[[Frame, Keys], None] | None = None
    total: int = 0


@dataclass(eq=False)
class Part:
    """What one home is asked: see `Frame`.

    Attributes:
        places: of its keys among the question's.
        after: how many batches of changed keys go before it.
        waited: it came while another question was under way, which may have brought what it asks for.
    """

    asking: Asking
    kind: int
    keys: Keys = field(default_factory=lambda: NO_KEYS)
    places: Keys = field(default_factory=lambda: NO_KEYS)
    rows: Bytes = field(default_factory=lambda: NO_BYTES)
    argument: int = 0
    after: int = 0
    waited: bool = False


@dataclass(eq=False)
class Way:
    """What goes to another home.

    Attributes:
        parts: questions that have not been sent, in order.
        changed: keys of copies that may have been added to, in batches.
        begun: how many of those were taken from here.
        pushes: what copies that have gone had been added.
        under_way: the question without an answer, and the parts that it asks.
        not_before: the time of the next question, after one that the home had no memory for.
        pushed_at: when that to which copies have been added was sent last.
        again: what that fetches is to be fetched again: all copies have gone meanwhile.
        refused: why the home has not taken what copies had been added, which is sent again now and then; 0: it has.
        lost: whether its host is.
    """

    host: int
    parts: deque[Part] = field(default_factory=deque)
    changed: deque[Keys] = field(default_factory=deque)
    begun: int = 0
    pushes: deque[tuple[Keys, Bytes]] = field(default_factory=deque)
    under_way: tuple[Frame, list[Part]] | None = None
    number: int = 0
    not_before: float = 0.0
    pushed_at: float = 0.0
    again: bool = False
    refused: int = 0
    lost: bool = False

    @property
    def has_adds(self) -> bool:
        """Whether the home has not taken everything in that copies had been added."""
        return bool(self.changed or self.pushes or (self.under_way and self.under_way[0].pushed.size))


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

    def __post_init__(self) -> None:
        self._homes = homes_of(range(self.hosts))
        self.ways = {other: Way(other) for other in range(self.hosts) if other != self.host}
        self._most = max(1, min(_FRAME_ROWS, _FRAME_BYTES // (self.own.size + 8)))

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
        homes = self._homes[groups_of(keys)]
        hosts = [host] if host is not None else np.unique(homes).tolist()
        if kind in (desk.COUNT_KEYS, desk.SET_WORD):
            hosts = list(self.ways)
        if kind in _OF_ALL:
            self._sort_out(self.copies.changed())  # what this host's workers have added before counts
        asking = Asking(done, 0, took)
        if not hosts:
            done(desk.DONE_WELL, 0, None)
        for home in hosts:
            all_places = np.arange(keys.size) if kind == desk.SET_WORD else np.flatnonzero(homes == home)
            pieces = range(0, max(all_places.size, 1), self._most)
            asking.left += len(pieces)
            for low in pieces:
                places = all_places[low : low + self._most]
                mine = rows[places] if rows.size else NO_BYTES
                way = self.ways[home]
                after = way.begun + len(way.changed) if kind in _OF_ALL else 0
                waited = way.under_way is not None or bool(way.parts)
                way.parts.append(Part(asking, kind, keys[places], places, mine, argument, after, waited))
        for home in hosts:
            self._end_if_lost(self.ways[home])
            self.pump(self.ways[home])

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
        for way in self.ways.values():
            if now:
                way.pushed_at = 0.0
            self.pump(way)
        return not self.is_settled

    def _unwanted(self) -> Keys:
        lost = [way.host for way in self.ways.values() if way.lost]
        if lost:
            keys = self.copies.everything()
            if (gone := keys[np.isin(self._homes[groups_of(keys)], lost)]).size:
                return gone  # so that who adds to one hears of the loss
        return self.copies.unwanted()

    def leave_all(self) -> bool:
        """All copies go; returns whether there are none. To be called until then."""
        for way in self.ways.values():
            way.again = way.under_way is not None
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
            keys, deltas = left
            for way, here in self._by_home(keys):
                if not way.lost:
                    way.pushes.append((keys[here], deltas[here]))

    @property
    def is_settled(self) -> bool:
        """Whether the homes have taken in all that copies had been added, or cannot."""
        left = (way.has_adds for way in self.ways.values() if not (way.lost or way.refused))
        return not self.copies.leaving.size and not any(left)

    @property
    def trouble(self) -> tuple[int, int]:
        """Why adds do not reach a host, and which one: a code of ``layout/desk.py``."""
        return next(((way.refused, way.host) for way in self.ways.values() if way.refused), (desk.DONE_WELL, 0))

    def _sort_out(self, keys: Keys) -> None:
        for way, here in self._by_home(keys):
            mine = keys[here]
            way.changed.extend(mine[low : low + self._most] for low in range(0, mine.size, self._most))

    def _by_home(self, keys: Keys) -> Iterator[tuple[Way, npt.NDArray[np.bool_]]]:
        """Gives each home of the keys, and which of them live there."""
        homes = self._homes[groups_of(keys)] if keys.size else NO_KEYS
        for home in np.unique(homes).tolist():
            yield self.ways[home], homes == home

    def pump(self, way: Way) -> None:
        """Sends a home what there is, unless it has not answered yet."""
        if way.under_way is not None or way.lost or time.monotonic() < way.not_before:
            return
        pushed, deltas = self._push_of(way)
        parts = self._next_parts(way)
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
        way.number += 1
        frame = Frame(kind, self.number, way.number, argument, pushed, deltas, keys, rows)
        way.under_way = frame, parts
        self.send(way.host, *frame.parts())

    def _push_of(self, way: Way) -> tuple[Keys, Bytes]:
        """Returns what the next question brings along."""
        now = time.monotonic()
        while way.pushes:
            keys, deltas = way.pushes.popleft()
            if keys.size > self._most:
                way.pushes.appendleft((keys[self._most :], deltas[self._most :]))
            if keys.size:
                return keys[: self._most], deltas[: self._most]
        waits = _TOGETHER_SECONDS if way.parts else _PUSH_SECONDS
        if now < way.pushed_at + waits and not (way.parts and way.parts[0].after > way.begun):
            return NO_KEYS, NO_BYTES
        way.pushed_at = now
        while way.changed:
            taken = self.copies.take(way.changed.popleft())
            way.begun += 1
            if taken[0].size:
                return taken
        return NO_KEYS, NO_BYTES

    def _next_parts(self, way: Way) -> list[Part]:
        """Returns what the next question asks: some fetches together, or one of the others."""
        if not way.parts or way.pushes:
            return []
        first = way.parts[0]
        leaving = self.copies.leaving
        if first.after > way.begun or (leaving.size and (first.kind in _OF_ALL or np.isin(first.keys, leaving).any())):
            return []  # what was added before, also to a copy that goes, comes first
        if first.kind != desk.FETCH:
            return [way.parts.popleft()]
        found: list[Part] = []
        size = 0
        while way.parts and way.parts[0].kind == desk.FETCH:
            part = way.parts[0]
            if part.waited:  # some of it may have come meanwhile
                part.keys, part.waited = part.keys[~self.copies.rows.has(part.keys)], False
                if not part.keys.size:
                    self._end_part(way.parts.popleft(), _NOTHING)
                    continue
            is_too_much = size + part.keys.size > self._most
            if found and (is_too_much or (leaving.size and np.isin(part.keys, leaving).any())):
                break
            found.append(way.parts.popleft())
            size += part.keys.size
        return found or self._next_parts(way)

    # -- what other homes answer -----------------------------------------------------------------------------

    def answered(self, host: int, answer: Frame) -> None:
        """Takes in what a home has answered, and asks it what there is to ask."""
        way = self.ways[host]
        if way.under_way is None or way.under_way[0].number != answer.number:
            return  # of a host that is lost
        self._check_answer(way.under_way[0], answer)
        (question, parts), way.under_way = way.under_way, None
        if answer.kind & FAILED:
            if question.pushed.size:
                way.refused = answer.argument
                way.pushes.appendleft((question.pushed, question.deltas))
                way.not_before = time.monotonic() + _RETRY_SECONDS
            self._fail(host, answer.argument, parts)
            return
        pushed = question.pushed.size
        way.refused = 0 if pushed else way.refused
        if question.kind == desk.FETCH:
            try:
                self.copies.land(question.pushed, answer.rows[:pushed])
                if way.again or self._is_older(way, question.keys):
                    way.parts.extendleft(reversed(parts))
                    parts = []
                else:
                    self.copies.enter(question.keys, answer.rows[pushed:])
            except OutOfMemoryError:
                self._fail(self.host, desk.HOST_FULL, parts)
        elif question.kind in _WITH_VALUES:
            self.copies.land(np.concatenate([question.pushed, question.keys]), answer.rows)
        way.again = False
        for part in parts:
            self._end_part(part, answer)
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
        if question.kind in _WITH_VALUES:
            right = right and answer.rows.shape == (asked, self.own.size)
        if question.kind in (desk.REMOVE, desk.CONTAINS):
            right = right and answer.keys.size == question.keys.size
        if not right:
            raise ProtocolError(f"an answer of kind {answer.kind} to a question of kind {question.kind}")

    def _end_part(self, part: Part, answer: Frame) -> None:
        asking = part.asking
        if not asking.left:
            return
        asking.left -= 1
        asking.total += answer.argument
        if asking.took is not None:
            asking.took(answer, part.places)
        if not asking.left:
            asking.done(desk.DONE_WELL, asking.total, answer)

    def _fail(self, host: int, code: int, parts: Iterable[Part]) -> None:
        for part in parts:
            if part.asking.left:
                part.asking.left = 0
                part.asking.done(code, host, None)

    def lost(self, host: int) -> None:
        """A host is lost, with the rows that live there."""
        way = self.ways[host]
        way.lost, way.refused = True, 0
        self._end_if_lost(way)

    def _end_if_lost(self, way: Way) -> None:
        if way.lost:
            parts = [*(way.under_way[1] if way.under_way is not None else ()), *way.parts]
            way.under_way = None
            for waiting in (way.parts, way.changed, way.pushes):
                waiting.clear()
            self._fail(way.host, desk.HOST_LOST, parts)

    # -- what other hosts ask of the rows that live here -----------------------------------------------------

    def serve(self, question: Frame) -> Frame:
        """Returns the answer to a question."""
        try:
            return self._serve(question)
        except OutOfMemoryError:
            return question.refusal(desk.HOST_FULL)
        except ProtocolError:
            raise
        except MultiversoError:
            return question.refusal(desk.REFUSED)

    def _serve(self, question: Frame) -> Frame:
        kind, own = question.kind, self.own
        self._check(question)
        if kind == desk.FETCH and question.argument != self.spec:
            return question.refusal(desk.OTHER_TABLE)
        if question.pushed.size:
            own.apply(self.updater, own.enter(question.pushed, self.after), question.deltas)
        rows, keys, number = NO_BYTES, NO_KEYS, 0
        if kind == desk.REMOVE:
            keys = own.remove(question.keys)
        elif kind == desk.CONTAINS:
            keys = own.has(question.keys).astype(np.int64)
        elif kind == desk.COUNT_KEYS:
            number = own.count()
        elif kind == desk.SET_WORD:
            own.set_word(*question.keys.tolist())
        elif kind == desk.LIST:
            number, keys = own.list_keys(question.argument)
        elif kind == desk.READ:
            keys, rows = own.read_whole(question.keys)
        elif kind == desk.OVERWRITE:
            own.overwrite(question.keys, question.rows)
        elif kind != desk.FETCH:
            return question.refusal(desk.REFUSED)
        if kind in _WITH_VALUES:
            rows = own.values(np.concatenate([question.pushed, question.keys]))
        return Frame(kind | ANSWER, self.number, question.number, number, keys=keys, rows=rows)

    def _check(self, question: Frame) -> None:
        count, shape = question.keys.size, question.rows.shape
        right = {desk.SET_WORD: count == 2, desk.OVERWRITE: shape == (count, self.own.whole)}
        if not right.get(question.kind, True):
            raise ProtocolError(f"a question of kind {question.kind} about {count} keys")
