"""Deals batches to the workers of all hosts, and counts for them: what the coordinator keeps instead of shared memory.

The rules are those of `multiverso.tables.batches` on one host; here they are a state machine that gets what workers
ask and say, and who is there. A worker is given several batches at a time, fewer towards the end, so that it
seldom has to ask. It says when it is done with each, without waiting for an answer, and what it has not said so of
is dealt again when it dies.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from multiverso.hosts.control.messages import Line
from multiverso.layout import words as at

Message = dict[str, Any]
AnswerTo = tuple[int, int, Message]
"""A worker's number, the number of its question, and the answer."""

_UNKNOWN = Line(-1)
MOST_AT_ONCE = 8
_LOWEST, _HIGHEST = -(1 << 63), (1 << 63) - 1
_MOST_COUNTERS = 100_000
_PARTS = 4  # a worker is given at most its share of what is left, divided by this: so one slow hand ends soon enough
_Size = Annotated[int, Meta(ge=0, le=1 << 62)]


class Count(Struct, frozen=True, tag_field="about", tag="count"):
    """A worker adds to a counter and asks what it was before."""

    name: Annotated[str, Meta(max_length=200)]
    amount: int


class Batches(Struct, frozen=True, tag_field="about", tag="batches"):
    """A worker asks for batches of a deal.

    Attributes:
        deal: its number, from 1.
        what: samples, size, seed, epoch.
        ahead: whether it asks before it is done with what it has.
        finished: with how many of the batches that it was given in this deal the worker is done.
        turn: counts its questions; the same one again gets the same answer.
        continues: whether the others continue when a worker dies.
    """

    deal: _Size
    what: tuple[_Size, Annotated[int, Meta(ge=1, le=1 << 62)], _Size, _Size]
    ahead: _Size
    finished: _Size
    turn: _Size
    continues: bool


class Finished(Struct, frozen=True, tag_field="about", tag="finished"):
    """A worker is done with batches, or leaves its loop.

    Attributes:
        deal: its number.
        finished: as above.
        left: the last deal that it is done with; None: it stays.
        begun: how many batches it has begun when it leaves: others get the rest.
        kept: whether its last ones may yet be worked on.
    """

    deal: _Size
    finished: _Size
    left: _Size | None = None
    begun: _Size = 0
    kept: bool = False


@dataclass
class _Hand:
    """What a worker of one process has been given in its last deal, and how much of that it is done with."""

    process: int
    begun: int = 0
    done: int = 0
    given: list[int] = field(default_factory=list)
    finished: int = 0
    turn: int = 0
    answer: Message = field(default_factory=dict)

    @property
    def out(self) -> list[int]:
        """The batches that it works on, or has not begun."""
        return self.given[self.finished :]


@dataclass(frozen=True)
class _Asked:
    """A question that waits for its answer."""

    number: int
    question: Batches
    waits_for: tuple[int, ...] = ()


