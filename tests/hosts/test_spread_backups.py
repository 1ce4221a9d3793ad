"""Keyed tables with two copies of each row, on real nodes: what survives the loss of a host, and what is said of it."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from core_support import in_threads, outcome, wait_for
from rehearsing import Rehearsal, rehearsal, seeds
from test_replacing_hosts import all_do, anew, lose
from test_spread_tables import KEYS, cuts

import multiverso as mv
from multiverso.errors import SnapshotError, TableMismatchError
from multiverso.hosts.spread.backups import Backups
from multiverso.hosts.spread.placement import places_of
from multiverso.hosts.spread.table import SpreadTable
from multiverso.layout.keyed import GROUPS
from multiverso.runtime import Session
from multiverso.updaters import momentum


def test_the_backup_is_who_becomes_the_home() -> None:
    homes, backups = places_of(range(5), 2)
    assert (homes != backups).all()
    for lost in range(5):
        after, then = places_of([host for host in range(5) if host != lost], 2)
        np.testing.assert_array_equal(after, np.where(homes == lost, backups, homes))
        kept = (homes != lost) & (backups != lost)
        np.testing.assert_array_equal(then[kept], backups[kept])
    assert len(places_of([3], 2)) == 1
    assert homes.shape == (GROUPS,)


def kept(job: Rehearsal, of: int) -> dict[int, list[Any]]:
    """The rows that hosts keep as backups, but for one that is lost."""
    found: dict[int, list[Any]] = {}
    for host, node in enumerate(job.nodes):
        if host != of:
            rows = node.hosts.rows
            with rows._lock:
                (table,) = [one.table for one in rows._tables.values()]
                assert table.kept is not None
                pattern = 0
                while pattern >= 0:
                    pattern, keys = table.kept.list_keys(pattern)
                    there, values = table.kept.read_whole(keys)
                    found |= {int(key): value.tolist() for key, value in zip(there, values, strict=True)}
    return found


@pytest.mark.parametrize("seed", seeds(1))
def test_a_lost_host_takes_nothing_with_it_that_the_others_have_added(seed: int) -> None:
    """Each worker adds to a column of its own, and reads what it has added at any moment, also of the lost host."""
    lost = threading.Event()

    def work(session: Session) -> Any:
        me = session.worker_id
        table = mv.KeyedTable(4, dtype="int64", cache_rows=300, copies=2, session=session)
        dice = np.random.default_rng((seed, me))
        mine = np.zeros(KEYS.size, np.int64)
        for call in range(400):
            some = np.unique(np.minimum(dice.zipf(1.3, dice.integers(1, 30)) - 1, KEYS.size - 1))
            if call == 150 and me == 2:
                job.nodes[2].close()
                lost.set()
                return mine
            if call == 150:
                lost.wait(30)
            if dice.random() < 0.6:
                delta = np.zeros((some.size, 4), np.int64)
                delta[:, me] = dice.integers(1, 5, some.size)
                table.add(delta, KEYS[some])
                mine[some] += delta[:, me]
            else:
                np.testing.assert_array_equal(table.get(KEYS[some])[:, me], mine[some])
        session.barrier()
        rows = table.get(KEYS)
        session.barrier()
        return mine, rows, len(table), {int(key) for keys, _ in table.items() for key in keys}, table.check()

    with rehearsal(1, 1, 1, 1, on_lost="continue") as job, cuts(job, seed):
        first, second, gone, last = job.run(work)
        copies = kept(job, 2)
    for _, rows, number, listed, check in (first, second, last):
        for worker, (added, *_) in ((0, first), (1, second), (3, last)):
            np.testing.assert_array_equal(rows[:, worker], added)
        assert (rows[:, 2] <= gone).all()
        there = rows.any(axis=1)
        assert listed >= set(KEYS[there].tolist())
        assert number == len(listed)
        assert not any(check[what] for what in check if what != "keys"), check
        wanted = {int(key): row.view(np.uint8).tolist() for key, row in zip(KEYS[there], rows[there], strict=True)}
        assert {key: copies[key] for key in wanted} == wanted, "a new backup has all"
    assert gone.any()


def test_the_state_of_an_updater_and_what_was_removed_are_at_the_backup_too(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    lost = threading.Event()

    def steps(table: Any, number: int) -> None:
        for _ in range(number):
            table.add(np.full((KEYS.size, 2), 0.5), KEYS)

    def work(session: Session) -> Any:
        table = mv.KeyedTable(2, updater=momentum(0.5), copies=2, session=session)
        if session.worker_id == 0:
            for _ in range(3):
                steps(table, 1)
                session.barrier()
            table.remove(KEYS[::10])
        else:
            for _ in range(3):
                session.barrier()
        session.barrier()
        table.save_increment(old)
        session.barrier()
        if session.worker_id == 2:
            job.nodes[2].close()
            lost.set()
            return None
        lost.wait(30)
        wait_for(lambda: len(session.live_workers()) == 2)
        assert len(table) == 900
        session.barrier()
        if session.worker_id == 1:
            steps(table, 1)
        session.barrier()
        rows = table.get(KEYS)
        error = outcome(lambda: table.save_increment(old))  # in which there are rows of the lost host, as they were
        assert isinstance(error, SnapshotError)
        table.save_increment(new)
        session.barrier()
        return rows

    def alone(session: Session) -> Any:
        table = mv.KeyedTable(2, updater=momentum(0.5), session=session)
        steps(table, 3)
        table.remove(KEYS[::10])
        steps(table, 1)
        again: Any = mv.KeyedTable(2, updater=momentum(0.5), session=session)
        again.load(new)
        np.testing.assert_array_equal(again.get(KEYS), table.get(KEYS))
        return table.get(KEYS)

    with rehearsal(1, 1, 1, on_lost="continue") as job:
        found = job.run(work)[:2]
    with rehearsal(1) as job:
        (wanted,) = job.run(alone)
    for rows in found:
        np.testing.assert_array_equal(rows, wanted)


def test_a_host_that_was_started_again_uses_the_rows_of_the_others_and_may_be_lost_again() -> None:
    """After each loss somebody has added, and what a new node asks is no repetition of what the old one had."""
    with rehearsal(1, 1, 1, on_lost="continue") as job, ExitStack() as stack:
        sessions = dict(enumerate(in_threads([lambda i=i: job.session(i) for i in range(3)])))  # type: ignore[misc]
        tables: dict[int, Any] = {}
        expected = 0

        def open_table(session: Session) -> None:
            tables[session.worker_id] = mv.KeyedTable(2, dtype="int64", copies=2, name="t", session=session)

        def train(session: Session) -> None:
            table = tables[session.worker_id]
            table.add(np.ones((KEYS.size, 2), np.int64), KEYS)
            table.get(KEYS)
            session.barrier()
            assert np.unique(table.get(KEYS)).tolist() == [expected]
            assert len(table) == sum(keys.size for keys, _ in table.items()) == KEYS.size
            session.barrier()

        all_do(sessions, open_table)
        expected += 3
        all_do(sessions, train)
        for host in (1, 1, 2):
            lose(job, host, sessions)
            del tables[host]
            expected += 2
            all_do(sessions, train)
            stack.enter_context(anew(job, host, times_replaced=1 + (expected > 5 and host == 1)))
            sessions[host] = again = job.session(host)
            open_table(again)
            assert np.unique(tables[host].get(KEYS)).tolist() == [expected], "as it was when it came"
            while again.barriers < sessions[0].barriers:
                again.barrier()
            expected += 3
            all_do(sessions, train)
        for session in sessions.values():
            session.shutdown()


def test_hosts_have_to_mean_the_same_number_of_copies() -> None:
    def work(session: Session) -> Any:
        table = mv.KeyedTable(2, copies=1 + session.worker_id, name="words", session=session)
        error = outcome(lambda: table.get(KEYS))
        session.barrier()
        return error

    with rehearsal(1, 1) as job:
        errors = job.run(work)
    assert [type(error) for error in errors] == [TableMismatchError] * 2


def test_a_number_of_copies_is_one_or_two() -> None:
    def work(session: Session) -> Any:
        return outcome(lambda: mv.KeyedTable(2, copies=3, session=session))

    with rehearsal(1) as job:
        (error,) = job.run(work)
    assert isinstance(error, ValueError)
    assert "copies" in str(error)


def is_home(table: Any, folder: Path) -> bool:
    """Whether rows live on this worker's host."""
    return not isinstance(outcome(lambda: table.save_increment(folder)), SnapshotError)


