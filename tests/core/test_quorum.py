"""Rounds with a quorum: nobody waits for who is late, whose adds are in the next round, once; a run can be replayed."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from core_support import Worker, bits, in_threads, let_die, outcome, together, wait_for

import multiverso as mv
from multiverso.errors import DeadlockError, NotInThisJobError, SnapshotError, StartupError, WaitTimeoutError
from multiverso.layout import words as at
from multiverso.memory.words import load64
from multiverso.params import SharedParams
from multiverso.runtime import Node, Session
from multiverso.runtime.node import numbers
from multiverso.runtime.session.observing import observe
from multiverso.shards.shard import TableProgress, WorkerProgress
from multiverso.updaters import adam, mean

CHUNK = at.CHUNK_BYTES // 4


def delta(worker: int, number: int, size: int) -> Any:
    """Numbers of very different size, so that another order of the sums gives other bits."""
    drawn = np.random.default_rng([worker, number])
    return (drawn.standard_normal(size) * 10.0 ** drawn.integers(-6, 7, size)).astype("f4")


def calls(session: Session, table: Any, rounds: int, pause: Callable[[], None] = lambda: None) -> list[bytes]:
    """Every way to add and read of an array; returns the bits that were read."""
    me, size, seen = session.worker_id, table.size, []
    local = table.get()
    last = local.copy()
    for number in range(rounds):
        pause()
        kind = (number + me) % 4
        if kind < 2:
            for part in range(kind + 1):
                table.add(delta(me, 10 * number + part, size))
            seen.append(bits(table.get()))
            continue
        if kind == 3:
            table.add(delta(me, 10 * number, size))
        local += delta(me, 10 * number + 5, size)
        table.exchange(local, last)
        seen.append(bits(local))
    return seen


# -- all on time ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("size", [1, 17, 5000, CHUNK + 1])
def test_with_all_on_time_the_bits_are_those_of_rounds(workers: int, size: int) -> None:
    def work(session: Session) -> Any:
        table = mv.ArrayTableHandler(size, delta(9, 0, size), session=session)
        return calls(session, table, 5), bits(table.snapshot()), table.version

    expected = together(work, workers, sync=True)
    assert together(work, workers, sync=True, quorum=workers) == expected
    assert together(work, workers, sync=True, quorum=1.0) == expected
    # nobody waits so long: all have come before
    assert together(work, workers, sync=True, quorum=1, grace_seconds=1000) == expected


@pytest.mark.parametrize("updater", [mean(), adam(0.1)], ids=["mean", "adam"])
def test_updaters_have_the_bits_of_rounds(updater: Any) -> None:
    def work(session: Session) -> Any:
        table = mv.ArrayTableHandler(300, delta(9, 0, 300), updater=updater, session=session)
        return calls(session, table, 6), bits(table.snapshot()), [bits(state) for state in table.copied().states]

    assert together(work, 3, sync=True, quorum=3) == together(work, 3, sync=True)


@pytest.mark.parametrize("rule", [mv.rules.model_averaging(), mv.rules.easgd(0.3), None], ids=str)
def test_rules_have_the_bits_of_rounds(rule: Any) -> None:
    def work(session: Session) -> Any:
        local = delta(session.worker_id, 0, 200)
        shared = mv.rules.share(local, rule, session=session)
        seen = []
        for number in range(4):
            local += delta(session.worker_id, number, 200)
            shared.exchange(local)
            seen.append(bits(local))
        return seen

    assert together(work, 3, sync=True, quorum=3) == together(work, 3, sync=True)


def test_rows_have_the_bits_of_rounds() -> None:
    def work(session: Session) -> Any:
        table, seen = mv.MatrixTableHandler(6, 5, delta(9, 0, 30), session=session), []
        for number in range(4):
            table.add(delta(session.worker_id, number, 15), [0, 2, 5])
            seen.append(bits(table.get([5, 0]) if number % 2 else table.get()))
        return seen

    assert together(work, 3, sync=True, quorum=3) == together(work, 3, sync=True)


# -- late ----------------------------------------------------------------------------------------------------------


def test_who_comes_late_is_in_the_next_round_once() -> None:
    held, rounds = threading.Event(), 20

    def work(session: Session) -> Any:
        table = mv.ArrayTableHandler(3, session=session)
        local = table.snapshot()
        last = local.copy()
        session.barrier()  # one that has only just opened it is not late
        if session.worker_id == 2:
            assert held.wait(30)
        for number in range(rounds):
            local += 1
            table.exchange(local, last)
            if session.worker_id != 2 and number == rounds // 2:
                held.set()
        read = local.tolist()
        session.barrier()
        return read, table.snapshot().tolist(), session.statistics()["tables"][1]["late"]

    results = together(work, 3, sync=True, quorum=2)
    assert [final for _, final, _ in results] == [[60.0] * 3] * 3, "each add is in once"
    lates = [late for *_, late in results]
    assert lates[2] >= 1, lates


def test_a_round_is_closed_when_the_grace_of_its_quorum_is_over() -> None:
    """The third comes while the first two's grace runs, and is in their round; or it comes after, and is not."""

    def work(session: Session) -> Any:
        table = mv.ArrayTableHandler(1, session=session)
        if session.worker_id == 2:
            others = session.control
            wait_for(lambda: all(others.worker(i).wait is not None for i in (0, 1)) or table.version)
        table.add([1.0])
        first = table.get()[0]
        session.barrier()  # who has come here is not waited for
        return first, table.version

    assert together(work, 3, sync=True, quorum=2, grace_seconds=1000) == [(3.0, 1)] * 3
    early, late = [2.0, 2.0], 3.0
    results = together(work, 3, sync=True, quorum=2, grace_seconds=0.2)
    assert [r[0] for r in results] in ([*early, late], [3.0] * 3)


