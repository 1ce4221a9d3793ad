"""Waits end: with what was waited for, or with an error that names who is missing."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import subprocess
import sys
import termios
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from core_support import MODES, SECONDS, Worker, in_threads, outcome, together, wait_for
from msgspec.structs import replace

import multiverso as mv
from multiverso.consistency import asynchronous
from multiverso.deadline import Deadline
from multiverso.errors import ClosedError, DeadlockError, InterruptedRoundError, WaitTimeoutError, WorkerLostError
from multiverso.layout import words as at
from multiverso.node_log import NODE_SAYS
from multiverso.runtime import Node, Session
from multiverso.runtime.job.control import Control, Wait, WorkerState
from multiverso.runtime.job.wait_graph import WaitGraph
from multiverso.runtime.session.waiting import Patience
from multiverso.shards.shard import TableProgress, WorkerProgress
from multiverso.testing import faults


def state(worker_id: int, wait: Wait | None = None, **changes: Any) -> WorkerState:
    values: dict[str, Any] = {
        "pid": 100 + worker_id,
        "liveness": at.ALIVE,
        "participation": at.ACTIVE,
        "barrier": 0,
        "created": 0,
        "threaded": False,
        "gave_up_ns": 0,
    }
    return WorkerState(worker_id=worker_id, wait=wait, **{**values, **changes})


def wait(kind: int, target: int, table: int = 0, stage: int = 0) -> Wait:
    return Wait(kind, 1, table, stage, target, 0)


def test_who_is_missing() -> None:
    workers = {i: state(i, barrier=i, created=3 - i) for i in range(4)}
    workers[3] = state(3, barrier=0, liveness=at.LOST)
    table = TableProgress(
        "w", 1, {0: WorkerProgress(1, 0, 1, 5), 1: WorkerProgress(1, 1, 1, 7), 3: WorkerProgress(0, 0, 1, 0)}
    )
    graph = WaitGraph(workers, {9: table})
    assert graph.missing(wait(at.FOR_BARRIER, 2)) == [0, 1]
    assert graph.missing(wait(at.FOR_TABLE, 3)) == [1, 2]
    assert graph.missing(wait(at.FOR_CLOCK, 6, table=9)) == [0]
    assert graph.missing(wait(at.FOR_ROUND, 2, table=9)) == [0, 1]
    assert graph.missing(wait(at.FOR_ROUND, 1, table=9, stage=1)) == [0]
    assert graph.missing(wait(at.FOR_ROUND, 1, table=8)) == []
    assert graph.missing(wait(at.FOR_LOCK, 1)) == []
    assert graph.missing(replace(wait(at.FOR_LOCK, 1), holder=102)) == [2]
    assert graph.missing(replace(wait(at.FOR_LOCK, 1), holder=103)) == []  # its death frees the lock
    assert graph.missing(replace(wait(at.FOR_REDUCTION, 5, stage=3), phases=(5, 4, 6))) == [1]


def test_a_deadlock_needs_everybody_to_wait_for_somebody() -> None:
    barrier, clock = wait(at.FOR_BARRIER, 1), wait(at.FOR_CLOCK, 1, table=1)
    table = TableProgress("w", 1, {i: WorkerProgress(0, 0, 1, 0) for i in range(2)})

    def stuck(*workers: WorkerState) -> bool:
        return WaitGraph({w.worker_id: w for w in workers}, {1: table}).deadlocked()

    assert stuck(state(0, barrier), state(1, clock))
    assert not stuck(state(0, barrier), state(1))
    assert not stuck(state(0, barrier, barrier=1), state(1, barrier, barrier=1))  # they only have to wake up
    assert not stuck(state(0, barrier), state(1, clock, threaded=True))
    # the word may be free by now, and its waiter stopped before it has looked
    assert not stuck(state(0, barrier), state(1, wait(at.FOR_WORD, 8, table=1, stage=0)))
    assert stuck(state(0, barrier), state(1, liveness=at.LOST), state(2, participation=at.LEFT)) is True
    assert not stuck(state(1, liveness=at.LOST))
    assert not stuck()


def test_a_newcomer_goes_on_only_when_the_others_wait_for_one() -> None:
    """Not when what is known of them is of different moments, so that they seem to wait for each other."""

    def waits(*others: Wait | None, first_step: int = 5) -> object:
        workers = {i: state(i, each) for i, each in enumerate(others)}
        new = state(len(others), incarnation=1)
        members = {i: WorkerProgress(4, 4, 1, 0) for i in workers}
        members[new.worker_id] = WorkerProgress(first_step - 1, first_step - 1, first_step, 0)
        graph = WaitGraph({**workers, new.worker_id: new}, {1: TableProgress("w", 1, members)})
        return graph.waits_for_newcomers()

    here = wait(at.FOR_ROUND, 5, table=1)
    assert waits(here, here) == ((0, 1), (1, 1))
    assert waits(here, here, first_step=6) is None, "two that have not woken up yet"
    assert waits(here, None) is None
    assert waits(here, wait(at.FOR_ROUND, 5, table=9)) is None, "a table that is not known here"
    assert waits(wait(at.FOR_ROUND, 5, table=1, stage=1)) is None, "its members are decided"
    assert waits() == (), "nobody else is left"


def test_a_clock_of_another_host_counts_as_that_host_says_and_not_as_it_is_shown_here() -> None:
    """Shown it is once the adds before it are here: on a slow link its worker waits for something else by then."""
    barrier, clock = wait(at.FOR_BARRIER, 1), wait(at.FOR_CLOCK, 3, table=1)
    workers = {0: state(0, clock, host="a"), 1: state(1, barrier, host="b")}

    def stuck(reached: int) -> bool:
        members = {0: WorkerProgress(0, 0, 1, 3), 1: WorkerProgress(0, 0, 1, 2, reached)}
        return WaitGraph(workers, {1: TableProgress("w", 1, members)}, "a").deadlocked()

    assert stuck(1 + 2)
    assert not stuck(1 + 3)  # what it has added is on its way
    assert not stuck(0)  # its host has not said so yet


@pytest.mark.parametrize(
    ("kind", "again", "words"),
    [
        (at.FOR_BARRIER, 0, "A barrier needs all workers"),
        (at.FOR_ROUND, 0, "read the same tables equally often"),
        (at.FOR_BARRIER, 1, "end loops by table.version or by a value"),
    ],
)
def test_who_is_told_of_a_deadlock_hears_what_to_do_about_its_waits(
    kind: int, again: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = TableProgress("w", 1, {i: WorkerProgress(0, 0, 1, 0) for i in range(2)})
    mine, other = Wait(kind, 1, 1, 0, 1, since_ns=50), Wait(at.FOR_BARRIER, 1, 0, 0, 2, since_ns=50)
    graph = WaitGraph({0: state(0, mine), 1: state(1, other, barrier=1, incarnation=again)}, {1: table})
    monkeypatch.setattr("multiverso.runtime.session.waiting._STILL_SECONDS", 0.0)
    monkeypatch.setattr(Session, "wait_graph", lambda session: graph)
    with Node(1) as node, Session(node.address, sync=bool(again or kind == at.FOR_ROUND)) as session:
        patience = Patience(session, Deadline.after(30), "barrier 1")
        patience.raise_if_over()
        with pytest.raises(DeadlockError, match=words) as told:
            patience.raise_if_over()
        monkeypatch.undo()
    assert ("equally often" in str(told.value)) == (kind == at.FOR_ROUND)
    assert ("in the place of one that died" in str(told.value)) == bool(again)


def test_a_deadlock_that_another_has_ended_is_one_for_those_who_still_wait() -> None:
    waiting = Wait(at.FOR_BARRIER, 1, 0, 0, 1, since_ns=50)
    for gave_up, expected in ((0, False), (49, False), (51, True)):
        graph = WaitGraph({0: state(0, waiting), 1: state(1, gave_up_ns=gave_up)}, {})
        assert graph.given_up(0) is expected
    assert not WaitGraph({0: state(0, None), 1: state(1, gave_up_ns=51)}, {}).given_up(0)


def test_who_waits_longer_than_the_first_that_gave_up_is_told_what_all_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mine = Wait(at.FOR_BARRIER, 1, 0, 0, 1, since_ns=50)
    other = Wait(at.FOR_TABLE, 1, 0, 0, 1, since_ns=50)
    both = WaitGraph({0: state(0, mine, barrier=1), 1: state(1, other, created=1)}, {})
    assert both.deadlocked()
    ended = WaitGraph({0: state(0, mine, barrier=1), 1: state(1, created=1, gave_up_ns=51)}, {})
    graphs = iter([both, ended])
    with Node(1) as node, Session(node.address) as session:
        monkeypatch.setattr(Session, "wait_graph", lambda session: next(graphs))
        patience = Patience(session, Deadline.after(30), "barrier 1")
        patience.raise_if_over()
        with pytest.raises(DeadlockError, match="for the creation of table number 1, which needs worker 0") as told:
            patience.raise_if_over()
    assert "is not waiting" not in str(told.value)


def test_a_table_that_all_have_asked_for_is_said_to_be_on_its_way(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("multiverso.runtime.session.waiting._WARN_SECONDS", 0.0)
    asked = Wait(at.FOR_TABLE, 1, 0, 0, 1, since_ns=50)
    graph = WaitGraph({i: state(i, asked, created=1) for i in range(2)}, {})
    with Node(1) as node, Session(node.address) as session:
        monkeypatch.setattr(Session, "wait_graph", lambda session: graph)
        Patience(session, Deadline.after(30), "table number 1").raise_if_over()
    assert "for table number 1: no worker is missing, it is being made" in capfd.readouterr().err


def test_waits_in_words() -> None:
    workers = {
        0: state(0, Wait(at.FOR_ROUND, 1, 1, 0, 5, since_ns=0)),
        1: state(1),
        2: state(2, liveness=at.LOST),
        3: state(3, participation=at.LEFT),
    }
    table = TableProgress("table 'w'", 4, {0: WorkerProgress(5, 4, 1, 0), 1: WorkerProgress(4, 4, 1, 0)})
    assert WaitGraph(workers, {1: table}).describe(2_500_000_000) == [
        "worker 0 (pid 100) has waited 2.5 s for round 2 of table 'w', which needs worker 1",
        "worker 1 (pid 101) is not waiting",
        "worker 2 (pid 102) is lost",
        "worker 3 (pid 103) has left",
    ]


WAITS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "barrier": (lambda s, t: s.barrier(timeout_seconds=0.1), {}, "barrier 1"),
    "get": (lambda s, t: t.get(timeout_seconds=0.1), {"sync": True}, "round 1 of"),
    "rows": (lambda s, t: t.get([1], timeout_seconds=0.1), {"sync": True}, "round 1 of"),
    "exchange": (
        lambda s, t: t.exchange(np.ones(6, "f4"), np.zeros(6, "f4"), timeout_seconds=0.1),
        {"sync": True},
        "round 1 of",
    ),
    "clock": (lambda s, t: (t.get(), t.get(timeout_seconds=0.1)), {"staleness": 0}, "tick 1 (bounded staleness) of"),
}


@pytest.mark.parametrize("case", WAITS)
def test_a_deadline_names_what_and_whom(case: str) -> None:
    call, options, what = WAITS[case]
    done = threading.Event()

    def work(session: Session) -> Any:
        table = mv.MatrixTableHandler(3, 2, session=session)
        if session.worker_id == 1:
            assert done.wait(30)
            return None
        error = outcome(lambda: call(session, table))
        done.set()
        return error

    error, _ = together(work, 2, **options)
    assert isinstance(error, WaitTimeoutError)
    assert isinstance(error, TimeoutError)
    assert f"waiting for {what}" in str(error)
    assert "missing worker 1" in str(error)
    assert "MULTIVERSO_TIMEOUT_SECONDS" in str(error)
    assert "worker 1 (pid" in str(error)


def test_a_table_that_another_does_not_create(monkeypatch: pytest.MonkeyPatch) -> None:
    done = threading.Event()
    begin = Patience.__init__

    def begin_late(*arguments: Any) -> None:
        threading.Event().wait(0.05)  # as on a busy machine
        begin(*arguments)

    monkeypatch.setattr(Patience, "__init__", begin_late)

    def work(session: Session) -> Any:
        if session.worker_id == 1:
            assert done.wait(30)
            return None
        error = outcome(lambda: mv.ArrayTableHandler(3, session=session))
        done.set()
        return error

    error, _ = together(work, 2, timeout_seconds=0.6)
    assert isinstance(error, WaitTimeoutError)
    assert "waiting for table number 1: missing worker 1" in str(error)


@pytest.mark.parametrize("reading", ["get", "rows", "exchange"])
def test_an_interrupted_round_is_finished_by_the_same_call(reading: str) -> None:
    gave_up = threading.Event()

    def read(table: Any, local: Any, last: Any, timeout_seconds: float) -> Any:
        if reading == "get":
            return table.get(timeout_seconds=timeout_seconds).tolist()
        if reading == "rows":
            return table.get([0, 1, 2], timeout_seconds=timeout_seconds).tolist()
        table.exchange(local, last, timeout_seconds=timeout_seconds)
        return local.reshape(3, 1).tolist()

    def work(session: Session) -> Any:
        table = mv.MatrixTableHandler(3, 1, session=session)
        local, last = np.ones(3, "f4"), np.zeros(3, "f4")
        if session.worker_id == 1:
            assert gave_up.wait(30)
            return read(table, local, last, 30)
        with pytest.raises(WaitTimeoutError):
            read(table, local, last, 0.1)
        with pytest.raises(InterruptedRoundError, match=r"call .* again to finish it first"):
            table.add([1, 1, 1])
        gave_up.set()
        return read(table, local, last, 30)

    expected = [[2.0]] * 3 if reading == "exchange" else [[0.0]] * 3
    assert together(work, 2, sync=True) == [expected] * 2


def test_after_10_seconds_one_warning_names_whom_we_wait_for(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("multiverso.runtime.session.waiting._WARN_SECONDS", 0.2)
    looks: list[None] = []
    look = Patience.raise_if_over

    def counted(patience: Patience) -> None:
        look(patience)
        looks.append(None)

    monkeypatch.setattr(Patience, "raise_if_over", counted)

    def work(session: Session) -> None:
        if session.worker_id == 1:
            wait_for(lambda: len(looks) >= 4)
        session.barrier()

    together(work, 2)
    warnings = [line for line in capfd.readouterr().err.splitlines() if line.startswith("multiverso: ")]
    assert len(warnings) == 1
    assert "multiverso: worker 0 has waited" in warnings[0]
    assert "for barrier 1: missing worker 1" in warnings[0]


@pytest.mark.parametrize("workers", [2, 3])
def test_everybody_in_a_deadlock_is_told_who_waits_for_what(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("multiverso.runtime.session.waiting._STILL_SECONDS", 0.3)
    told = threading.Barrier(workers)

    def work(session: Session) -> Any:
        table = mv.ArrayTableHandler(3, session=session, name="w")
        session.barrier()
        call = table.get if session.worker_id else session.barrier
        error = outcome(call)
        told.wait(30)
        return error

    errors = together(work, workers, sync=True)
    assert [type(error) for error in errors] == [DeadlockError] * workers
    assert any(
        "for barrier 2, which needs worker" in str(error) and "for round 1 of w, which needs" in str(error)
        for error in errors
    )


@pytest.mark.parametrize(("name", "sync"), [(None, False), ("mine", True)])
def test_a_table_that_one_worker_makes_alone_is_explained(
    name: str | None, sync: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("multiverso.runtime.session.waiting._STILL_SECONDS", 0.3)
    told = threading.Barrier(2)

    def work(session: Session) -> Any:
        error = outcome(
            session.barrier if session.worker_id else lambda: mv.ArrayTableHandler(3, name=name, session=session)
        )
        told.wait(30)
        return str(error)

    # the other one may be told after the first has ended its wait, so that it no longer sees what for
    for text in together(work, 2, sync=sync)[:1]:
        assert "All workers make a table together" in text


def test_unequal_numbers_of_reads_are_a_deadlock_not_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """The commonest way to break synchronous training: one worker has a batch more, and then a barrier comes."""
    monkeypatch.setattr("multiverso.runtime.session.waiting._STILL_SECONDS", 0.3)
    told = threading.Barrier(2)

    def work(session: Session) -> Any:
        table = mv.ArrayTableHandler(3, session=session)
        for _ in range(3 + session.worker_id):
            last = outcome(table.get)
        error = last if session.worker_id else outcome(session.barrier)
        told.wait(30)
        return error

    assert [type(e) for e in together(work, 2, sync=True)] == [DeadlockError, DeadlockError]


def _ended_thread(table: Any) -> None:
    thread = threading.Thread(target=table.get)
    thread.start()
    thread.join()


@pytest.mark.parametrize(
    "in_another_thread",
    [lambda table: table.get_async().wait(), _ended_thread],
    ids=["get_async", "a thread that has ended"],
)
@pytest.mark.parametrize("waits_for_another", [False, True])
def test_a_thread_that_does_nothing_more_hides_no_deadlock(
    in_another_thread: Callable[[Any], Any], waits_for_another: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("multiverso.runtime.session.waiting._STILL_SECONDS", 0.3)
    told = threading.Barrier(2)

    def work(session: Session) -> Any:
        table = mv.ArrayTableHandler(3, session=session)
        in_another_thread(table)
        for _ in range(3 + session.worker_id):
            last = outcome(lambda: table.get_async().wait() if waits_for_another else table.get())
        error = last if session.worker_id else outcome(lambda: session.barrier(timeout_seconds=25))
        told.wait(30)
        return error

    assert [type(e) for e in together(work, 2, sync=True)] == [DeadlockError, DeadlockError]


def test_a_wait_that_others_keep_waking_still_has_its_deadline() -> None:
    """Rounds of a table that a worker does not have wake it without end."""
    stop = threading.Event()

    def work(session: Session) -> Any:
        table = mv.ArrayTableHandler(3, session=session)
        if session.worker_id == 0:
            table.close()
            error = outcome(lambda: session.barrier(timeout_seconds=1.0))
            stop.set()
            return error
        while not stop.is_set():
            table.get()
        return None

    error, *_ = together(work, 3, staleness=0)
    assert isinstance(error, WaitTimeoutError)


def test_a_lock_that_is_held_names_its_holder() -> None:
    with Node(1) as node, Session(node.address) as session:
        table = mv.ArrayTableHandler(3, [1, 2, 3], session=session)
        faults.hold_stripe(table)
        with pytest.raises(WaitTimeoutError, match=f"process {os.getpid()} holds the lock"):
            table.get(timeout_seconds=0.1)
        faults.free_stripe(table)
        np.testing.assert_array_equal(table.get(), [1, 2, 3])


def test_a_worker_ends_with_its_launcher_which_read_what_it_says_of_that() -> None:
    text = """