@pytest.mark.parametrize("seed", seeds(1))
def test_a_host_that_was_started_again_takes_its_rows_back_while_the_others_go_on(seed: int, tmp_path: Path) -> None:
    """Each worker adds to a column of its own, and reads what it has added at any moment; then another host is lost."""
    stop = threading.Event()

    def work(table: Any, column: int, calls: int = 1 << 30, mine: Any = None) -> Any:
        dice = np.random.default_rng((seed, column))
        mine = np.zeros(KEYS.size, np.int64) if mine is None else mine
        while calls and not stop.is_set():
            calls -= 1
            some = np.unique(np.minimum(dice.zipf(1.3, dice.integers(1, 30)) - 1, KEYS.size - 1))
            if dice.random() < 0.6:
                delta = np.zeros((some.size, 4), np.int64)
                delta[:, column] = dice.integers(1, 5, some.size)
                table.add(delta, KEYS[some])
                mine[some] += delta[:, column]
            elif dice.random() < 0.1:
                assert len(table) <= KEYS.size
                assert table.contains(KEYS[some])[mine[some] > 0].all()
            else:
                np.testing.assert_array_equal(table.get(KEYS[some])[:, column], mine[some])
        return mine

    with rehearsal(1, 1, 1, on_lost="continue") as job, ExitStack() as stack:
        sessions = dict(enumerate(in_threads([lambda i=i: job.session(i) for i in range(3)])))  # type: ignore[misc]

        def open_table(session: Session) -> Any:
            return mv.KeyedTable(4, dtype="int64", cache_rows=300, copies=2, name="t", session=session)

        tables = dict(enumerate(all_do(sessions, open_table)))
        gone = work(tables[1], 1, 100)
        stack.enter_context(cuts(job, seed))

        def train() -> list[Any]:
            return in_threads([lambda h=h: work(tables[h], h) for h in (0, 2)])

        with ThreadPoolExecutor(1) as others, ExitStack() as ends:
            ends.callback(stop.set)
            before = others.submit(train)
            lose(job, 1, {1: sessions[1], 0: sessions[0], 2: sessions[2]})
            stack.enter_context(anew(job, 1))
            sessions[1] = job.session(1)
            tables[1] = open_table(sessions[1])
            again = work(tables[1], 3, 100)
            wait_for(lambda: is_home(tables[1], tmp_path))
            work(tables[1], 3, 100, again)
            stop.set()
            first, last = before.result()
        if seed:  # what has come back is not lost with who had it meanwhile
            lose(job, 2, sessions)
        while sessions[1].barriers < sessions[0].barriers:
            sessions[1].barrier()
        all_do(sessions, lambda session: session.barrier())
        for host in sessions:
            rows = tables[host].get(KEYS)
            np.testing.assert_array_equal(rows[:, 0], first)
            np.testing.assert_array_equal(rows[:, 3], again)
            assert (rows[:, 2] <= last).all() if seed else (rows[:, 2] == last).all()
            assert (rows[:, 1] <= gone).all()
            there = rows.any(axis=1)
            listed = {int(key) for keys, _ in tables[host].items() for key in keys}
            assert listed >= set(KEYS[there].tolist())
            assert len(tables[host]) == len(listed)
            check = tables[host].check()
            assert not any(check[what] for what in check if what != "keys"), check
        for session in sessions.values():
            session.shutdown()


