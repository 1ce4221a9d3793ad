"""Batches and counters across hosts: what the coordinator's desk decides, and sessions on several hosts with it."""

from __future__ import annotations

import random
import threading
from collections import Counter
from typing import Any

import numpy as np
import pytest
from core_support import outcome, wait_for
from rehearsing import rehearsal

import multiverso as mv
from multiverso.errors import ClosedError, MultiversoError, TableMismatchError, WaitTimeoutError, WorkerLostError
from multiverso.hosts.control.dealing import MOST_AT_ONCE, Deals, Message
from multiverso.hosts.control.messages import Line
from multiverso.layout import words as at
from multiverso.runtime import Session
from multiverso.tables.batches import deal

WHAT = [23, 2, 0, 0]  # twelve batches


def line(worker: int, liveness: int = at.ALIVE, state: int = at.ACTIVE, process: int = 1) -> Line:
    return Line(worker, process, liveness, state)


class Model:
    """A worker as `tables/batches.py` plays it, a message at a time."""

    def __init__(self, worker: int) -> None:
        self.worker, self.turn, self.deal = worker, 0, 1
        self.hand: list[int] = []
        self.given = self.finished = 0
        self.worked: list[int] = []
        self.over = self.asked = False

    def question(self, continues: bool = True) -> Message:
        return {
            "about": "batches",
            "deal": self.deal,
            "what": WHAT,
            "ahead": 0,
            "finished": self.finished,
            "turn": self.turn + 1,
            "continues": continues,
        }

    def get(self, answer: Message) -> None:
        if "wait" in answer:
            return
        self.asked = False
        self.turn += 1
        self.over = "over" in answer
        self.hand = list(answer.get("batches", ()))
        self.given += len(self.hand)


@pytest.mark.parametrize("seed", range(200))
def test_each_batch_is_dealt_once_whoever_dies_leaves_or_asks_again(seed: int) -> None:
    """Whatever the order of messages: what a dead worker had not said that it is done with, and only that, again."""
    dice = random.Random(seed)
    deals, workers = Deals(), {i: Model(i) for i in range(4)}
    deals.note([line(i) for i in workers])
    live, doubled = set(workers), set[int]()

    def give(answers: Any) -> None:
        for worker, _, answer in answers:
            if worker in live:
                workers[worker].get(answer)

    for _ in range(2000):
        busy = [i for i in live if not workers[i].over]
        if not busy:
            break
        worker = workers[dice.choice(busy)]
        what = dice.random()
        if what < 0.02 and len(live) > 1:
            live.discard(worker.worker)
            doubled |= set(worker.worked[worker.finished :])  # done, and not yet said
            give(deals.note([line(worker.worker, at.LOST if what < 0.01 else at.GONE, at.LEFT)]))
        elif worker.hand:
            worker.worked.append(worker.hand.pop(0))
            if dice.random() < 0.7:
                worker.finished = len(worker.worked)
                give(deals.ask(worker.worker, 0, {"about": "finished", "deal": 1, "finished": worker.finished}))
        elif not worker.asked or dice.random() < 0.1:
            worker.finished = len(worker.worked)
            worker.asked = True
            give(deals.ask(worker.worker, 1, worker.question()))
    assert all(workers[i].over for i in live), "nobody waits for ever"
    counts = Counter(batch for worker in workers.values() for batch in worker.worked)
    assert set(counts) == set(range(12))
    assert {batch for batch, count in counts.items() if count > 1} <= doubled


def test_a_hand_is_smaller_towards_the_end_and_an_answer_that_got_lost_comes_again() -> None:
    deals, worker = Deals(), Model(0)
    deals.note([line(0), line(1)])
    sizes = []
    while not worker.over:
        question = {**worker.question(), "what": [500, 1, 0, 0]}
        ((_, _, answer),) = deals.ask(0, 1, question)
        assert deals.ask(0, 2, question) == [(0, 2, answer)]
        worker.get(answer)
        sizes.append(len(worker.hand))
        worker.finished = worker.given
    assert sum(sizes) == 500
    assert sizes == sorted(sizes, reverse=True)
    assert (sizes[0], sizes[-2]) == (MOST_AT_ONCE, 1)


def test_questions_that_make_no_sense_change_nothing() -> None:
    desk = Deals()
    for bad in (
        {},
        {"about": "x"},
        {"about": "count", "name": "a"},
        {"about": "count", "name": "a" * 999, "amount": 1},
    ):
        assert "cannot be understood" in desk.ask(0, 1, bad)[0][2]["error"]
    for name, value in (("what", [1, 0, 0, 0]), ("what", [1]), ("deal", -1), ("finished", "x"), ("turn", None)):
        assert "cannot be understood" in desk.ask(0, 1, {**Model(0).question(), name: value})[0][2]["error"]
    assert desk.ask(0, 1, {"about": "count", "name": "a", "amount": 2}) == [(0, 1, {"before": 0})]
    assert desk.ask(0, 2, {"about": "count", "name": "a", "amount": (1 << 63) - 2}) == [(0, 2, {"overflow": 2})]


# -- sessions ------------------------------------------------------------------------------------------------