reader, writer = os.pipe()
os.dup2(writer, 2)
os.close(writer)
os.close(reader)  # as the launcher's end has done
session = Session(node, worker_id, ends_with_node=True)
say("there")
signal.signal(signal.SIGTERM, signal.SIG_DFL)
sys.stdin.readline()
"""
    with Node(1) as node, Worker(node, 0, text) as worker:
        assert worker.hear() == ["there"]
        node.close()
        assert worker.process.wait(SECONDS) == -signal.SIGTERM


def test_who_leaves_ends_first_what_its_threads_have_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has left is dead to the others: they would take the word over from a thread that goes on writing."""
    order: list[str] = []
    leave = Control.leave

    def leave_noted(control: Control, worker_id: int) -> None:
        order.append("left")
        leave(control, worker_id)

    def add_to_its_end() -> None:
        wait_for(lambda: session.closed)
        order.append("done")
        faults.free_stripe(table)

    monkeypatch.setattr(Control, "leave", leave_noted)
    monkeypatch.setattr(asynchronous, "_IDLE_SECONDS", 60.0)
    with Node(1) as node, Session(node.address) as session:
        table = mv.ArrayTableHandler(3, session=session)
        faults.hold_stripe(table)  # as a thread has it that is in the middle of an add
        other = threading.Thread(target=add_to_its_end)
        other.start()
        session.shutdown()
        other.join(30)
    assert order == ["done", "left"]