def test_half_of_those_that_are_there() -> None:
    """A fraction counts those that are there: of three it is two, and of two, after one has left, one."""
    done = threading.Event()

    def work(session: Session) -> Any:
        table = mv.ArrayTableHandler(1, session=session)
        if session.worker_id == 2:
            assert done.wait(30)
            return session.worker_id
        table.add([1.0])
        table.get()
        if session.worker_id == 1:
            return session.worker_id
        wait_for(lambda: session.live_workers() == [0, 2])
        table.add([1.0])
        value = table.get()[0]
        done.set()
        return value

    assert together(work, 3, sync=True, quorum=0.5) == [3.0, 1, 2]


def test_who_waits_in_a_barrier_is_not_waited_for() -> None:
    def work(session: Session) -> Any:
        table = mv.ArrayTableHandler(1, session=session)
        for _ in range(3 + 4 * (session.worker_id == 0)):
            table.add([1.0])
            table.get()
        session.barrier()
        return table.snapshot()[0], table.version

    # after three rounds of all the last four are of worker 0, alone, though the quorum is two
    (total, version), *others = together(work, 3, sync=True, quorum=3)
    assert (total, version) == (13.0, 7)
    assert others == [(total, version)] * 2


def with_a_late_one_elsewhere(session: Session, met: threading.Barrier, die: Callable[[Session], None]) -> Any:
    """Four workers: one waits for a table's next round, another dies, and two are left at the other table."""
    me = session.worker_id
    first, second = (mv.ArrayTableHandler(1, session=session) for _ in range(2))
    session.barrier()  # one that has only just opened it is not late
    if me == 3:
        met.wait(30)
    first.add([1.0])
    read = first.get()[0]
    if me == 3:
        second.add([1.0])
        second.get()
    else:
        met.wait(30)
        wait_for(lambda: session.control.worker(3).wait is not None)
        if me == 2:
            die(session)
            return None
        wait_for(lambda: session.live_workers() == [0, 1, 3])
        second.add([1.0])
        assert second.get()[0] == 2.0, "three are required, and nobody else comes"
        first.add([1.0])
        first.get()
    session.barrier()
    return read, first.snapshot()[0], second.snapshot()[0]


def test_who_waits_late_at_another_table_is_not_waited_for() -> None:
    met = threading.Barrier(4)
    options: dict[str, Any] = {"sync": True, "quorum": 3, "on_lost": "continue"}
    results = together(lambda session: with_a_late_one_elsewhere(session, met, let_die), 4, **options)
    assert results == [(3.0, 6.0, 3.0), (3.0, 6.0, 3.0), None, (6.0, 6.0, 3.0)]


