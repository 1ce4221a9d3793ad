"""What is on its way to a table's other homes, and the questions of this host's workers, whose parts that are."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from multiverso.hosts.peer.frames import ProtocolError
from multiverso.hosts.spread.copies import Copies
from multiverso.hosts.spread.frames import ANSWER, FAILED, NO_BYTES, NO_KEYS, WITH_VALUES, Frame
from multiverso.layout import desk
from multiverso.shards.keyed_rows import Bytes, Keys

OF_ALL = (desk.COUNT_KEYS, desk.LIST)
OF_EVERYONE = (desk.COUNT_KEYS, desk.SET_WORD)
# so long adds to a copy wait for others, and where nothing is asked of the home, with which they could go
_TOGETHER_SECONDS, _PUSH_SECONDS = 0.003, 0.01
NOTHING = Frame(desk.FETCH | ANSWER, 0, 0)
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
        again: what questions to lost hosts had brought, by the argument of PUSH_AGAIN.
        under_way: the question without an answer, and the parts that it asks.
        not_before: the time of the next question, after one that the home had no memory for.
        pushed_at: when that to which copies have been added was sent last.
        anew: what that fetches is to be fetched again: all copies have gone meanwhile.
        refused: why the home has not taken what copies had been added, which is sent again now and then; 0: it has.
        lost: whether its host is.
    """

    host: int
    parts: deque[Part] = field(default_factory=deque)
    changed: deque[Keys] = field(default_factory=deque)
    begun: int = 0
    pushes: deque[tuple[Keys, Bytes]] = field(default_factory=deque)
    again: deque[tuple[int, Keys, Bytes]] = field(default_factory=deque)
    under_way: tuple[Frame, list[Part]] | None = None
    number: int = 0
    not_before: float = 0.0
    pushed_at: float = 0.0
    anew: bool = False
    refused: int = 0
    lost: bool = False

    @property
    def has_adds(self) -> bool:
        """Whether the home has not taken everything in that copies had been added."""
        return bool(self.changed or self.pushes or self.again or (self.under_way and self.under_way[0].pushed.size))

    def take_waiting(self) -> Way:
        """Returns a way with all that was waiting to be sent on this one, which has none of it any more."""
        taken = replace(self)
        self.parts, self.changed, self.pushes, self.again = deque(), deque(), deque(), deque()
        return taken


def end_part(part: Part, answer: Frame) -> None:
    """A part of a question is answered."""
    asking = part.asking
    if not asking.left:
        return
    asking.left -= 1
    asking.total += answer.argument
    if asking.took is not None:
        asking.took(answer, part.places)
    if not asking.left:
        asking.done(desk.DONE_WELL, asking.total, answer)


def fail(host: int, code: int, parts: Iterable[Part]) -> None:
    """Parts cannot be answered: the questions end so."""
    for part in parts:
        if part.asking.left:
            part.asking.left = 0
            part.asking.done(code, host, None)


def next_push(way: Way, copies: Copies, most: int, now: float) -> tuple[Keys, Bytes]:
    """Returns what the next question brings along, of ``most`` keys."""
    while way.pushes:
        keys, deltas = way.pushes.popleft()
        if keys.size > most:
            way.pushes.appendleft((keys[most:], deltas[most:]))
        if keys.size:
            return keys[:most], deltas[:most]
    waits = _TOGETHER_SECONDS if way.parts else _PUSH_SECONDS
    if now < way.pushed_at + waits and not (way.parts and way.parts[0].after > way.begun):
        return NO_KEYS, NO_BYTES
    way.pushed_at = now
    while way.changed:
        taken = copies.take(way.changed.popleft())
        way.begun += 1
        if taken[0].size:
            return taken
    return NO_KEYS, NO_BYTES


def next_parts(way: Way, copies: Copies, most: int) -> list[Part]:
    """Returns what the next question asks: some fetches together, or one of the others."""
    if not way.parts or way.pushes:
        return []
    first = way.parts[0]
    leaving = copies.leaving
    if first.after > way.begun or (leaving.size and (first.kind in OF_ALL or np.isin(first.keys, leaving).any())):
        return []  # what was added before, also to a copy that goes, comes first
    if first.kind != desk.FETCH:
        return [way.parts.popleft()]
    found: list[Part] = []
    size = 0
    while way.parts and way.parts[0].kind == desk.FETCH:
        part = way.parts[0]
        if part.waited:  # some of it may have come meanwhile
            part.keys, part.waited = part.keys[~copies.rows.has(part.keys)], False
            if not part.keys.size:
                end_part(way.parts.popleft(), NOTHING)
                continue
        is_too_much = size + part.keys.size > most
        if found and (is_too_much or (leaving.size and np.isin(part.keys, leaving).any())):
            break
        found.append(way.parts.popleft())
        size += part.keys.size
    return found or next_parts(way, copies, most)


def check_answer(question: Frame, answer: Frame, size: int) -> None:
    """Checks that an answer can be one to a question, in a table whose rows' values have that size.

    Raises:
        ProtocolError: it cannot.
    """
    if answer.kind == question.kind | ANSWER | FAILED:
        return
    asked = question.pushed.size + question.keys.size
    right = answer.kind == question.kind | ANSWER
    if question.kind in WITH_VALUES:
        right = right and answer.rows.shape == (asked, size)
    if question.kind in (desk.REMOVE, desk.CONTAINS):
        right = right and answer.keys.size == question.keys.size
    if not right:
        raise ProtocolError(f"an answer of kind {answer.kind} to a question of kind {question.kind}")