def test_a_wait_ends_when_the_session_does() -> None:
    def work(session: Session) -> Any:
        if session.worker_id == 1:
            closed.wait(30)
            return None
        threading.Timer(0.3, session.shutdown).start()
        error = outcome(lambda: session.barrier(timeout_seconds=30))
        closed.set()
        return error

    closed = threading.Event()
    error, _ = together(work, 2)
    assert isinstance(error, ClosedError)


def test_leaving_wakes_those_who_wait() -> None:
    waiting = threading.Event()

    def work(session: Session) -> Any:
        table = mv.ArrayTableHandler(1, session=session)
        if session.worker_id == 2:
            assert waiting.wait(30)
            return None
        if session.worker_id == 1:
            waiting.set()
        session.barrier()
        return table.get().tolist(), 2 in session.live_workers(), session.workers_num

    assert together(work, 3, sync=True)[:2] == [([0.0], False, 3)] * 2


SIGUSR1 = """
os.environ.update(MULTIVERSO_NODE=node, MULTIVERSO_WORKER_ID=str(worker_id), MULTIVERSO_WORKERS_NUM="2")
mv.init()
os.dup2(os.open(os.environ["SAID"], os.O_WRONLY | os.O_CREAT), 2)  # what it compiles it has told
say("ready")
mv.barrier()
mv.shutdown()
"""