def test_state_removals_and_the_learning_rate_come_back_too(tmp_path: Path) -> None:
    """What hosts have said of all rows while one was away holds there when it is a home again."""

    def train(table: Any, rate: float, removed: Any, meet: Any = lambda: None) -> None:
        table.add(np.full((KEYS.size, 2), 0.5), KEYS)
        meet()  # else adds to rows elsewhere are one step of their updater
        table.learning_rate = rate
        table.add(np.full((KEYS.size, 2), 0.25), KEYS)
        meet()
        table.remove(removed)

    with rehearsal(1, 1, 1, on_lost="continue") as job, ExitStack() as stack:
        sessions = dict(enumerate(in_threads([lambda i=i: job.session(i) for i in range(3)])))  # type: ignore[misc]

        def open_table(session: Session) -> Any:
            return mv.KeyedTable(2, updater=momentum(0.5), copies=2, name="t", session=session)

        tables = dict(enumerate(all_do(sessions, open_table)))

        def meet() -> None:
            all_do(sessions, lambda session: session.barrier())

        train(tables[0], 0.5, KEYS[::7], meet)
        lose(job, 1, sessions)
        train(tables[0], 0.125, KEYS[::5], meet)
        meet()
        stack.enter_context(anew(job, 1))
        sessions[1] = again = job.session(1)
        tables[1] = open_table(again)
        wait_for(lambda: is_home(tables[1], tmp_path))
        assert tables[1].learning_rate == 0.125
        while again.barriers < sessions[0].barriers:
            again.barrier()
        meet()
        tables[2].add(np.full((KEYS.size, 2), 2.0), KEYS)
        meet()
        found = [tables[host].get(KEYS) for host in sessions]
        for session in sessions.values():
            session.shutdown()

    def alone(session: Session) -> Any:
        table = mv.KeyedTable(2, updater=momentum(0.5), session=session)
        train(table, 0.5, KEYS[::7])
        train(table, 0.125, KEYS[::5])
        table.add(np.full((KEYS.size, 2), 2.0), KEYS)
        return table.get(KEYS)

    with rehearsal(1) as job:
        (expected,) = job.run(alone)
    for rows in found:
        np.testing.assert_array_equal(rows, expected)


