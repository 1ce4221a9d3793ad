"""mv.batches: each sample once over all workers, whoever asks, dies, leaves or comes late; and mv.Counter."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from core_support import MODES, outcome, together, wait_for

import multiverso as mv
from multiverso.errors import (
    ClosedError,
    DeadlockError,
    StartupError,
    TableMismatchError,
    WaitTimeoutError,
    WorkerLostError,
)
from multiverso.hosts.control.dealing import Deal, Hand
from multiverso.hosts.control.messages import Line
from multiverso.layout import words as at
from multiverso.memory import mutex
from multiverso.runtime import Node, Session
from multiverso.tables import batches
from multiverso.tables.batches import MOST_AHEAD, deal


def samples(parts: list[list[np.ndarray]]) -> list[int]:
    return sorted(int(row) for part in parts for rows in part for row in rows)


@pytest.mark.parametrize(("n", "size", "workers"), [(0, 3, 2), (1, 5, 3), (100, 7, 3), (12, 4, 1)])
def test_each_sample_is_dealt_once_in_each_epoch(n: int, size: int, workers: int) -> None:
    def work(session: Session) -> list[list[np.ndarray]]:
        return [list(deal(session, n, size, seed=3)) for _ in range(3)]

    parts = together(work, workers)
    epochs = []
    for epoch in range(3):
        own = [part[epoch] for part in parts]
        assert samples(own) == list(range(n))
        assert all(rows.dtype == np.int64 and 0 < len(rows) <= size for part in own for rows in part)
        epochs.append({tuple(rows) for part in own for rows in part})
        order = np.random.default_rng([3, epoch]).permutation(n)
        assert epochs[epoch] == {tuple(order[i : i + size]) for i in range(0, n, size)}
    assert n < 10 or epochs[0] != epochs[1]


def test_a_slow_worker_gets_fewer_and_the_end_waits_for_its_last_batch() -> None:
    quick_are_done, slow_has_one = threading.Event(), threading.Event()
    dealt: list[int] = []

    def work(session: Session) -> int:
        number = 0
        if session.worker_id:
            slow_has_one.wait(30)
        for rows in deal(session, 20, 2):
            number += 1
            dealt.extend(rows)
            if session.worker_id == 0:
                slow_has_one.set()
                assert quick_are_done.wait(30)
            elif len(dealt) == 20:
                quick_are_done.set()
        assert quick_are_done.is_set()
        return number

    assert together(work, 2) == [1, 9]
    assert sorted(dealt) == list(range(20))


def killed(session: Session) -> None:
    """What the node says and does when a worker's process is gone."""
    session.control.settle(session.worker_id, at.LOST)


def test_a_lost_workers_batch_is_dealt_again_and_only_that() -> None:
    has_one = threading.Event()
    loops = []  # kept: a killed worker's loop is not left

    def work(session: Session) -> Any:
        if session.worker_id:
            assert has_one.wait(30)
            return list(deal(session, 30, 3))
        loops.append(deal(session, 30, 3))
        got = [next(loops[0]), next(loops[0])]
        killed(session)  # in its second batch
        has_one.set()
        return got

    dead, *living = together(work, 3, on_lost="continue")
    assert samples([dead[:1], *living]) == list(range(30)), "its second batch is among the others'"


KILLED = """
import os, signal, sys
import multiverso as mv
mv.init()
rows_of = []
for rows in mv.batches(400, 4):
    if mv.worker_id() and len(rows_of) == int(sys.argv[1]) * mv.worker_id():
        os.kill(os.getpid(), signal.SIGKILL)
    rows_of.append(rows.tolist())
    print(*rows, flush=True)
mv.shutdown()
"""