def test_sigusr1_prints_who_waits_for_whom(tmp_path: Path) -> None:
    said = tmp_path / "said"
    with Node(2) as node, Worker(node, 0, SIGUSR1, SAID=str(said)) as worker:

        def other() -> None:
            with Session(node.address, 1) as session:
                assert worker.hear() == ["ready"]
                while not any(w.wait for w in session.control.workers()):
                    threading.Event().wait(0.01)
                os.kill(worker.pid, signal.SIGUSR1)
                wait_for(lambda: said.read_text().count("\n") >= 2)
                session.barrier()

        in_threads([other])
        assert worker.end() == 0
    first, second = said.read_text().splitlines()
    assert first.startswith(f"multiverso: worker 0 (pid {worker.pid}) has waited")
    assert "for barrier 1, which needs worker 1" in first
    assert second.startswith("multiverso: worker 1 (pid")


ASKED_WHILE_WRITING = """
import os, signal, sys, threading, time
import multiverso as mv
mv.init()
def ask():
    for _ in range(2000):
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(1e-4)
asking = threading.Thread(target=ask)
asking.start()
while asking.is_alive():
    print("its own line", file=sys.stderr)
mv.shutdown()
"""


def in_pipe(file: Any) -> int:
    return int(np.frombuffer(fcntl.ioctl(file, termios.FIONREAD, bytes(4)), np.int32)[0])


