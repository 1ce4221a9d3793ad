"""Rounds with a quorum on several hosts: the bits of rounds where all are on time, and nobody waits for who is late."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import core_support
import numpy as np
import pytest
from core_support import Worker, bits, in_threads, let_die, outcome, wait_for
from rehearsing import rehearsal
from test_quorum import LOOP, calls, rounds_of, with_a_late_one_elsewhere
from test_replacing_hosts import all_do, anew, lose
from test_rounds_on_hosts import on_one_host

import multiverso as mv
from multiverso.errors import NotInThisJobError, WorkerLostError
from multiverso.layout import words as at
from multiverso.runtime import Session
from multiverso.runtime.node import numbers
from multiverso.tables.save_all import load_all, save_all
from multiverso.updaters import Updater, adam, momentum


@pytest.fixture(scope="module")
def interpreter(interpreters: Callable[[str], Any]) -> Iterator[None]:
    """What `core_support.Worker` is forked from."""
    core_support.interpreters.append(interpreters("multiverso"))
    yield
    core_support.interpreters.pop()


QUORUM: dict[str, Any] = {"sync": True, "quorum": 1, "grace_seconds": 1000}


def delta(worker: int, number: int, size: int) -> Any:
    return np.random.default_rng([worker, number]).standard_normal(size).astype("f4")


def training(session: Session) -> list[Any]:
    """Every kind of round; returns all that was read."""
    me, size = session.worker_id, 300_000
    array = mv.ArrayTableHandler(size, delta(9, 0, size), session=session)  # three chunks
    updated = mv.ArrayTableHandler(140_000, updater=adam(count_per="table"), session=session)
    mean = mv.MatrixTableHandler(40, 9, updater="mean", session=session)
    local, last, read = np.zeros(size, "f4"), np.zeros(size, "f4"), []
    for number in range(4):
        if number != me:
            array.add(delta(me, number, size))
        read.append(bits(array.get()))
        local += delta(me, 10 + number, size)
        array.exchange(local, last)
        read.append(bits(local))
        updated.add(delta(me, 20 + number, updated.size))
        read.append(bits(updated.get()))
        mean.add(delta(me, 30 + number, 45), row_ids=[3, 1, 4, 15, 9])
        read.append(bits(mean.get(row_ids=[9, 2, 4])))
        session.barrier()
    return [*read, array.version, bits(array.snapshot())]


def test_with_all_on_time_the_bits_are_those_of_rounds() -> None:
    alone = on_one_host(4, training, sync=True)
    with rehearsal(2, 1, 1) as job:
        assert job.run(training, **QUORUM) == alone


RULES = [mv.rules.model_averaging(), mv.rules.easgd(0.3), mv.rules.local_sgd(), None]


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_rules_have_the_bits_of_rounds(rule: Any) -> None:
    def work(session: Session) -> list[bytes]:
        local, seen = delta(session.worker_id, 0, 200), []
        shared = mv.rules.share(local, rule, session=session)
        for number in range(4):
            local += delta(session.worker_id, number, 200)
            shared.exchange(local)
            seen.append(bits(local))
        session.barrier()
        return seen

    with rehearsal(2, 1) as job:
        expected = job.run(work, sync=True)
    with rehearsal(2, 1) as job:
        assert job.run(work, **QUORUM) == expected


def test_who_comes_late_is_in_the_next_round_once() -> None:
    """A host whose only worker is late holds up nobody, and neither does a worker beside one that is on time."""
    held, rounds = threading.Event(), 20

    def work(session: Session) -> Any:
        table = mv.ArrayTableHandler(3, session=session)
        local = table.snapshot()
        last = local.copy()
        session.barrier()
        if session.worker_id in (1, 3):
            assert held.wait(30)
        for number in range(rounds):
            local += 1
            table.exchange(local, last)
            if session.worker_id == 0 and number == rounds // 2:
                held.set()
        read = local.tolist()
        session.barrier()
        return read, table.snapshot().tolist(), session.statistics()["tables"][1]["late"]

    with rehearsal(2, 1, 1) as job:
        results = job.run(work, sync=True, quorum=2)
    assert [final for _, final, _ in results] == [[80.0] * 3] * 4, "each add is in once"
    assert all(late for *_, late in results[1::2]), results


def test_who_waits_in_a_barrier_is_not_waited_for_and_is_after_it() -> None:
    def work(session: Session) -> Any:
        table, seen = mv.ArrayTableHandler(1, session=session), []
        for turn in range(5):
            for _ in range(1 + 3 * (session.worker_id == turn % 3)):
                table.add([1.0])
                table.get()
            session.barrier()
            seen.append((table.snapshot()[0], table.version))
            session.barrier()
        return seen

    with rehearsal(1, 1, 1) as job:
        results = job.run(work, sync=True, quorum=3)
    assert results == [[(6.0 * turn, 4 * turn) for turn in range(1, 6)]] * 3


def test_a_barrier_waits_for_values_that_are_on_their_way_to_hosts_whose_workers_were_in_it() -> None:
    def work(session: Session) -> Any:
        table = mv.ArrayTableHandler(1, session=session)
        for _ in range(1 + 3 * (session.worker_id == 2)):
            table.add([1.0])
            table.get()
        session.barrier()
        return table.snapshot()[0], table.version

    def late(take: Any, *arguments: Any) -> None:
        time.sleep(0.1)
        take(*arguments)

    with rehearsal(1, 1, 1) as job:
        rounds = job.nodes[0].hosts.fabric.rounds  # type: ignore[attr-defined]
        rounds.take = partial(late, rounds.take)
        assert job.run(work, sync=True, quorum=3) == [(6.0, 4)] * 3


def test_a_mean_is_over_those_that_came_and_a_rate_is_that_of_the_first_host() -> None:
    held = threading.Event()

    def work(session: Session) -> Any:
        mean = mv.ArrayTableHandler(2, updater="mean", session=session)
        moved = mv.ArrayTableHandler(2, updater=momentum(1.0, 0.5), session=session)
        moved.learning_rate = 1.0 + session.worker_id
        session.barrier()
        if session.worker_id == 2:
            assert held.wait(30)
        for table in (mean, moved):
            table.add([session.worker_id + 1.0] * 2)
            table.get()
            if session.worker_id == 0 and table is moved:
                held.set()
        session.barrier()
        return [table.snapshot().tolist() for table in (mean, moved)]

    with rehearsal(1, 1, 1) as job:
        first, *others = job.run(work, sync=True, quorum=2)
    assert others == [first] * 2
    assert first[0] == [1.5 + 3] * 2


def test_what_is_set_or_loaded_between_barriers_is_everybodys(tmp_path: Path) -> None:
    def work(session: Session) -> Any:
        table = mv.ArrayTableHandler(300_000, session=session)
        moved = mv.ArrayTableHandler(4, updater="momentum", session=session)

        def go_on() -> list[bytes]:
            seen = []
            for one in (table, moved):
                one.add(np.full(one.size, 1.0 + session.worker_id))
                seen += [bits(one.get()), bits(one.get())]
                session.barrier()
            return seen

        go_on()
        if session.worker_id == 1:
            table.set(np.arange(table.size))
            moved.set(np.full(4, 7.0))
        session.barrier()
        assert moved.snapshot().tolist() == [7.0] * 4
        assert (table.snapshot() == np.arange(table.size)).all()
        session.barrier()
        if session.worker_id == 2:
            save_all(session, tmp_path)
        session.barrier()
        first = go_on()
        load_all(session, tmp_path)
        session.barrier()
        assert go_on() == first
        return first

    with rehearsal(1, 2) as job:
        one, *others = job.run(work, **QUORUM)
    assert others == [one] * 2


@pytest.mark.parametrize("seed", range(2))
def test_a_replay_has_the_same_bits_whatever_the_timing(seed: int, tmp_path: Path) -> None:
    def program(session: Session, delays: random.Random) -> Any:
        table = mv.ArrayTableHandler(50, delta(9, 0, 50), session=session)
        seen = calls(session, table, 12, lambda: time.sleep(delays.random() * 0.004))
        session.barrier()
        if session.worker_id == 1:
            table.add(delta(1, 99, 50))  # it leaves an add
        elif session.worker_id == 2:
            seen += [bits(table.get()), bits(table.get())]
        return seen

    def run(number: int, **more: Any) -> Any:
        with rehearsal(2, 1, 1) as job:
            return job.run(
                lambda session: program(session, random.Random(100 * number + session.worker_id)),
                sync=True,
                quorum=2,
                **more,
            )

    first = run(seed, record=tmp_path / "a")
    assert run(seed + 50, record=tmp_path / "b", replay=tmp_path / "a") == first
    for path in (tmp_path / "a").iterdir():
        assert path.read_text() == (tmp_path / "b" / path.name).read_text()


def test_the_others_go_on_without_a_lost_host_with_the_same_bits() -> None:
    size, last = 300_000, 30
    with rehearsal(1, 1, 1, on_lost="continue") as job:

        def work(worker_id: int) -> Any:
            with job.session(worker_id, sync=True, quorum=2) as session:
                table, seen = mv.ArrayTableHandler(size, session=session), {}
                while table.version < last:
                    if worker_id == 1 and table.version >= 5:
                        job.nodes[1].close()
                        return None
                    table.add(delta(worker_id, table.version, size))
                    values = bits(table.get())
                    seen[int(table._how._progress[at.ROUND_READ])] = values  # type: ignore[attr-defined]
                session.barrier()
                return seen, bits(table.snapshot())

        first, gone, third = in_threads([lambda i=i: work(i) for i in range(3)])  # type: ignore[misc]
    assert gone is None
    assert first[1] == third[1]
    both = first[0].keys() & third[0].keys()
    assert len(both) > last // 2
    assert all(first[0][number] == third[0][number] for number in both)


@pytest.mark.parametrize("places", [(2, 2), (1, 1, 1, 1)], ids=str)
def test_who_waits_late_at_another_table_is_not_waited_for(places: tuple[int, ...]) -> None:
    met = threading.Barrier(4)
    options: dict[str, Any] = {"sync": True, "quorum": 3, "on_lost": "continue"}
    with rehearsal(*places, on_lost="continue") as job:

        def work(worker_id: int) -> Any:
            with job.session(worker_id, **options) as session:
                return with_a_late_one_elsewhere(session, met, let_die)

        results = in_threads([lambda i=i: work(i) for i in range(4)])  # type: ignore[misc]
    assert results == [(3.0, 6.0, 3.0), (3.0, 6.0, 3.0), None, (6.0, 6.0, 3.0)]


def test_a_lost_worker_ends_the_rounds_of_all_hosts() -> None:
    told, passed = (threading.Event(), threading.Event()), threading.Barrier(3)
    with rehearsal(1, 1, 1) as job:

        def work(worker_id: int) -> Any:
            with job.session(worker_id, sync=True, quorum=3) as session:
                table = mv.ArrayTableHandler(3, session=session)
                table.get()
                passed.wait(30)  # a host that has not got the round yet would hear of the death in it
                if worker_id == 1:
                    let_die(session)
                    assert all(event.wait(30) for event in told)
                    return None
                error = outcome(table.get)
                told[worker_id // 2].set()
                return error

        first, _, third = in_threads([lambda i=i: work(i) for i in range(3)])  # type: ignore[misc]
    for error in (first, third):
        assert isinstance(error, WorkerLostError)
        assert error.worker_ids == (1,)


@pytest.mark.parametrize("updater", ["add", "momentum"])
def test_workers_of_a_host_that_came_again_are_in_the_rounds_that_follow(updater: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(numbers, "has_ended", lambda pid: True)
    size, options = 300_000, {"sync": True, "quorum": 3, "grace_seconds": 1000}
    with rehearsal(1, 1, 1, on_lost="continue", replaces=True) as job, ExitStack() as stack:
        sessions = dict(enumerate(in_threads([lambda i=i: job.session(i, **options) for i in range(3)])))
        tables: dict[int, Any] = {}
        goal = 0

        def open_table(session: Session) -> None:
            tables[session.worker_id] = mv.ArrayTableHandler(size, updater=updater, name="t", session=session)

        def rounds(session: Session) -> dict[int, bytes]:
            table, seen = tables[session.worker_id], {}
            while table.version < goal:
                table.add(delta(session.worker_id, table.version, size))
                values = bits(table.get())
                seen[table._how._progress[at.ROUND_READ]] = values
            return seen

        def all_go_on() -> None:
            """A worker that has just opened the table may be in the second round from then on."""
            nonlocal goal
            goal += 4
            seen = all_do(sessions, rounds)
            every = [one[goal] for one in seen]
            assert every[1:] == every[:-1], "all have the same bits"

        all_do(sessions, open_table)
        for dead in (1, 2):
            all_go_on()
            lose(job, dead, sessions)
            all_go_on()
            stack.enter_context(anew(job, dead))
            all_go_on()  # a mere relay so far
            sessions[dead] = job.session(dead, **options)
            open_table(sessions[dead])
            all_go_on()
        all_do(sessions, lambda session: session.shutdown())


@pytest.mark.usefixtures("interpreter")
def test_stopped_workers_stop_nobody_and_are_in_again_when_they_continue() -> None:
    """On the first host and on the last, one after another, and all of a host at once."""
    rounds, drawn = 300, random.Random(3)
    text = LOOP.replace("SIZE", "1000").replace("ROUNDS", str(rounds))
    with rehearsal(2, 1, 1, on_lost="continue") as job:
        members = [Worker(job.nodes[job.roster.host_of(i)], i, text) for i in range(4)]
        with members[0], members[1], members[2], members[3]:
            for worker in members:
                assert worker.hear() == ["ready"]
            while rounds_of(job.nodes[0]) < rounds * 0.8:
                stopped = drawn.choice([members[:2], members[2:3], members[3:], members[1:2]])
                for worker in stopped:
                    worker.process.send_signal(signal.SIGSTOP)
                goal = min(rounds_of(job.nodes[0]) + 20, rounds)
                wait_for(lambda goal=goal: rounds_of(job.nodes[0]) >= goal)
                for worker in stopped:
                    worker.process.send_signal(signal.SIGCONT)
            said = [worker.hear() for worker in members]
            assert [worker.end() for worker in members] == [0] * 4
    total = sum(added for added, _ in said)
    assert [final for _, final in said] == [total] * 4


def test_an_updater_of_ones_own_is_refused() -> None:
    def plain(values: Any, delta: Any, state: Any, stride: int, hyper: Any, count: int) -> None:
        for i in range(count):
            values[i] += delta[i]

    with rehearsal(1, 1) as job:
        made = job.run(
            lambda session: outcome(lambda: mv.ArrayTableHandler(3, updater=Updater("mine", plain), session=session)),
            **QUORUM,
        )
    assert all(isinstance(error, NotInThisJobError) for error in made), made
