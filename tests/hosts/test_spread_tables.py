"""Keyed tables whose rows live on one host each: exact through cuts and copies that come and go; what is refused."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from core_support import outcome, together, wait_for
from fabric_support import interrupt
from rehearsing import Rehearsal, rehearsal, seeds

import multiverso as mv
from multiverso.compiling.atomics import hash64
from multiverso.errors import NotInThisJobError, OutOfMemoryError, TableMismatchError, WaitTimeoutError, WorkerLostError
from multiverso.hosts.peer.frames import ProtocolError
from multiverso.hosts.spread.frames import ANSWER, Frame, head_of
from multiverso.hosts.spread.home import Home
from multiverso.hosts.spread.placement import groups_of, homes_of
from multiverso.hosts.values.held_tables import HeldTables
from multiverso.kernels.keyed import calls as kernels
from multiverso.layout import desk
from multiverso.layout.desk import FETCH
from multiverso.layout.keyed import GROUP_SHIFT, GROUPS
from multiverso.memory import heap
from multiverso.memory.words import load32, load64
from multiverso.runtime import Session
from multiverso.runtime.several_hosts import spread_tables
from multiverso.updaters import adagrad, momentum
from multiverso.watching.snapshot import Observer

KEYS = np.arange(1000) * 7919 - 12345


# -- where rows live -------------------------------------------------------------------------------------------------


def test_hosts_get_as_many_groups_and_a_new_one_moves_only_its_own() -> None:
    before, after = homes_of(range(4)), homes_of(range(5))
    assert before.shape == (GROUPS,)
    assert all(abs(np.count_nonzero(after == host) - GROUPS / 5) < GROUPS / 20 for host in range(5))
    moved = before != after
    assert (after[moved] == 4).all()
    assert moved.any()
    for keys in (np.arange(100_000), np.arange(100_000) << 20, -np.arange(100_000)):  # ids in a row spread as well
        groups = groups_of(keys)
        assert groups.min() >= 0
        counts = np.bincount(before[groups])
        assert counts.max() < 1.2 * counts.min()
    # what is saved in no file, but has to be the same on hosts with other versions of NumPy and other processors
    assert groups_of(np.array([0, 1, -1, 2**62])).tolist() == [919, 3784, 1905, 3752]
    assert before[:8].tolist() == [3, 2, 3, 1, 1, 1, 0, 2]
    assert groups_of(KEYS).tolist() == [hash64(int(key)) >> GROUP_SHIFT & GROUPS - 1 for key in KEYS]  # as kernels do


# -- all that a table does -------------------------------------------------------------------------------------------


def test_a_table_on_several_hosts_does_what_one_on_one_host_does(tmp_path: Path) -> None:
    def work(session: Session) -> Any:
        me, all_of_us = session.worker_id, session.workers_num
        table = mv.KeyedTable(3, dtype="int64", initial=5, session=session)
        table.add(np.full((1000, 3), me + 1), KEYS)
        assert (table.get(KEYS) >= 5 + me + 1).all()  # what this worker has added, wherever it lives
        session.barrier()
        total = 5 + sum(range(1, all_of_us + 1))
        assert (table.get(KEYS.reshape(10, 100)) == total).all()
        assert len(table) == 1000
        assert table.contains([KEYS[7], 1]).tolist() == [True, False]
        assert (table.get([1, 2]) == 5).all()  # rows that nobody has added to
        session.barrier()
        table.add(np.ones((4, 3), np.int64), [KEYS[0], KEYS[0], KEYS[1], KEYS[0]])
        session.barrier()
        assert table.get(KEYS[:3])[:, 0].tolist() == [total + 3 * all_of_us, total + all_of_us, total]
        session.barrier()
        if me == 0:
            rows = {int(k): row.tolist() for keys, rows in table.items(300) for k, row in zip(keys, rows, strict=True)}
            assert rows == dict(zip(KEYS.tolist(), table.get(KEYS).tolist(), strict=True))
            table.save(tmp_path / "table.safetensors")
            assert table.remove(KEYS[:500]).all()
            assert not table.remove(KEYS[:500]).any()
            table.add(np.ones((1, 3), np.int64), [99])
        session.barrier()
        assert (len(table), table.contains(KEYS).sum()) == (501, 500)
        assert (table.get(KEYS[:500]) == 5).all()
        session.barrier()
        if me == all_of_us - 1:
            table.load(tmp_path / "table.safetensors")
        session.barrier()
        assert len(table) == 1000
        assert table.get(KEYS[:3])[:, 0].tolist() == [total + 3 * all_of_us, total + all_of_us, total]
        session.barrier()
        return table.check()

    with rehearsal(2, 1, 1) as job:
        for found in job.run(work):
            assert not any(found[what] for what in found if what != "keys"), found

    def load(session: Session) -> int:  # what several hosts have saved is a table of one host, too
        table = mv.KeyedTable(3, dtype="int64", initial=5, session=session)
        table.load(tmp_path / "table.safetensors")
        return len(table)

    assert together(load, 1) == [1000]


def test_a_worker_sees_what_it_has_done_before() -> None:
    """Without a barrier: removed rows are no longer there, and added ones are counted, wherever they live."""

    def work(session: Session) -> None:
        table = mv.KeyedTable(2, dtype="int64", initial=3, session=session)
        session.barrier()
        if session.worker_id == 0:
            for step in range(1, 30):
                table.add(np.full((1000, 2), step), KEYS)
                assert len(table) == 1000
                assert sum(keys.size for keys, _ in table.items()) == 1000
                assert table.remove(KEYS).all()
                assert (table.get(KEYS) == 3).all()
                assert len(table) == 0
                table.add(np.full((1000, 2), step), KEYS)
                assert (table.get(KEYS) == 3 + step).all()
                assert table.remove(KEYS[::2]).all()
                wanted = np.where(np.arange(1000) % 2, 3 + step, 3)
                assert (table.get(KEYS)[:, 0] == wanted).all()
                assert table.remove(KEYS).tolist() == [False, True] * 500
        session.barrier()
        assert (table.get(KEYS) == 3).all()

    with rehearsal(1, 1) as job:
        job.run(work)


@pytest.mark.parametrize("updater", ["adagrad", "sgd", "momentum"])
def test_updaters_run_at_home_with_the_state_that_is_there(updater: str) -> None:
    """Each key is added to by one worker, with a barrier after each add: then each add is one step."""
    rules = {"adagrad": adagrad(0.5), "sgd": "sgd", "momentum": momentum(0.25)}

    def work(session: Session) -> Any:
        table: Any = mv.KeyedTable(2, updater=rules[updater], session=session)
        mine = KEYS[session.worker_id :: 2]
        for step in range(4):
            table.add(np.full((mine.size, 2), 0.5 + step), mine)
            session.barrier()
            if step == 1 and updater != "sgd" and session.worker_id:
                table.learning_rate = 0.125
            session.barrier()
        return table.get(KEYS)

    with rehearsal(1, 1) as job:
        got = job.run(work)
    (wanted,) = together(_alone(rules[updater], updater), 1)
    for rows in got:
        np.testing.assert_array_equal(rows, wanted)


def _alone(rule: Any, updater: str) -> Any:
    def work(session: Session) -> Any:
        table: Any = mv.KeyedTable(2, updater=rule, session=session)
        for step in range(4):
            table.add(np.full((KEYS.size, 2), 0.5 + step), KEYS)
            if step == 1 and updater != "sgd":
                table.learning_rate = 0.125
        return table.get(KEYS)

    return work


def test_rows_that_were_asked_for_before_are_here_when_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("multiverso.tables.keyed.spread._COPY_SECONDS", 600.0)

    def work(session: Session) -> Any:
        table = mv.KeyedTable(2, session=session)
        table.add(np.ones((1000, 2)), KEYS)
        session.barrier()  # no copies any more
        calls: Any = table._calls
        there = KEYS[calls.desk.here[groups_of(KEYS)] == 0]
        table.prefetch(KEYS)
        wait_for(lambda: (calls.find(there) >= 0).all())
        asked = load64(calls.desk._lane(0) + desk.ASKED)
        rows = table.get(KEYS)
        assert load64(calls.desk._lane(0) + desk.ASKED) == asked
        session.barrier()
        return rows.min()

    with rehearsal(1, 1) as job:
        assert job.run(work) == [2.0, 2.0]


# -- exact -----------------------------------------------------------------------------------------------------------


@contextmanager
def cuts(job: Rehearsal, seed: int) -> Iterator[list[int]]:
    """Cuts the hosts' connections, one after another, for as long as the block lasts."""
    over, count = threading.Event(), [0]

    def cut() -> None:
        dice = random.Random(seed)
        while not over.wait(dice.random() * 0.05):
            interrupt(dice.choice(job.nodes).hosts.fabric, dice.randrange(len(job.nodes)))
            count[0] += 1

    thread = threading.Thread(target=cut)
    thread.start()
    try:
        yield count
    finally:
        over.set()
        thread.join()