def test_sigusr1_in_the_middle_of_a_print_ends_nothing() -> None:
    command = [sys.executable, "-c", ASKED_WHILE_WRITING]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as asked:
        assert asked.stderr is not None
        wait_for(lambda: in_pipe(asked.stderr) > 60_000)  # nearly full
        threading.Event().wait(0.5)  # writes block, and signals interrupt them
        said = asked.stderr.read()
    assert asked.returncode == 0, said[-2000:]
    assert b"is not waiting" in said


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_no_read_is_ever_staler_than_its_bound(staleness: int) -> None:
    """At its t-th read a worker sees all that every other one added before that one's (t - s)-th read."""
    import random
    import time

    workers, ticks = 3, 40

    def work(session: Session) -> Any:
        me, delays = session.worker_id, random.Random(session.worker_id)
        table = mv.ArrayTableHandler(workers, session=session, dtype="int64")
        mine = np.zeros(workers, "i8")
        mine[me] = 1
        seen = []
        for _ in range(ticks):
            if delays.random() < 0.2:
                time.sleep(delays.random() * 0.01)
            table.add(mine)
            seen.append(table.get().tolist())
        return seen

    for me, seen in enumerate(together(work, workers, staleness=staleness)):
        for t, counts in enumerate(seen):  # before this read everybody had done t - s ticks, an add before each
            assert counts[me] == t + 1
            assert min(counts) >= t - staleness
            assert max(counts) <= t + 1 + staleness + 1