def test_who_has_given_up_a_late_read_is_waited_for_again() -> None:
    closed, given_up = threading.Event(), threading.Event()

    def work(session: Session) -> Any:
        me = session.worker_id
        first, second, third = tables = [mv.ArrayTableHandler(1, session=session) for _ in range(3)]
        session.barrier()
        for table in tables[1:]:  # there is time for all to come
            table._how._progress[at.ROUND_GRACE] = 10**12  # type: ignore[attr-defined]
        if me == 2:
            assert closed.wait(30)
            assert isinstance(outcome(lambda: first.get(timeout_seconds=0.1)), WaitTimeoutError)
            given_up.set()
        else:
            first.get()
            closed.set()
            assert given_up.wait(30)
            wait_for(lambda: session.control.worker(2).wait is not None)
        second.get()
        third.add([1.0])
        if me == 2:
            wait_for(lambda: all(session.control.worker(other).wait is not None for other in (0, 1)))
        read = third.get()[0]
        session.barrier()
        return read

    assert together(work, 3, sync=True, quorum=2) == [3.0] * 3


def test_a_deadlock_names_who_is_missing() -> None:
    told = threading.Barrier(4)

    def work(session: Session) -> Any:
        tables = [mv.ArrayTableHandler(1, session=session) for _ in "ab"]
        error = outcome(tables[session.worker_id % 2].get)
        told.wait(30)  # who leaves is no longer waited for
        return error

    errors = together(work, 4, sync=True, quorum=3)
    assert all(isinstance(error, DeadlockError) for error in errors), errors
    assert "round 1 of table 1, which needs workers 1, 3" in str(errors[0])


def test_the_grace_follows_a_workers_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0]
    clock = SimpleNamespace(monotonic_ns=lambda: now[0], sleep=time.sleep)
    monkeypatch.setattr("multiverso.consistency.quorum.time", clock)
    with Node(1) as node, Session(node.address, 0, sync=True, quorum=1, grace_seconds="auto") as session:
        table: Any = mv.ArrayTableHandler(1, session=session)
        graces, windows = [], []
        for milliseconds in (10, 30, 20, 20, 1000):
            now[0] += milliseconds * 1_000_000
            table.add([1.0])
            table.get()
            graces.append(table._how._progress[at.ROUND_GRACE] / 1e6)
            line = table._how.access.line + at.EXPECTED
            windows.append([load64(line) / 1e6, load64(line + 8) / 1e6])
    assert graces == [0, 3, 2.5, 2, 2.5]  # of the steps from the first read on: a tenth of their median
    # none before two reads; then the median of the steps behind the read, and the grace to both sides
    assert windows == [[0, 0], [67, 73], [82.5, 87.5], [98, 102], [1102.5, 1107.5]]


def test_who_is_not_nearly_as_fast_is_not_waited_for() -> None:
    done = threading.Event()

    def work(session: Session) -> None:
        table = mv.ArrayTableHandler(1, session=session)
        if session.worker_id == 2:
            assert done.wait(60)
        while table.version < 5:
            table.add([1.0])
            table.get()
        done.set()

    together(work, 3, sync=True, quorum=2, grace_seconds="auto")


def test_the_grace_is_for_those_who_may_come_just_now() -> None:
    done = threading.Event()

    def work(session: Session) -> None:
        table: Any = mv.ArrayTableHandler(1, session=session)
        if session.worker_id == 2:
            table._how._expect(1, 2)  # long ago
            assert done.wait(60)
        while table.version < 5:
            table.add([1.0])
            table.get()
        done.set()

    together(work, 3, sync=True, quorum=2, grace_seconds=1000)


def test_a_replacement_that_has_been_in_fewer_barriers_closes_no_round_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numbers, "has_ended", lambda pid: True)
    options: dict[str, Any] = {"sync": True, "quorum": 3, "grace_seconds": 1000, "timeout_seconds": 30}
    with Node(3, on_lost="continue", replaces=True) as node:
        sessions = in_threads([lambda i=i: Session(node.address, i, **options) for i in range(3)])
        tables = in_threads([lambda s=s: mv.ArrayTableHandler(1, session=s) for s in sessions])
        in_threads([session.barrier for session in sessions])
        let_die(sessions[2])
        wait_for(lambda: sessions[0].control.liveness(2) == at.LOST)
        with Session(node.address, 2, **options) as again:
            tables[2] = mv.ArrayTableHandler(1, session=again)

            def read(worker: int) -> Any:
                if worker < 2:  # after it: it waits for them
                    wait_for(lambda: again.control.worker(2).wait is not None)
                tables[worker].add([10.0**worker])
                return tables[worker].get().tolist()

            assert in_threads([lambda i=i: read(i) for i in range(3)]) == [[111.0]] * 3
        for session in sessions:
            session.shutdown()