class Desk:
    """Counts, and deals. Owner: the coordinator, one call at a time.

    An answer to a question for batches has ``batches``; or ``over``; ``wait``: for whom, and another answer follows;
    ``differs``: what the others asked for; ``lost``: the worker that died with a batch.
    """

    def __init__(self) -> None:
        self._counters: dict[str, int] = {}
        self._number = 0  # of the deal
        self._what: tuple[int, ...] = ()
        self._batches = self._next = 0
        self._returned: list[int] = []  # to be dealt again, before those that no worker has had
        self._hands: dict[int, _Hand] = {}
        self._asked: dict[int, _Asked] = {}
        self._workers: dict[int, Line] = {}

    def ask(self, worker: int, number: int, question: Message) -> list[AnswerTo]:
        """A worker asks or says something; the answers may be to others, too, and its own may come later.

        Nonsense is its own mistake, and no reason to end its host's connection.
        """
        try:
            asked = msgspec.convert(question, Count | Batches | Finished)
        except msgspec.ValidationError as error:
            return [(worker, number, {"error": f"the question cannot be understood: {error}"})]
        if isinstance(asked, Count):
            return [(worker, number, self._count(asked.name, asked.amount))]
        if isinstance(asked, Finished):
            return self._finished(worker, asked)
        hand = self._hand(worker)
        if hand.begun == asked.deal and hand.turn == asked.turn and hand.answer:
            return [(worker, number, hand.answer)]  # it was interrupted before it had this
        self._note_finished(worker, asked.deal, asked.finished)
        self._asked[worker] = _Asked(number, asked)
        return self._look()

    def _finished(self, worker: int, said: Finished) -> list[AnswerTo]:
        """A worker is done with batches, or leaves its loop."""
        self._note_finished(worker, said.deal, said.finished)
        if said.left is not None:
            self._asked.pop(worker, None)
            hand = self._hand(worker)
            hand.answer = {}
            if hand.begun == said.deal == self._number:
                begun = max(hand.finished, said.begun)
                self._returned += hand.given[begun:]
                del hand.given[begun:]
                if not said.kept:
                    hand.finished = len(hand.given)
            hand.done = max(hand.done, said.left)
        return self._look()

    def note(self, lines: Iterable[Line]) -> list[AnswerTo]:
        """Workers have come, left or died."""
        for line in lines:
            worker = line.worker_id
            hand, was = self._hands.get(worker), self._workers.get(worker, _UNKNOWN).liveness
            is_new = hand is not None and (hand.process != line.pid or was in (at.LOST, at.GONE))
            if hand is not None and is_new and line.liveness == at.ALIVE:
                if hand.begun == self._number:  # what the last process of this number was given
                    self._returned += hand.out
                del self._hands[worker]
            self._workers[worker] = copy(line)  # it changes when its host is lost
            if not line.is_live:
                self._asked.pop(worker, None)
        return self._look() if self._asked else []

    # -- the rules -------------------------------------------------------------------------------------------

    def _hand(self, worker: int) -> _Hand:
        return self._hands.setdefault(worker, _Hand(self._workers.get(worker, _UNKNOWN).pid))

    def _note_finished(self, worker: int, deal: int, finished: int) -> None:
        hand = self._hand(worker)
        if hand.begun == deal:
            hand.finished = max(hand.finished, min(finished, len(hand.given)))

    def _is_live(self, worker: int) -> bool:
        return self._workers.get(worker, _UNKNOWN).is_live

    def _look(self) -> list[AnswerTo]:
        """Answers the workers that can be answered; names to the others whom they wait for, when that has changed."""
        answers: list[AnswerTo] = []
        again = True
        while again:
            again = False
            for worker, asked in sorted(self._asked.items()):
                answer = self._answer(worker, asked.question)
                if isinstance(answer, dict):
                    del self._asked[worker]
                    hand = self._hand(worker)
                    hand.turn, hand.answer = asked.question.turn, answer
                    answers.append((worker, asked.number, answer))
                    again = True  # what one is given or begins may be what another waits for
                elif tuple(answer) != asked.waits_for:
                    self._asked[worker] = _Asked(asked.number, asked.question, tuple(answer))
                    answers.append((worker, asked.number, {"wait": answer}))
        return answers

    def _answer(self, worker: int, question: Batches) -> Message | list[int]:
        """Returns a worker's answer, or for whom it has to wait."""
        deal, what, hand = question.deal, question.what, self._hand(worker)
        if deal < self._number:  # it came late: the others have continued
            hand.begun, hand.done, hand.given, hand.finished = deal, deal - 1, [], 0
            return {"over": True}
        if deal > self._number:
            live = [i for i in self._hands if self._is_live(i) and self._hands[i].begun]
            behind = [i for i in live if i != worker and self._hands[i].done < deal - 1]
            if behind:
                return behind
            self._number, self._what = deal, what
            self._batches, self._next, self._returned = -(-what[0] // what[1]), 0, []
        elif what != self._what:
            return {"differs": list(self._what)}
        if hand.begun != deal:
            hand.begun, hand.done, hand.given, hand.finished = deal, deal - 1, [], 0
        return self._deal(hand) or self._at_the_end(worker, question)

    def _deal(self, hand: _Hand) -> Message:
        """Gives a worker batches; returns nothing where there are none left."""
        if self._returned:
            batches = [self._returned.pop(0)]
        else:
            left = self._batches - self._next
            workers = max(1, sum(self._is_live(i) for i in self._workers))
            count = min(left, max(1, min(MOST_AT_ONCE, left // (_PARTS * workers))))
            batches = list(range(self._next, self._next + count))
            self._next += count
        hand.given += batches
        return {"batches": batches} if batches else {}

    def _at_the_end(self, worker: int, question: Batches) -> Message | list[int]:
        """All have been dealt. Batches of workers that are gone are dealt again; the end waits for those in work."""
        works = []
        for other, hand in sorted(self._hands.items()):
            if other == worker or hand.begun != self._number or not hand.out:
                continue
            if self._is_live(other):
                if hand.done < self._number:
                    works.append(other)
                continue
            lost = self._workers[other].liveness == at.LOST
            if hand.done >= self._number and not lost:
                continue  # what it had taken ahead it has worked on before it left
            if lost and not question.continues:
                return {"lost": other}
            self._returned += hand.out
            del hand.given[hand.finished :]
        dealt = self._deal(self._hand(worker))
        if works and not question.ahead:
            return dealt or works
        return dealt or {"over": True}

    def _count(self, name: str, amount: int) -> Message:
        before = self._counters.get(name, 0)
        if not _LOWEST <= before + amount <= _HIGHEST:
            return {"overflow": before}
        if name not in self._counters and len(self._counters) >= _MOST_COUNTERS:
            return {"error": f"there are {_MOST_COUNTERS} counters, and no more may be"}
        self._counters[name] = before + amount
        return {"before": before}