def test_each_sample_is_worked_on_once_through_kills(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(KILLED)
    done = subprocess.run(
        [sys.executable, "-m", "multiverso", "run", "-n", "3", "--on-failure", "continue", "job.py", "5"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = sorted(int(row) for line in done.stdout.splitlines() for row in line.split()[1:])
    assert rows == list(range(400)), "each was killed before it had worked on what it had"


def test_a_lost_worker_is_an_error_unless_the_others_go_on() -> None:
    has_one, told = threading.Event(), threading.Barrier(2)
    loops = []

    def work(session: Session) -> Any:
        error = None
        if session.worker_id:
            assert has_one.wait(30)
            error = outcome(lambda: list(deal(session, 30, 3)))
        else:
            loops.append(deal(session, 30, 3))
            next(loops[0])
            killed(session)
            has_one.set()
        told.wait(30)
        return error

    error = together(work, 2)[1]
    assert isinstance(error, WorkerLostError)
    assert error.worker_ids == (0,)
    assert "on_lost='continue'" in str(error)


def test_who_leaves_the_loop_has_finished_and_who_leaves_the_job_has_not() -> None:
    left = threading.Event()
    first: list[int] = []

    def breaks(session: Session) -> list[int]:
        if session.worker_id:
            assert left.wait(30)
            return [int(row) for rows in deal(session, 10, 2) for row in rows]
        for rows in deal(session, 10, 2):
            first[:] = map(int, rows)
            break
        left.set()
        return first

    one, other = together(breaks, 2)
    assert sorted(one + other) == list(range(10))

    left.clear()

    def leaves(session: Session) -> list[int]:
        if session.worker_id:
            assert left.wait(30)
            return [int(row) for rows in deal(session, 10, 2) for row in rows]
        loop = deal(session, 10, 2)
        next(loop)
        session.shutdown()
        left.set()
        return []

    assert sorted(together(leaves, 2)[1]) == list(range(10))


@pytest.mark.parametrize("dies", [False, True])
def test_what_was_taken_ahead_is_dealt_again_after_a_death_only(dies: bool) -> None:
    """A loader asks for its last batches long before it hands them out: its loop is over, its work is not."""
    ended, told = threading.Event(), threading.Event()

    def work(session: Session) -> list[Any]:
        if session.worker_id:
            assert ended.wait(30)
            others = list(deal(session, 12, 2))
            told.set()
            return others
        mine = list(deal(session, 12, 2, ahead=2))
        if dies:
            killed(session)
        else:
            session.shutdown()
        ended.set()
        assert told.wait(30)  # the end of this thread's session is a leaving
        return mine

    mine, others = together(work, 2, on_lost="continue")
    assert samples([mine]) == list(range(12))
    assert [tuple(rows) for rows in others] == ([tuple(rows) for rows in mine[-2:]] if dies else [])


def test_a_death_under_the_lock_leaves_the_deal_before() -> None:
    """A worker dies where it has written what is to be dealt next, before that counts, and with the lock."""
    written = threading.Event()

    def work(session: Session) -> list[int]:
        if session.worker_id == 0:
            loop = deal(session, 12, 2)
            next(loop)
            loops.append(loop)
            shared: Any = batches._dealers[session]._shared

            def dies() -> None:
                mutex.lock(shared._memory.address, 1.0)
                which = int(shared._head["which"])
                shared._rooms[1 - which][:] = b"\xff" * len(shared._rooms[1 - which])

            thread = threading.Thread(target=dies)  # its end is the holder's death
            thread.start()
            thread.join()
            killed(session)
            written.set()
            return []
        assert written.wait(30)
        return [int(row) for rows in deal(session, 12, 2) for row in rows]

    loops: list[Any] = []
    assert sorted(together(work, 2, on_lost="continue")[1]) == list(range(12))


def test_the_memory_of_the_largest_deal_is_there_before_anything_is_dealt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the lack of it is a SIGBUS, in the middle of an epoch."""
    most, held = 1 << 62, MOST_AHEAD + 1
    hands = {i: Hand(most, most, most, [most] * held, most, most, {"batches": [most]}) for i in range(at.MAX_WORKERS)}
    lines = {i: Line(i, most, at.ALIVE, at.ALIVE) for i in hands}
    largest = Deal(most, (most,) * 4, most, most, [most] * held * len(hands), hands, lines)
    asked: list[tuple[int, dict[str, Any]]] = []
    share = Session.shared_memory

    def shared_memory(session: Session, name: str, nbytes: int, *more: Any, **options: Any) -> Any:
        asked.append((nbytes, options))
        return share(session, name, nbytes, *more, **options)

    monkeypatch.setattr(Session, "shared_memory", shared_memory)
    together(lambda session: list(deal(session, 4, 2)), 1)
    ((nbytes, options),) = asked
    assert 2 * (len(msgspec.msgpack.encode(largest)) + 8) < nbytes
    assert not options.get("sparse")


def test_the_next_epoch_begins_when_all_have_left_the_last() -> None:
    taken, waited = threading.Event(), threading.Event()

    def work(session: Session) -> Any:
        if session.worker_id == 0:
            loop = deal(session, 4, 2)
            next(loop)
            taken.set()
            nested = outcome(lambda: list(deal(session, 4, 2)))
            assert waited.wait(30)
            return nested, list(loop), len(list(deal(session, 4, 2)))
        assert taken.wait(30)
        first = list(deal(session, 4, 2, ahead=1))  # does not wait for worker 0's batch at the end
        waits = outcome(lambda: list(deal(session, 4, 2, timeout_seconds=0.2)))
        waited.set()
        return waits, first, len(list(deal(session, 4, 2)))

    (nested, _, second), (waits, first, other) = together(work, 2)
    assert isinstance(nested, StartupError)
    assert "cannot be nested" in str(nested)
    assert isinstance(waits, WaitTimeoutError)
    assert "missing worker 0" in str(waits)
    assert len(first) == 1
    assert second + other == 2


def test_what_differs_is_refused_before_anything_is_dealt() -> None:
    turn = threading.Barrier(2)

    def work(session: Session) -> Any:
        if session.worker_id:
            turn.wait(30)
        loop = deal(session, 10 + session.worker_id, 5)
        first = outcome(lambda: next(loop))
        if not session.worker_id:
            turn.wait(30)
        return first, [first, *list(loop)] if not session.worker_id else list(deal(session, 10, 5))

    (_, kept), (error, others) = together(work, 2)
    assert isinstance(error, TableMismatchError)
    assert "(n, size, seed, epoch) = (10, 5, 0, 0), this worker asks for (11, 5, 0, 0)" in str(error)
    assert samples([kept, others]) == list(range(10))


def test_bad_arguments_and_modes_are_refused_at_the_call() -> None:
    def work(session: Session) -> None:
        for bad in ({"n": -1}, {"size": 0}, {"seed": -1}, {"epoch": -1}, {"ahead": MOST_AHEAD + 1}):
            with pytest.raises(ValueError, match=next(iter(bad))):
                deal(session, **{"n": 1, "size": 1, **bad})
        with pytest.raises(ValueError, match=r"n is a whole number, 0 or more; got 1\.5"):
            deal(session, 1.5, 1)  # type: ignore[arg-type]

    together(work, 1)
    for mode in ("sync", "bounded"):
        with pytest.raises(StartupError, match=f"in {mode} mode.*mv.shard"):
            together(lambda session: deal(session, 1, 1), 1, **MODES[mode])


def test_everybody_in_a_deadlock_with_an_epochs_end_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("multiverso.runtime.session.waiting._STILL_SECONDS", 0.3)
    has_one, told = threading.Event(), threading.Barrier(2)

    def work(session: Session) -> str:
        if session.worker_id:
            assert has_one.wait(30)
            error = outcome(lambda: list(deal(session, 4, 2)))
        else:
            for _ in deal(session, 4, 2):
                has_one.set()
                error = outcome(session.barrier)
                told.wait(30)
                return str(error)
        told.wait(30)
        assert isinstance(error, DeadlockError)
        return str(error)

    # the second to be told may find that the first no longer waits
    assert any("the end of an epoch's last batches, which needs worker 0" in text for text in together(work, 2))


def test_one_that_joins_late_finds_the_epochs_before_over() -> None:
    with Node() as node, Session(node.address) as first:
        for _ in range(3):
            assert samples([list(deal(first, 6, 2))]) == list(range(6))
        with Session(node.address) as second:
            assert [len(list(deal(second, 6, 2))) for _ in range(3)] == [0, 0, 0]
            loop = deal(second, 6, 2)
            mine = [next(loop)]
            loop.close()
            assert samples([mine, list(deal(first, 6, 2))]) == list(range(6))


def test_one_that_takes_a_lost_ones_number_leaves_its_batch_to_all() -> None:
    options: dict[str, Any] = {"on_lost": "continue"}
    with Node(on_lost="continue") as node, Session(node.address, **options) as first:
        second = Session(node.address, **options)
        loop = deal(second, 6, 2)
        next(loop)
        second.shutdown()  # in the middle of its batch
        wait_for(lambda: node.live_workers() == [0])
        with Session(node.address, second.worker_id, **options) as third:
            parts = [list(deal(third, 6, 2)), list(deal(first, 6, 2))]
        assert samples(parts) == list(range(6))


def test_a_counter_gives_each_number_once() -> None:
    def work(session: Session) -> Any:
        counter = mv.Counter("tickets", session=session)
        got = [counter.fetch_add() for _ in range(500)]
        session.barrier()
        assert counter.value == 1500
        session.barrier()
        if session.worker_id == 0:
            assert counter.fetch_add(-1501) == 1500
            assert (counter.value, repr(counter)) == (-1, "<Counter 'tickets': -1>")
            with pytest.raises(OverflowError, match="does not fit"):
                counter.fetch_add(-(1 << 63))
            assert counter.value == -1
            with pytest.raises(TypeError):
                counter.fetch_add(0.5)
        return got, counter

    parts = together(work, 3)
    assert sorted(number for got, _ in parts for number in got) == list(range(1500))
    with pytest.raises(ClosedError):
        parts[0][1].fetch_add()


def test_a_counters_lock_outlives_its_holder(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(session: Session) -> Any:
        counter = mv.Counter("c", session=session)
        number: Any = counter._number
        address = number._memory.address
        thread = threading.Thread(target=lambda: mutex.lock(address, 1.0))  # its end is the holder's death
        thread.start()
        thread.join()
        before = counter.fetch_add()
        kept, done = threading.Event(), threading.Event()

        def keep() -> None:
            mutex.lock(address, 1.0)
            kept.set()
            done.wait(30)
            mutex.unlock(address)

        thread = threading.Thread(target=keep)
        thread.start()
        assert kept.wait(30)
        session.timeout_seconds = 0.1
        error = outcome(counter.fetch_add)
        done.set()
        thread.join()
        return before, error, counter.fetch_add()

    before, error, after = together(work, 1)[0]
    assert (before, after) == (0, 1)
    assert isinstance(error, WaitTimeoutError)


def test_a_number_that_is_given_out_again_in_the_same_process_is_another_worker() -> None:
    """It was told by its process's id: whoever had that id again was waited for, to finish what it had never begun."""
    with Node() as node, Session(node.address, 0) as one:
        with Session(node.address, 1) as other:
            left = deal(other, 4, 1)
            next(left)
        with Session(node.address, 1):
            assert samples([list(deal(one, 4, 1, timeout_seconds=20))]) == [0, 1, 2, 3]
        left.close()