def test_each_sample_is_dealt_once_and_each_number_of_a_counter() -> None:
    def work(session: Session) -> Any:
        counter = mv.Counter("tickets", session=session)
        tickets = [counter.fetch_add(2) for _ in range(50)]
        epochs = [[int(row) for rows in deal(session, n, 7, seed=3) for row in rows] for n in (400, 0, 3)]
        ahead = [int(row) for rows in deal(session, 50, 3, ahead=2) for row in rows]
        session.barrier()
        assert counter.value == 100 * session.workers_num
        assert repr(counter) == "<Counter 'tickets', kept by the first host>"
        with pytest.raises(OverflowError, match=r"400 \+ 9223372036854775807 does not fit"):
            counter.fetch_add((1 << 63) - 1)
        return tickets, epochs, ahead, counter

    with rehearsal(2, 1, 1) as job:
        parts = job.run(work)
    assert sorted(number for tickets, *_ in parts for number in tickets) == list(range(0, 400, 2))
    for epoch, n in enumerate((400, 0, 3)):
        assert sorted(row for _, epochs, *_ in parts for row in epochs[epoch]) == list(range(n))
    assert sorted(row for part in parts for row in part[2]) == list(range(50))
    with pytest.raises(ClosedError):
        parts[0][3].fetch_add()


def test_a_lost_workers_batch_is_dealt_again_on_another_host_or_is_an_error() -> None:
    for on_lost in ("continue", "stop"):
        has_some, told = threading.Event(), threading.Barrier(2)
        loops: list[Any] = []

        def work(session: Session, has_some: Any = has_some, told: Any = told, loops: Any = loops) -> Any:
            if session.worker_id:
                loops.append(deal(session, 30, 1))
                got = [next(loops[0]), next(loops[0]), next(loops[0])]
                job.lose(1)  # in its third batch
                has_some.set()
            else:
                assert has_some.wait(30)
                got = outcome(lambda: list(deal(session, 30, 1)))
            told.wait(30)
            return got

        with rehearsal(1, 1, on_lost=on_lost) as job:
            first, dead = job.run(work)
        if on_lost == "continue":
            assert sorted(int(row) for rows in (*first, *dead[:2]) for row in rows) == list(range(30))
        else:
            assert isinstance(first, WorkerLostError)
            assert "worker 1 (pid" in str(first)
            assert "on host-1) died" in str(first)
            assert first.worker_ids == (1,)


def test_the_end_waits_for_another_hosts_batch_and_says_so() -> None:
    has_one, waited = threading.Event(), threading.Event()

    def work(session: Session) -> Any:
        if session.worker_id == 0:
            loop = deal(session, 4, 2)
            rows = [next(loop)]
            has_one.set()
            assert waited.wait(30)
            return [*rows, *loop]
        assert has_one.wait(30)
        wrong = outcome(lambda: list(deal(session, 5, 2)))
        late = outcome(lambda: list(deal(session, 4, 2, timeout_seconds=3.0)))
        waited.set()
        return wrong, late

    with rehearsal(1, 1) as job:
        rows, (wrong, late) = job.run(work)
    assert isinstance(wrong, TableMismatchError)
    assert "(n, size, seed, epoch) = (4, 2, 0, 0), this worker asks for (5, 2, 0, 0)" in str(wrong)
    assert isinstance(late, WaitTimeoutError)
    assert "missing worker 0" in str(late)
    assert "the end of an epoch's last batches, which needs worker 0" in str(late)
    assert 1 <= len(rows) <= 2


def test_who_leaves_the_loop_gives_back_what_it_has_not_begun() -> None:
    left = threading.Event()

    def work(session: Session) -> list[int]:
        if session.worker_id:
            assert left.wait(30)
            return [int(row) for rows in deal(session, 90, 1) for row in rows]
        mine = []
        for rows in deal(session, 90, 1):
            mine = [int(row) for row in rows]
            break
        left.set()
        return mine

    with rehearsal(1, 1) as job:
        one, other = job.run(work)
    assert len(one) == 1
    assert sorted(one + other) == list(range(90))


def test_a_question_nobody_can_answer_is_the_workers_own_error() -> None:
    def work(session: Session) -> str:
        error = outcome(lambda: session.node.ask_hosts({"about": "weather"}, session.start_deadline(), "the weather"))
        assert isinstance(error, MultiversoError)
        assert mv.Counter("c", session=session).fetch_add(np.int64(session.worker_id)) >= 0
        return str(error)

    with rehearsal(1, 1) as job:
        assert all("the weather: the question cannot be understood" in text for text in job.run(work))
        wait_for(lambda: not any(node.live_workers() for node in job.nodes))


def test_a_new_worker_with_the_old_ones_process_id_is_a_new_worker() -> None:
    """In containers all have the same few: what the dead one had is dealt again, though its number is live."""
    deals, first, second = Deals(), Model(0), Model(1)
    deals.note([line(0), line(1)])
    for worker, _, answer in [*deals.ask(0, 1, first.question()), *deals.ask(1, 1, second.question())]:
        (first, second)[worker].get(answer)
    held = list(second.hand)
    deals.note([line(1, at.LOST)])
    deals.note([line(1)])
    worked: list[int] = []
    while not first.over:
        worked += first.hand
        first.finished = first.given
        answers = deals.ask(0, first.turn + 2, first.question())
        assert answers, f"it waits, and has {worked}"
        for _, _, answer in answers:
            first.get(answer)
    assert sorted(worked) == list(range(12))
    assert held