def test_a_worker_is_never_ahead_by_more_than_its_bound() -> None:
    ticked, stop = threading.Event(), threading.Event()

    def work(session: Session) -> Any:
        table = mv.ArrayTableHandler(1, session=session)
        if session.worker_id == 1:
            table.get()
            ticked.set()
            assert stop.wait(30)
            return None
        assert ticked.wait(30)
        done = 0
        try:
            while True:
                table.get(timeout_seconds=0.2)
                done += 1
        except WaitTimeoutError:
            stop.set()
        return done

    done, _ = together(work, 2, staleness=2)
    assert done == 1 + 2 + 1  # the slow one's tick, the bound, and the read that needs no more than that


@pytest.mark.parametrize("mode", MODES)
def test_a_lost_worker_ends_the_others_waits(mode: str) -> None:
    text = """
session = Session(node, worker_id, sync={sync}, staleness={staleness}, start_timeout_seconds=60)
table = mv.ArrayTableHandler(3, session=session)
say("ready")
signal.pause()
"""
    options = MODES[mode]
    text = text.format(sync=options.get("sync", False), staleness=options.get("staleness"))
    with (
        Node(2) as node,
        Worker(node, 1, text) as victim,
        Session(node.address, 0, timeout_seconds=30, **options) as session,
    ):
        table = mv.ArrayTableHandler(3, session=session)
        assert victim.hear() == ["ready"]
        threading.Timer(0.1, os.kill, (victim.pid, signal.SIGKILL)).start()
        with pytest.raises(WorkerLostError) as lost:
            if mode == "async":
                session.barrier()
            for _ in range(10):
                table.get()
        assert lost.value.worker_ids == (1,)
        assert f"worker 1 (pid {victim.pid}) died, or exited without shutdown()" in str(lost.value)
        assert "on_lost='continue'" in str(lost.value)