def test_while_the_grace_runs_nobody_is_missing() -> None:
    progress = WorkerProgress(staged=7, folded=6, first_step=1, clock=0)
    late = WorkerProgress(staged=3, folded=3, first_step=1, clock=0)
    table = TableProgress("t", 1, {0: progress, 1: late}, by_quorum=True)
    assert table.behind(7, 0) == [1]
    assert table.behind(7, 1) == []


# -- stopped, killed -----------------------------------------------------------------------------------------------

LOOP = """
with Session(node, worker_id, sync=True, quorum=2, on_lost="continue", timeout_seconds=60) as session:
    table = mv.ArrayTableHandler(SIZE, session=session)
    local = table.snapshot()
    last, added = local.copy(), 0
    say("ready")
    while table.version < ROUNDS:
        local += 1
        added += 1
        table.exchange(local, last)
        assert (local == local[0]).all(), "a torn read"
    session.barrier()
    final = table.snapshot()
    assert (final == final[0]).all()
    say(added, float(final[0]))
"""


@pytest.mark.parametrize("size", [1, 100_000])
def test_a_stopped_worker_stops_nobody_and_is_in_again_when_it_continues(size: int) -> None:
    rounds, drawn = 3000 if size == 1 else 300, random.Random(size)
    text = LOOP.replace("SIZE", str(size)).replace("ROUNDS", str(rounds))
    with Node(3) as node:
        members = [Worker(node, i, text) for i in range(3)]
        with members[0], members[1], members[2]:
            for worker in members:
                assert worker.hear() == ["ready"]
            while rounds_of(node) < rounds * 0.8:
                stopped = drawn.choice(members)
                stopped.process.send_signal(signal.SIGSTOP)
                goal = min(rounds_of(node) + 20, rounds)
                wait_for(lambda goal=goal: rounds_of(node) >= goal)
                stopped.process.send_signal(signal.SIGCONT)
            said = [worker.hear() for worker in members]
            assert [worker.end() for worker in members] == [0, 0, 0]
    total = sum(added for added, _ in said)
    assert [final for _, final in said] == [total] * 3


def rounds_of(node: Node) -> int:
    """How many rounds the table of a job has gone through."""
    tables = observe(node.address)["tables"]
    return int(tables[0]["rounds"]) if tables else 0