@pytest.mark.parametrize("seed", seeds(1))
def test_every_add_counts_once_through_cuts_and_copies_that_come_and_go(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("multiverso.tables.keyed.spread._COPY_SECONDS", 0.05)
    ids = KEYS[:400]

    def work(session: Session) -> Any:
        table = mv.KeyedTable(3, dtype="int64", cache_rows=64, session=session)
        dice = np.random.default_rng((seed, session.worker_id))
        mine = np.zeros(ids.size, np.int64)
        for call in range(300):
            some = np.unique(np.minimum(dice.zipf(1.3, dice.integers(1, 30)) - 1, ids.size - 1))
            what = dice.random()
            if what < 0.5:
                delta = dice.integers(1, 5, some.size)
                table.add(np.repeat(delta, 3).reshape(-1, 3), ids[some])
                mine[some] += delta
            elif what < 0.95:
                rows = table.get(ids[some])
                assert (rows == rows[:, :1]).all()
                assert (rows[:, 0] >= mine[some]).all()
            else:
                table.prefetch(ids[some])
            if call == 150:
                session.barrier()
                table.get(ids)
        session.barrier()
        rows = table.get(ids)[:, 0]
        session.barrier()
        return mine, rows, table.check()

    with rehearsal(2, 1, 1) as job, cuts(job, seed) as count:
        results = job.run(work)
    assert count[0]
    total = sum(mine for mine, _, _ in results)
    for _, rows, check in results:
        np.testing.assert_array_equal(rows, total)
        assert not any(check[what] for what in check if what != "keys"), check


def test_what_is_added_to_a_copy_that_goes_is_taken_when_no_call_can_have_found_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without the wait for calls that are under way this add would be lost."""
    monkeypatch.setattr("multiverso.tables.keyed.spread._COPY_SECONDS", 600.0)

    def work(session: Session) -> Any:
        table = mv.KeyedTable(1, dtype="int64", session=session)
        session.barrier()
        if session.worker_id == 0:
            calls: Any = table._calls
            there = KEYS[calls.desk.here[groups_of(KEYS)] == 0][:20]
            table.get(there)
            node = job.nodes[0].hosts.rows
            (copies,) = [found.table.copies for found in node._tables.values()]
            me, base, control = session.worker_id, calls.address, session.control.address
            rows, three = np.empty(20, np.int64), np.full(20, 3)
            kernels.find.compiled()(control, base, me, there, rows, 0)  # a call of this worker has begun
            with node._lock:
                copies.begin_leaving(there)
                assert copies.left() is None
            kernels.add.compiled()(control, base, calls._add_copy, me, rows, three.ctypes.data, 0)  # and ends
            session.barrier()  # all that was added is at home
        else:
            session.barrier()
        rows = table.get(KEYS)[:, 0]
        session.barrier()
        return int(rows.sum())

    with rehearsal(1, 1) as job:
        assert job.run(work) == [60, 60]


def die_in_an_add(number: int) -> None:
    """Adds to all keys, over and over; the second host's worker is killed by its neighbour meanwhile."""
    mv.init()
    table = mv.KeyedTable(2, dtype="int64", name="counts", cache_rows=400)
    ids = KEYS[:number]
    pids = mv.KeyedTable(1, dtype="int64", name="pids")
    pids.add([[os.getpid()]], [mv.worker_id()])
    mv.barrier()
    if mv.worker_id() == 1:
        while True:
            table.add(np.ones((number, 2), np.int64), ids)
    for _ in range(20):
        table.add(np.ones((number, 2), np.int64), ids)
    if mv.worker_id() == 0:
        os.kill(int(pids.get([1])[0, 0]), signal.SIGKILL)
    mv.barrier()
    rows = table.get(ids)
    mv.barrier()
    assert (rows[:, 0] == rows[:, 1]).all(), "a row is changed wholly or not at all"
    assert (rows[:, 0] >= 60).all(), "what the others have added"
    steps = rows[:, 0] - 60
    assert steps.max() - steps.min() <= 1, "a killed add has changed a prefix of its keys, or of those of a host"
    found = table.check()
    assert not any(found[what] for what in found if what != "keys"), found
    mv.shutdown()


def test_a_worker_that_is_killed_in_an_add_loses_nothing_of_the_others() -> None:
    options: dict[str, Any] = {"on_failure": "continue", "timeout_seconds": 200}
    results = mv.run(die_in_an_add, workers=4, hosts=2, args=(300,), **options)
    assert isinstance(results.pop(1), Exception)
    assert results == [None] * 3


def test_each_host_evicts_of_the_rows_that_live_there() -> None:
    def work(session: Session) -> Any:
        table = mv.KeyedTable(2, dtype="int64", eviction=mv.Eviction(most_keys=300, idle_ticks=3), session=session)
        here = KEYS[homes_of(range(2))[groups_of(KEYS)] == session.worker_id][-50:]
        for step in range(3):
            table.add(np.full((1000, 2), 1), KEYS + step)  # 3,000 keys
        session.barrier()
        evicted = table.evict()
        session.barrier()
        kept = len(table)
        session.barrier()
        values = table.get(KEYS)
        session.barrier()
        for step in range(8):  # those that are used stay, whoever has found them
            if step == 2:
                before = table.get(here)
            table.add(np.full((50, 2), 1), here)
            if session.worker_id == 0:
                table.add(np.full((100, 2), 1), KEYS[:100])
            session.barrier()
            evicted += table.tick(seconds=10)
            session.barrier()
        used = np.concatenate([KEYS[:100], here])
        stayed = (table.get(here) == before + 6).all()  # were not evicted, to come again
        all_there = bool(table.contains(used).all() and stayed)
        return evicted, kept, len(table), np.unique(values).tolist(), all_there

    with rehearsal(1, 1) as job:
        results = job.run(work)
    assert sum(evicted for evicted, *_ in results) > 0  # beside what adds have evicted
    for _, kept, left, values, used_are_there in results:
        assert 200 <= kept <= 300
        assert left == 200
        assert used_are_there
        assert set(values) <= {0, 1, 2}


# -- files -----------------------------------------------------------------------------------------------------------


def test_each_host_writes_its_part_and_any_number_of_hosts_loads_them(tmp_path: Path) -> None:
    place, whole = tmp_path / "parts", tmp_path / "whole.safetensors"

    def write(session: Session) -> list[Any]:
        table = mv.KeyedTable(2, updater=momentum(0.5), session=session)
        made = []
        for _ in range(2 + 10 * session.worker_id):  # each host has a time of its own
            table.tick()
        for step in range(3):
            mine = KEYS[session.worker_id :: 2]
            table.add(np.full((mine.size, 2), step + 1), mine)
            session.barrier()
            if step == 2 and session.worker_id == 0:
                table.remove(KEYS[:100])
            table.tick()
            session.barrier()
            made.append(table.save_increment(place))
            session.barrier()
        if session.worker_id == 0:
            table.save(whole)
        session.barrier()
        return made

    with rehearsal(1, 1) as job:
        made = job.run(write)
    assert [[snapshot.parent for snapshot in some] for some in made] == [[None, 1, 2]] * 2
    assert sum(some[0].keys for some in made) == 1000
    assert sum(some[2].removed for some in made) == 100
    assert sorted(path.name for path in place.iterdir()) == ["host-1-of-2", "host-2-of-2"]

    def load(session: Session) -> Any:
        found = []
        for name, path in (("parts", place), ("whole", whole)):
            table = mv.KeyedTable(2, updater=momentum(0.5), name=name, session=session)
            table.add([[9, 9]], [77])  # goes
            session.barrier()
            if session.worker_id == 0:
                table.load(path)
            session.barrier()
            table.add(np.ones((KEYS.size, 2)), KEYS)  # the state is there, too
            session.barrier()
            found.append((len(table), table.get(KEYS).tolist(), table.contains([77]).tolist()))
            session.barrier()
        return found

    for hosts in ((1,), (1, 1), (1, 1, 1)):
        with rehearsal(*hosts) as job:
            for parts, at_once in job.run(load):
                assert parts == at_once
                assert parts[0] == 1000

    def go_on(session: Session) -> Any:
        eviction = mv.Eviction(idle_ticks=3)
        table = mv.KeyedTable(2, updater=momentum(0.5), eviction=eviction, session=session)
        saved = [outcome(lambda: table.save_increment(place))]  # removes nothing
        session.barrier()
        if session.worker_id == 1:
            table.load(place)
        session.barrier()
        evicted = [table.tick(seconds=10), table.tick(seconds=10)]
        saved += [table.save_increment(place).parent for _ in range(2)]
        session.barrier()
        return str(saved[0]), saved[1:], table.ticks, evicted, len(table)

    old = tmp_path / "old"
    shutil.copytree(place, old)
    with rehearsal(1, 1) as job:
        for refused_first, parents, ticks, evicted, keys in job.run(go_on):
            assert "load them first" in refused_first
            assert (parents, ticks, evicted, keys) == ([None, 4], 17, [0, 0], 900)
    shutil.rmtree(place)
    shutil.copytree(old, place)
    (place / "host-2-of-2" / "snapshot-2.safetensors").unlink()

    def refused(session: Session) -> Any:
        table = mv.KeyedTable(2, updater=momentum(0.5), session=session)
        errors = [outcome(lambda: table.load(place)), outcome(lambda: table.save_increment(place))]
        session.barrier()
        return [str(error) for error in errors], len(table)

    with rehearsal(1, 1, 1) as job:
        for (loaded, saved), keys in job.run(refused):
            assert "snapshot 2 is missing" in loaded
            assert "of a job on another number of hosts" in saved
            assert keys == 0


# -- what is refused, and what fails ---------------------------------------------------------------------------------


def test_what_does_not_work_over_hosts_is_refused_in_a_sentence() -> None:
    def work(session: Session) -> Any:
        own = mv.updaters.Updater("halved", _halved)
        options: list[dict[str, Any]] = [{"updater": own}]
        for option in options:
            error = outcome(lambda option=option: mv.KeyedTable(2, session=session, **option))
            assert type(error) is NotInThisJobError
            assert "several hosts" in str(error)
        table = mv.KeyedTable(2, cache_rows=10, session=session)
        error = outcome(lambda: table.add(np.ones((1000, 2)), KEYS))
        assert type(error) is ValueError
        assert "cache_rows=" in str(error)
        assert len(table) == 0
        assert table.get(KEYS).shape == (1000, 2)  # to read needs no more
        session.barrier()

    with rehearsal(1, 1) as job:
        job.run(work)


def _halved(values: Any, delta: Any, state: Any, stride: Any, hyper: Any, count: Any) -> None:
    for i in range(count):
        values[i] += delta[i] / 2


@pytest.mark.parametrize("mode", [{"sync": True}, {"staleness": 2}])
def test_modes_that_keyed_tables_have_no_rounds_for_over_hosts_are_refused(mode: dict[str, Any]) -> None:
    def work(session: Session) -> Any:
        return outcome(lambda: mv.KeyedTable(2, session=session))

    with rehearsal(1, 1) as job:
        assert [type(error) for error in job.run(work, **mode)] == [NotInThisJobError] * 2


def test_hosts_that_mean_different_tables_hear_of_it_by_name() -> None:
    def work(session: Session) -> Any:
        table = mv.KeyedTable(2, seed=session.worker_id, initial="normal", name="words", session=session)
        error = outcome(lambda: table.get(KEYS))
        session.barrier()
        return error

    with rehearsal(1, 1) as job:
        errors = job.run(work)
    assert [type(error) for error in errors] == [TableMismatchError] * 2
    assert "host-1" in str(errors[0])
    assert "host-0" in str(errors[1])


def test_a_table_that_another_host_has_not_made_is_waited_for_until_the_deadline() -> None:
    def work(session: Session) -> Any:
        error = None
        if session.worker_id == 0:
            table = mv.KeyedTable(2, name="words", session=session)
            error = outcome(lambda: table.get(KEYS, timeout_seconds=0.3))
        session.barrier()
        if session.worker_id == 1:
            table = mv.KeyedTable(2, name="words", session=session)
        table.add(np.ones((1000, 2)), KEYS)
        session.barrier()
        assert (table.get(KEYS) == 2).all()
        session.barrier()
        return error

    with rehearsal(1, 1) as job:
        error, _ = job.run(work)
    assert type(error) is WaitTimeoutError
    assert "live on host-1" in str(error)


@pytest.mark.parametrize("asked_before", [False, True])
def test_a_host_whose_workers_have_all_gone_without_making_the_table_is_not_waited_for(asked_before: bool) -> None:
    asked = threading.Event()

    def work(session: Session) -> Any:
        if session.worker_id == 1:
            asked.wait(30)
            return None
        table = mv.KeyedTable(2, session=session)
        waits = threading.Thread(target=lambda: errors.append(outcome(lambda: table.get(KEYS, timeout_seconds=60))))
        if asked_before:
            waits.start()
            wait_for(lambda: session.wait_graph().workers[0].wait is not None)
        asked.set()
        wait_for(lambda: 1 not in session.live_workers())
        if not asked_before:
            waits.start()
        waits.join()
        return outcome(lambda: table.add(np.ones((1000, 2)), KEYS, timeout_seconds=60))

    errors: list[Any] = []
    with rehearsal(1, 1) as job:
        errors.append(job.run(work)[0])
    assert len(errors) == 2
    for error in errors:
        assert isinstance(error, WorkerLostError), error
        assert "no worker of host-1 has made the keyed table" in str(error)


def test_rows_of_a_lost_host_are_said_to_be_lost_and_the_others_are_there() -> None:
    lost = threading.Event()

    def work(session: Session) -> Any:
        table = mv.KeyedTable(2, session=session)
        table.add(np.ones((1000, 2)), KEYS)
        session.barrier()
        if session.worker_id == 2:
            job.nodes[2].close()
            lost.set()
            return None
        lost.wait(30)
        calls: Any = table._calls
        homes = calls.desk.homes[groups_of(KEYS)]
        error = outcome(lambda: table.get(KEYS[homes == 2], timeout_seconds=30))
        rows = table.get(KEYS[homes != 2])
        assert ((rows == 3) | (rows == 4)).all()  # the other worker may have added its own
        table.add(np.ones((np.count_nonzero(homes != 2), 2)), KEYS[homes != 2])
        wait_for(lambda: isinstance(outcome(lambda: table.add(np.ones((1, 2)), KEYS[homes == 2][:1])), WorkerLostError))
        return error

    with rehearsal(1, 1, 1, on_lost="continue") as job:
        errors = job.run(work)[:2]
    for error in errors:
        assert isinstance(error, WorkerLostError), error
        assert "host-2 is lost, and with it the rows" in str(error)
        assert error.worker_ids == (2,)


def test_a_removal_that_ran_out_of_time_is_finished_by_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    may_answer, serve = threading.Event(), Home.serve

    def slow(home: Home, host: int, question: Frame) -> Frame | None:
        if question.kind == desk.REMOVE:
            may_answer.wait(30)
        return serve(home, host, question)

    monkeypatch.setattr(Home, "serve", slow)

    def work(session: Session) -> Any:
        table = mv.KeyedTable(2, session=session)
        if session.worker_id == 0:
            table.add(np.ones((1000, 2)), KEYS)
        session.barrier()
        found = None
        if session.worker_id == 0:
            error = outcome(lambda: table.remove(KEYS, timeout_seconds=0.3))
            may_answer.set()
            found = error, table.get(KEYS).any(), len(table)
        session.barrier()
        return found

    with rehearsal(1, 1) as job:
        error, any_left, number = job.run(work)[0]
    assert isinstance(error, WaitTimeoutError), error
    assert (any_left, number) == (False, 0)


def test_a_host_without_memory_is_named_at_the_barrier_and_nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    full = threading.Event()

    def work(session: Session) -> Any:
        table = mv.KeyedTable(2, dtype="int64", session=session)
        calls: Any = table._calls
        there = KEYS[calls.desk.homes[groups_of(KEYS)] == 1]
        session.barrier()
        errors = []
        if session.worker_id == 0:
            full.set()
            table.add(np.ones((there.size, 2), np.int64), there)
            errors += [outcome(session.barrier), outcome(session.barrier)]  # the same one, in which the other is, too
            wait_for(lambda: isinstance(outcome(lambda: table.add(np.ones((1, 2), np.int64), [1])), OutOfMemoryError))
            full.clear()
            wait_for(lambda: outcome(session.barrier) is None)
        else:
            session.barrier()
        session.barrier()
        return errors, table.get(there).tolist(), len(table)

    with monkeypatch.context() as patch, rehearsal(1, 1) as job:
        free = heap.free_memory
        patch.setattr(heap, "free_memory", lambda: 0 if full.is_set() else free())
        (errors, *rows), (_, *others) = job.run(work)
    assert rows == others
    assert len(errors) == 2
    for error in errors:
        assert isinstance(error, OutOfMemoryError), error
        assert "host-1 has no memory for more rows" in str(error)


def test_hosts_have_a_table_of_nearly_all_their_memory_together_and_lose_nothing_at_its_end() -> None:
    """Each host may take 16 MB for the table, as its memory counts what is used; then whoever adds is refused more."""
    most, full, unlimited = 16 << 20, threading.Event(), threading.Event()

    def used(host: int) -> int:
        return os.fstat(job.nodes[host].hosts.here.catalogue._heap.descriptor).st_blocks * 512

    def limited(host: int, before: int) -> Any:
        def shortage(nbytes: int) -> int | None:
            free = before + most - used(host)
            return None if unlimited.is_set() or nbytes <= free else max(free, 0)

        return shortage

    def work(session: Session) -> Any:
        me = session.worker_id
        before = used(me)
        table = mv.KeyedTable(32, dtype="int64", cache_rows=500, session=session)
        calls: Any = table._calls
        (node,) = job.nodes[me].hosts.rows._tables.values()
        for one in (calls, calls.own, node.table.own, node.table.copies.rows):
            one._budget.shortage = limited(me, before)
        session.barrier()
        added: list[Any] = []
        error = None
        while error is None and not full.is_set():
            keys = np.arange(100) + (me << 40 | 100 * len(added))
            error = outcome(lambda keys=keys: table.add(np.full((100, 32), me + 1), keys))
            added += [keys] * (error is None)
        full.set()
        rows = job.nodes[me].hosts.rows
        with rows._lock:
            count = node.table.own.count()
        in_the_end.wait(100)
        unlimited.set()
        wait_for(lambda: outcome(session.barrier) is None, seconds=100)
        mine = np.concatenate(added)
        assert (table.get(mine) == me + 1).all(), "what add has returned for is there, once"
        session.barrier()
        return count, error

    in_the_end = threading.Barrier(3)
    with rehearsal(1, 1, 1) as job:
        results = job.run(work)
    assert sum(count for count, _ in results) * (256 + 40) > 0.8 * 3 * most
    errors = [error for _, error in results if error is not None]
    assert errors
    for error in errors:
        assert isinstance(error, OutOfMemoryError), error


def test_each_node_shows_what_all_workers_do_and_how_often_copies_had_to_be_fetched() -> None:
    def work(session: Session) -> Any:
        table = mv.KeyedTable(2, session=session)
        session.barrier()
        for _ in range(2 + session.worker_id):
            table.add(np.ones((1000, 2)), KEYS)
        there = table.get(KEYS).size // 2 - np.count_nonzero(table._calls.desk.here[groups_of(KEYS)])  # type: ignore[attr-defined]
        session.barrier()
        node = job.nodes[session.worker_id]
        wait_for(lambda: [line["adds"] for line in node.status()["tables"][0]["workers"].values()] == [2, 3])
        wait_for(lambda: node.status()["tables"][0]["shape"] == [1000, 2])  # of all hosts
        session.barrier()
        return there, table.stats(), node.status()

    with rehearsal(1, 1) as job:
        found = job.run(work)
    for worker, (there, stats, status) in enumerate(found):
        (table,) = status["tables"]  # the copies are none
        (link,) = status["links"]
        assert table["copies"] == {name: stats[name] for name in ("copies", "copies_used", "copies_fetched")}
        assert (stats["copies"], stats["copies_used"]) == (0, there * (3 + worker))
        assert there <= stats["copies_fetched"] <= stats["copies_used"]
        assert min(link["bytes_sent"], link["bytes_received"]) > 16 * there
        (seen,) = Observer().see(status).tables
        assert re.fullmatch(r"1000x2 float32, 0 copies \(\d+\.\d% fetched\)", seen.dimensions)


# -- what travels ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [4, 8, 12, 256])
def test_a_frame_arrives_as_it_was(size: int) -> None:
    dice = np.random.default_rng(size)
    pushed, keys = dice.integers(-(2**62), 2**62, 5), dice.integers(-(2**62), 2**62, 3)
    deltas, rows = (dice.integers(0, 255, (n, size), np.uint8) for n in (5, 3))
    for frame in (
        Frame(FETCH, 7, 1, -5, pushed, deltas, keys, rows),
        Frame(FETCH, 2**64 - 1, 2, 0, keys=keys),
        Frame(FETCH | ANSWER, 3, 9, 2, keys=keys, rows=rows),
        Frame(desk.COUNT_KEYS, 1, 1),
    ):
        message = b"".join(bytes(part) for part in frame.parts())
        assert head_of(message).table == frame.table
        assert head_of(message).is_question == (not frame.kind & ANSWER)
        back = Frame.of(memoryview(bytearray(message)), size)
        assert (back.kind, back.number, back.argument) == (frame.kind, frame.number, frame.argument)
        for one, other in ((back.pushed, frame.pushed), (back.keys, frame.keys)):
            np.testing.assert_array_equal(one, other)
        for one, other in ((back.deltas, frame.deltas), (back.rows, frame.rows)):
            assert one.tobytes() == other.tobytes()


def test_nonsense_is_refused() -> None:
    frame = Frame(FETCH, 7, 1, 0, np.arange(3), np.zeros((3, 8), np.uint8), np.arange(4))
    for seed in range(200):
        dice = random.Random(seed)
        message = bytearray(b"".join(bytes(part) for part in frame.parts()))
        message[dice.choice((4, 5, 32, 33, 36, 37))] ^= 1 + dice.randrange(255)  # a count
        message = message[: dice.choice((10, 39, 41, len(message), len(message)))]
        with pytest.raises(ProtocolError):
            head_of(bytes(message))
            Frame.of(memoryview(message), 8)
            pytest.fail(f"seed {seed}")


# -- a host at rest --------------------------------------------------------------------------------------------------


def test_a_host_at_rest_hears_of_an_add_at_once_and_looks_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_AGE_SECONDS", "_LATER_SECONDS"):
        monkeypatch.setattr(spread_tables, name, 600.0)  # so long it rests if nobody wakes it
    looks = []
    watch = HeldTables.look

    def look(tables: HeldTables, resting: bool) -> bool:
        looks.append(resting)
        return watch(tables, resting)

    monkeypatch.setattr(HeldTables, "look", look)
    there = KEYS[homes_of(range(2))[groups_of(KEYS)] == 1]
    met = threading.Barrier(2)

    def work(session: Session) -> Any:
        table = mv.KeyedTable(2, dtype="int64", session=session)
        bell = session.shared_memory(desk.BELL, desk.BELL_WORDS.size, on_this_host=True)
        session.barrier()
        began, before = time.monotonic(), len(looks)
        for turn in range(1, 4):
            wait_for(lambda: load32(bell.address + desk.RESTS) == 1)
            met.wait(30)
            if session.worker_id == 0:
                table.add(np.ones((there.size, 2), np.int64), there)
            else:
                wait_for(lambda turn=turn: bool((table.get(there) == turn).all()))  # type: ignore[misc]
            met.wait(60)
        return (len(looks) - before) / (time.monotonic() - began)

    with rehearsal(1, 1) as job:
        rates = job.run(work)
    assert max(rates) < 100, "there is no dense table: both nodes together look 40 times a second, and not 400"