@pytest.mark.parametrize("silent", [False, True])
@pytest.mark.parametrize("more", [0, 1])
def test_unequal_numbers_of_rounds_are_told_at_the_end(
    more: int, silent: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    """Once: by the node, or by the last worker where nobody reads what the node says, as under mpirun."""

    def work(session: Session) -> None:
        table = mv.ArrayTableHandler(3, session=session)  # both are in the first round
        for _ in range(3 + more * session.worker_id):
            table.add(1)
            table.get()

    together(work, 2, sync=True, node_is_silent=silent)
    who = "multiverso: " if silent else NODE_SAYS
    said = f"{who}table 1: workers ended after different numbers of rounds (worker 0 after 3, worker 1 after 4)"
    assert (
        re.findall(r"^.* ended after different numbers of rounds[^)]*\)", capfd.readouterr().err, re.M) == [said] * more
    )


@pytest.mark.parametrize("more", [0, 1])
def test_unequal_numbers_of_barriers_are_told_at_the_end(more: int, capfd: pytest.CaptureFixture[str]) -> None:
    def work(session: Session) -> None:
        session.barrier()
        if more and session.worker_id == 0:
            session.barrier()

    together(work, 2)
    said = "workers ended after different numbers of barriers (worker 1 after 1, worker 0 after 2)"
    assert (said in capfd.readouterr().err) == bool(more)


@pytest.mark.parametrize("silent", [False, True])
def test_shutdown_ends_what_another_thread_waits_for(silent: bool) -> None:
    """Also where it asks what the node has to say, with the connection that this thread uses."""
    with Node(2) as node:
        first, second = in_threads(
            [partial(Session, node.address, i, node_is_silent=silent, timeout_seconds=5) for i in range(2)]
        )
        with second:
            ends: list[object] = []
            thread = threading.Thread(target=lambda: ends.append(outcome(first.barrier)))
            thread.start()
            wait_for(lambda: second.control.worker(0).wait is not None)
            first.shutdown()
            thread.join()
            assert [type(end) for end in ends] == [ClosedError]
