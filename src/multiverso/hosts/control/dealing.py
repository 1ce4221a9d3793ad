"""Deals batches to the workers of a job, and counts for those of several hosts.

`Deal` has the rules: a state machine that gets what workers ask and say, and who is there. On one host it stands in
shared memory (`multiverso.tables.batches`). Between hosts the coordinator keeps it (`Deals`), and a worker is given
several batches at a time, fewer towards the end, so that it seldom has to ask. It says when it is done with each,
without waiting for an answer, and what it has not said so of is dealt again when it dies.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass
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


class Hand(Struct):
    """The batches that one worker's process has been given in its last deal.

    Attributes:
        process: which one.
        begun: the last deal that it began.
        done: the last one that it is done with.
        given: the batches that it works on, or has not begun.
        finished: how many it was given before these.
        turn, answer: its last question that was answered.
    """

    process: int
    begun: int = 0
    done: int = 0
    given: list[int] = []
    finished: int = 0
    turn: int = 0
    answer: Message = {}

    def finish(self, number: int) -> None:
        """Notes that the worker has finished this many batches of the deal."""
        done = max(0, min(number - self.finished, len(self.given)))
        del self.given[:done]
        self.finished += done


class Deal(Struct):
    """An epoch's batches, and which worker has which.

    An answer to a question for batches has ``batches``; or ``over``; ``differs``: what the others asked for; or
    ``lost``: the worker that died with a batch.

    Attributes:
        number: of the deal, from 1.
        what: samples, size, seed, epoch.
        batches, following: how many there are, and the next one that no worker has had.
        returned: to be dealt again, before that.
        hands, workers: by the workers' numbers.
    """

    number: int = 0
    what: tuple[int, ...] = ()
    batches: int = 0
    following: int = 0
    returned: list[int] = []
    hands: dict[int, Hand] = {}
    workers: dict[int, Line] = {}

    def is_plain(self, worker: int, process: int, question: Batches) -> bool:
        """Whether a process that has begun this deal will be given a batch, whoever else is there."""
        hand = self.hands.get(worker)
        known = hand is not None and hand.process == process and hand.begun == question.deal == self.number
        return known and bool(self.returned or self.following < self.batches)

    def note(self, lines: Iterable[Line]) -> None:
        """Workers have come, left or died."""
        for line in lines:
            worker = line.worker_id
            hand, was = self.hands.get(worker), self.workers.get(worker, _UNKNOWN).liveness
            is_new = hand is not None and (hand.process != line.pid or was in (at.LOST, at.GONE))
            if hand is not None and is_new and line.liveness == at.ALIVE:
                if hand.begun == self.number:  # what the last process of this number was given
                    self.returned += hand.given
                del self.hands[worker]
            self.workers[worker] = copy(line)  # it changes when its host is lost

    def finish(self, worker: int, said: Finished) -> None:
        """A worker is done with batches, or leaves its loop."""
        hand = self._note_finished(worker, said.deal, said.finished)
        if said.left is not None:
            hand.answer = {}
            if hand.begun == said.deal == self.number:
                begun = max(0, said.begun - hand.finished)
                self.returned += hand.given[begun:]
                del hand.given[begun:]
                if not said.kept:
                    hand.finish(said.begun)
            hand.done = max(hand.done, said.left)

    def answer(self, worker: int, question: Batches, most: int) -> Message | list[int]:
        """Returns a worker's answer, with so many batches at most; or for whom it has to wait."""
        hand = self._hand(worker)
        if hand.begun == question.deal and hand.turn == question.turn and hand.answer:
            return hand.answer  # it was interrupted before it had this
        self._note_finished(worker, question.deal, question.finished)
        answer = self._answer(worker, question, most)
        if isinstance(answer, dict):
            hand.turn, hand.answer = question.turn, answer
        return answer

    def _hand(self, worker: int) -> Hand:
        return self.hands.setdefault(worker, Hand(self.workers.get(worker, _UNKNOWN).pid))

    def _note_finished(self, worker: int, deal: int, finished: int) -> Hand:
        hand = self._hand(worker)
        if hand.begun == deal:
            hand.finish(finished)
        return hand

    def _is_live(self, worker: int) -> bool:
        return self.workers.get(worker, _UNKNOWN).is_live

    def _answer(self, worker: int, question: Batches, most: int) -> Message | list[int]:
        deal, what, hand = question.deal, question.what, self._hand(worker)
        if deal > self.number:
            live = [i for i in self.hands if self._is_live(i) and self.hands[i].begun]
            behind = [i for i in live if i != worker and self.hands[i].done < deal - 1]
            if behind:
                return behind
            self.number, self.what = deal, what
            self.batches, self.following, self.returned = -(-what[0] // what[1]), 0, []
        elif deal == self.number and what != self.what:
            return {"differs": list(self.what)}
        if deal < self.number or hand.begun != deal:
            hand.begun, hand.done, hand.given, hand.finished = deal, deal - 1, [], 0
        if deal < self.number:  # it came late: the others have continued
            return {"over": True}
        return self._deal(hand, most) or self._at_the_end(worker, question, most)

    def _deal(self, hand: Hand, most: int) -> Message:
        """Gives a worker batches; returns nothing where there are none left."""
        if self.returned:
            batches = [self.returned.pop(0)]
        else:
            left = self.batches - self.following
            workers = max(1, sum(self._is_live(i) for i in self.workers))
            count = min(left, max(1, min(most, left // (_PARTS * workers))))
            batches = list(range(self.following, self.following + count))
            self.following += count
        hand.given += batches
        return {"batches": batches} if batches else {}

    def _at_the_end(self, worker: int, question: Batches, most: int) -> Message | list[int]:
        """Answers once all batches are dealt: deals those of gone workers again, and waits for those in work."""
        works = []
        for other, hand in sorted(self.hands.items()):
            if other == worker or hand.begun != self.number or not hand.given:
                continue
            if self._is_live(other):
                if hand.done < self.number:
                    works.append(other)
                continue
            lost = self.workers[other].liveness == at.LOST
            if hand.done >= self.number and not lost:
                continue  # what it had taken ahead it has worked on before it left
            if lost and not question.continues:
                return {"lost": other}
            self.returned += hand.given
            hand.given = []
        dealt = self._deal(self._hand(worker), most)
        if works and not question.ahead:
            return dealt or works
        return dealt or {"over": True}


@dataclass(frozen=True)
class _Asked:
    """A question that waits for its answer."""

    number: int
    question: Batches
    waits_for: tuple[int, ...] = ()


class Deals:
    """Counts, and deals. Owner: the coordinator, one call at a time.

    Where a question has to wait, an answer has ``wait``: for whom, and another answer follows.
    """

    def __init__(self) -> None:
        self._counters: dict[str, int] = {}
        self._deal = Deal()
        self._asked: dict[int, _Asked] = {}

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
        if isinstance(asked, Batches):
            self._asked[worker] = _Asked(number, asked)
        else:
            self._deal.finish(worker, asked)
            if asked.left is not None:
                self._asked.pop(worker, None)
        return self._look()

    def note(self, lines: Iterable[Line]) -> list[AnswerTo]:
        """Workers have come, left or died."""
        lines = list(lines)
        self._deal.note(lines)
        for line in lines:
            if not line.is_live:
                self._asked.pop(line.worker_id, None)
        return self._look() if self._asked else []

    def _look(self) -> list[AnswerTo]:
        """Answers the workers that can be answered; names to the others whom they wait for, when that has changed."""
        answers: list[AnswerTo] = []
        again = True
        while again:
            again = False
            for worker, asked in sorted(self._asked.items()):
                answer = self._deal.answer(worker, asked.question, MOST_AT_ONCE)
                if isinstance(answer, dict):
                    del self._asked[worker]
                    answers.append((worker, asked.number, answer))
                    again = True  # what one is given or begins may be what another waits for
                elif tuple(answer) != asked.waits_for:
                    self._asked[worker] = _Asked(asked.number, asked.question, tuple(answer))
                    answers.append((worker, asked.number, {"wait": answer}))
        return answers

    def _count(self, name: str, amount: int) -> Message:
        before = self._counters.get(name, 0)
        if not _LOWEST <= before + amount <= _HIGHEST:
            return {"overflow": before}
        if name not in self._counters and len(self._counters) >= _MOST_COUNTERS:
            return {"error": f"there are {_MOST_COUNTERS} counters, and no more may be"}
        self._counters[name] = before + amount
        return {"before": before}