def test_a_host_returns_again_after_each_of_its_losses_and_beside_another(tmp_path: Path) -> None:
    with rehearsal(1, 1, 1, 1, on_lost="continue") as job, ExitStack() as stack:
        sessions = dict(enumerate(in_threads([lambda i=i: job.session(i) for i in range(4)])))  # type: ignore[misc]

        def open_table(session: Session) -> Any:
            return mv.KeyedTable(2, dtype="int64", copies=2, name="t", session=session)

        tables = dict(enumerate(all_do(sessions, open_table)))
        times: Counter[int] = Counter()
        expected = 0
        for lost in ((1,), (1,), (2, 3), (3, 1)):
            for host in lost:
                lose(job, host, sessions)
                tables[0].add(np.ones((KEYS.size, 2), np.int64), KEYS)
                all_do(sessions, lambda session: session.barrier())
                expected += 1
            for host in lost:
                times[host] += 1
                stack.enter_context(anew(job, host, times_replaced=times[host]))
                sessions[host] = job.session(host)
                tables[host] = open_table(sessions[host])
            for host in lost:
                wait_for(lambda h=host: is_home(tables[h], tmp_path / str(len(list(tmp_path.iterdir())))))
                while sessions[host].barriers < sessions[0].barriers:
                    sessions[host].barrier()
            all_do(sessions, lambda session: session.barrier())
            for host in sessions:
                assert np.unique(tables[host].get(KEYS)).tolist() == [expected]
                assert len(tables[host]) == KEYS.size
            all_do(sessions, lambda session: session.barrier())
        for session in sessions.values():
            session.shutdown()


def test_a_host_leaves_a_barrier_although_backups_hear_of_changes_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others who have left it go on at once."""
    leave_all, look = SpreadTable.leave_all, Backups.look
    leaving: set[Any] = set()

    def leave(table: SpreadTable) -> bool:
        leaving.add(table.backups)
        return leave_all(table)

    def is_told(backups: Backups, *arguments: bool) -> bool:
        return look(backups, *arguments) and backups not in leaving

    monkeypatch.setattr(SpreadTable, "leave_all", leave)
    monkeypatch.setattr(Backups, "look", is_told)

    def work(session: Session) -> set[int]:
        table = mv.KeyedTable(2, copies=2, session=session)
        table.add(np.ones((KEYS.size, 2)), KEYS)
        session.barrier(timeout_seconds=20)
        leaving.clear()
        return set(np.unique(table.get(KEYS)).tolist())

    with rehearsal(1, 1, 1) as job:
        assert job.run(work) == [{3.0}] * 3