@pytest.mark.parametrize("seed", range(3))
def test_a_killed_worker_is_in_a_round_as_a_whole_or_not(seed: int) -> None:
    rounds, drawn = 2000, random.Random(seed)
    text = LOOP.replace("SIZE", "5000").replace("ROUNDS", str(rounds))
    with Node(4) as node:
        members = [Worker(node, i, text) for i in range(4)]
        with members[0], members[1], members[2], members[3]:
            for worker in members:
                assert worker.hear() == ["ready"]
            until = drawn.randrange(rounds // 2)
            wait_for(lambda: rounds_of(node) >= until)
            dead = drawn.choice(members)
            dead.process.kill()
            said = [worker.hear() for worker in members if worker is not dead]
            for worker in members:
                worker.end()
    finals = {final for _, final in said}
    assert len(finals) == 1
    of_dead = finals.pop() - sum(added for added, *_ in said)
    assert of_dead in range(rounds + 1)


# -- replays -------------------------------------------------------------------------------------------------------


def _program(session: Session, delays: random.Random) -> Any:
    def pause() -> None:
        if delays.random() < 0.5:
            time.sleep(delays.random() * 0.004)

    table = mv.ArrayTableHandler(50, delta(9, 0, 50), session=session)
    pause()
    assert table.version == 0  # it has read none
    params = SharedParams([delta(8, 0, 6)], name="managed", session=session)
    matrix = mv.MatrixTableHandler(4, 3, name="rows", session=session)
    seen = calls(session, table, 12, pause)
    session.barrier()
    for _ in range(3):
        params.arrays[0][:] *= 1.5 + session.worker_id
        pause()
        params.exchange()
        seen.append(bits(params.arrays[0]))
    session.barrier()  # or those that are late would wait for each other, in different tables
    for number in range(8):
        matrix.add(delta(session.worker_id, number, 6), [0, 3])
        pause()
        seen.append(bits(matrix.get([3])))
    session.barrier()
    while table.version < 20:
        table.add(delta(session.worker_id, table.version, 50))
        seen.append(bits(table.get()))
        pause()  # others go on meanwhile
        seen.append(table.version)
    session.barrier()
    if session.worker_id == 1:
        table.add(delta(1, 99, 50))  # it leaves an add
    elif session.worker_id == 2:
        seen.append(bits(table.get()))
        seen.append(bits(table.get()))
    return seen


@pytest.mark.parametrize("seed", range(4))
def test_a_replay_has_the_same_bits_whatever_the_timing(seed: int, tmp_path: Path) -> None:
    options: dict[str, Any] = {"sync": True, "quorum": 2, "grace_seconds": 0.0005 * seed}

    def run(number: int, **more: Any) -> Any:
        return together(
            lambda session: _program(session, random.Random(100 * number + session.worker_id)), 4, **options, **more
        )

    first = run(seed, record=tmp_path / "a")
    again = run(seed + 50, record=tmp_path / "b", replay=tmp_path / "a")
    assert again == first
    files = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert files == [f"table-{table}.worker-{worker}.json" for table in (1, 2, 3) for worker in range(4)]
    for name in files:
        assert (tmp_path / "a" / name).read_text() == (tmp_path / "b" / name).read_text()


def test_a_record_that_cannot_be_written_is_refused() -> None:
    (error,) = together(
        lambda session: outcome(lambda: mv.ArrayTableHandler(2, session=session)),
        1,
        sync=True,
        quorum=1,
        record="/proc/x",
    )
    assert isinstance(error, SnapshotError)
    assert str(error).startswith("/proc/x cannot be written: ")


def test_a_replay_is_refused_with_other_workers_another_table_or_no_record(tmp_path: Path) -> None:
    together(lambda session: mv.ArrayTableHandler(2, session=session).get(), 2, sync=True, quorum=1, record=tmp_path)

    def said(workers: int, size: int, folder: Path) -> str:
        with pytest.raises(SnapshotError) as caught:
            together(
                lambda session: mv.ArrayTableHandler(size, session=session), workers, sync=True, quorum=1, replay=folder
            )
        return str(caught.value)

    assert "of 2 workers, and this is" in said(1, 2, tmp_path)
    assert "the array of 2 float32" in said(2, 3, tmp_path)
    assert "there is no" in said(2, 2, tmp_path / "nowhere")
    (tmp_path / "table-1.worker-1.json").write_text('{"workers":2,"table":"x","reads":[[1,1],[1,1]]}')
    said(2, 2, tmp_path)


def test_a_replay_that_reads_more_often_than_the_record_is_told_so(tmp_path: Path) -> None:
    def work(session: Session, reads: int) -> Any:
        table = mv.ArrayTableHandler(2, session=session)
        return outcome(lambda: [table.get() for _ in range(reads)])

    together(lambda session: work(session, 2), 2, sync=True, quorum=2, record=tmp_path)
    errors = together(lambda session: work(session, 3), 2, sync=True, quorum=2, replay=tmp_path)
    assert all("the recorded run ends here" in str(error) for error in errors), errors


def test_a_replay_in_which_a_worker_does_less_is_told_so(tmp_path: Path) -> None:
    """Worker 1 leaves early, staged or not; nobody waits for it until a deadline, or reads a round without it."""

    def work(session: Session, reads: int, leaves_an_add: bool) -> Any:
        table = mv.ArrayTableHandler(2, session=session)

        def go() -> None:
            for _ in range(reads):
                table.add(np.full(2, 1 + session.worker_id))
                table.get()

        error = outcome(go)
        if leaves_an_add and session.worker_id == 1:
            table.add(np.ones(2))
        return error

    together(lambda session: work(session, 6, leaves_an_add=False), 3, sync=True, quorum=3, record=tmp_path)
    for leaves_an_add in (False, True):
        errors = together(
            lambda session: work(session, 2 if session.worker_id == 1 else 6, leaves_an_add),  # noqa: B023
            3,
            sync=True,
            quorum=3,
            replay=tmp_path,
        )
        assert errors[1] is None
        assert all("worker 1 has left before a round" in str(errors[worker]) for worker in (0, 2)), errors


def test_a_worker_that_is_killed_leaves_no_record(tmp_path: Path) -> None:
    (tmp_path / "table-1.worker-0.json").write_text("of a run before")
    text = f"""
session = Session(node, worker_id, sync=True, quorum=1, record={str(tmp_path)!r})
mv.ArrayTableHandler(2, session=session).get()
say("read")
sys.stdin.readline()
"""
    with Node(1) as node, Worker(node, 0, text) as worker:
        assert worker.hear() == ["read"]
    assert not list(tmp_path.iterdir())


# -- what else there is of a table -----------------------------------------------------------------------------------


def test_values_can_be_set_saved_loaded_and_looked_at(tmp_path: Path) -> None:
    path = tmp_path / "table.safetensors"

    def work(session: Session) -> Any:
        table = mv.ArrayTableHandler(5, updater=adam(0.1), session=session)
        for number in range(3):
            table.add(delta(session.worker_id, number, 5))
            table.get()
        session.barrier()
        if session.worker_id == 0:
            table.save(path)
        saved = table.snapshot()
        session.barrier()
        if session.worker_id == 1:
            table.set(np.zeros(5))
        session.barrier()
        assert not table.snapshot().any()
        assert not table.view().any()
        session.barrier()
        if session.worker_id == 0:
            table.load(path)
        session.barrier()
        assert bits(table.snapshot()) == bits(saved)
        table.add(delta(session.worker_id, 7, 5))
        return bits(table.get()), table.version

    assert together(work, 2, sync=True, quorum=2) == together(work, 2, sync=True)


def test_a_rule_is_relative_to_what_was_set_last() -> None:
    def work(session: Session) -> Any:
        local = np.zeros(4, "f4")
        shared = mv.rules.share(local, mv.rules.model_averaging(), session=session)
        local += session.worker_id
        shared.exchange(local)
        session.barrier()
        if session.worker_id == 0:
            shared.table.set(np.full(4, 10.0))
        session.barrier()
        local += 1
        shared.exchange(local)
        return local.tolist()

    assert together(work, 2, sync=True, quorum=2) == together(work, 2, sync=True)


# -- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"quorum": 2}, "sync=True"),
        ({"sync": True, "quorum": 0}, "quorum is a number of workers"),
        ({"sync": True, "quorum": True}, "quorum is a number of workers"),
        ({"sync": True, "quorum": 4097}, "quorum is a number of workers"),
        ({"sync": True, "quorum": 1.5}, "quorum is a number of workers"),
        ({"sync": True, "quorum": float("nan")}, "quorum is a number of workers"),
        ({"sync": True, "quorum": "half"}, "quorum is a number of workers"),
        ({"sync": True, "quorum": 2}, "more than the 1 workers"),
        ({"sync": True, "quorum": 1, "grace_seconds": -1}, "grace_seconds is a number"),
        ({"sync": True, "quorum": 1, "grace_seconds": float("nan")}, "grace_seconds is a number"),
        ({"sync": True, "quorum": 1, "grace_seconds": "automatic"}, "or .auto."),
        ({"sync": True, "quorum": 1, "staleness": 1}, "exclude each other"),
        ({"sync": True, "grace_seconds": 1}, "give quorum="),
        ({"sync": True, "record": "x"}, "give quorum="),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], words: str) -> None:
    with Node(1) as node, pytest.raises(StartupError, match=words):
        Session(node.address, 0, **options)


def test_all_workers_ask_for_the_same_quorum() -> None:
    with Node(2) as node:
        errors = []

        def join(worker: int, **options: Any) -> Any:
            return outcome(
                lambda: Session(node.address, worker, sync=True, start_timeout_seconds=5, **options).shutdown()
            )

        first = threading.Thread(target=lambda: errors.append(join(0, quorum=1)))
        first.start()
        wait_for(lambda: observe(node.address)["workers"])
        error = join(1, quorum=2, grace_seconds=1)
        first.join()
    assert "asks for quorum of 2, grace_seconds=1 " in str(error)
    assert "the others for quorum of 1, grace_seconds=0 " in str(error)


def test_a_keyed_table_is_refused() -> None:
    error = together(lambda session: outcome(lambda: mv.KeyedTable(2, session=session)), 1, sync=True, quorum=1)[0]
    assert isinstance(error, NotInThisJobError)
    assert "quorum" in str(error)
