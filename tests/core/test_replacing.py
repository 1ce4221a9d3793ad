"""A worker that takes a dead one's place in a job that goes on: its clock, its rounds, its barriers."""

from __future__ import annotations

import errno
import os
import select
import signal
import subprocess
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from core_support import MODES, in_threads, let_die, outcome, wait_for

import multiverso as mv
from multiverso.checkpoints.manifests import read_generations
from multiverso.checkpoints.stores import open_store
from multiverso.errors import DeadlockError, MultiversoError, StartupError
from multiverso.layout import words as at
from multiverso.params import SharedParams
from multiverso.runtime import Node, Session
from multiverso.runtime.node import numbers
from multiverso.runtime.node.deaths import Deaths


@pytest.fixture
def dead(monkeypatch: pytest.MonkeyPatch) -> Callable[[Session], None]:
    """Lets go of a worker's life as the kernel does for a process that was killed; this one lives on."""
    monkeypatch.setattr(numbers, "has_ended", lambda pid: True)

    def die(session: Session) -> None:
        let_die(session)
        wait_for(lambda: session.control.liveness(session.worker_id) == at.LOST)

    return die


def test_a_process_whose_number_is_anothers_by_now_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one was asked, and lives: the node looked again and again, and the worker was never lost."""
    child = subprocess.Popen(["true"])
    with select.epoll() as poll, closing(Deaths(lambda _: None, lambda: False)) as deaths:
        deaths.open(poll)
        assert deaths.watch_process(3, child.pid)
        child.wait()
        another = os.pidfd_open(os.getpid())
        monkeypatch.setattr(os, "pidfd_open", lambda _: os.dup(another))
        ((descriptor, _),) = poll.poll(30)
        found = deaths.ended_process(descriptor)
        os.close(another)
    assert found == (3, child.pid)


def job(mode: str, **options: Any) -> dict[str, Any]:
    return {"timeout_seconds": 30, "start_timeout_seconds": 30, **MODES[mode], **options}


def all_of(node: Node, mode: str, number: int = 3) -> list[Session]:
    return in_threads([lambda i=i: Session(node.address, i, **job(mode)) for i in range(number)])


def test_its_clock_begins_at_the_slowest_of_the_others(dead: Callable[[Session], None]) -> None:
    with Node(3, on_lost="continue", replaces=True) as node:
        sessions = all_of(node, "bounded")
        tables = in_threads([lambda s=s: mv.ArrayTableHandler(4, session=s) for s in sessions])
        for table, ticks in zip(tables, (3, 2, 1), strict=True):
            for _ in range(ticks):
                table.add(np.ones(4))
                table.get()
        dead(sessions[2])
        with Session(node.address, 2, **job("bounded")) as again:
            assert (again.worker_id, again.incarnation) == (2, 1)
            table = mv.ArrayTableHandler(4, init_value=np.full(4, 99.0), session=again)
            assert again.statistics()["tables"][1]["clock"] == 2
            table.add(np.ones(4))
            assert table.get().tolist() == [7.0] * 4, "and it waits for nobody"
            assert tables[0].get().tolist() == [7.0] * 4
        for session in sessions:
            session.shutdown()


def test_what_it_does_again_does_not_wait_for_those_who_wait_for_it(dead: Callable[[Session], None]) -> None:
    """They are at their next barrier, and tick no more before it comes there, too."""

    def lap(session: Session, table: Any) -> None:
        for _ in range(5):
            table.add(np.ones(4))
            table.get()
        session.barrier()

    with Node(3, on_lost="continue", replaces=True) as node:
        sessions = all_of(node, "bounded")
        tables = in_threads([lambda s=s: mv.ArrayTableHandler(4, session=s) for s in sessions])
        in_threads([lambda s=s, t=t: lap(s, t) for s, t in zip(sessions, tables, strict=True)])
        dead(sessions[2])
        with Session(node.address, 2, **job("bounded")) as again:
            table = mv.ArrayTableHandler(4, session=again)
            others = list(zip(sessions[:2], tables, strict=False))

            def catch_up() -> None:
                lap(again, table)
                lap(again, table)

            for it in (catch_up, lambda: lap(again, table)):
                in_threads([it, *(lambda s=s, t=t: lap(s, t) for s, t in others)])
            clocks = [s.statistics()["tables"][1]["clock"] for s in (*sessions[:2], again)]
            assert clocks[:2] == [15, 15]
            most = 15 + MODES["bounded"]["staleness"] + 1  # a read is counted once it may go ahead
            assert clocks[2] <= most, "what it did ahead of the others does not count"
            assert table.snapshot().tolist() == [50.0] * 4
        for session in sessions:
            session.shutdown()


@pytest.mark.parametrize("unread", [0, 1])
def test_who_comes_between_two_tables_rounds_is_in_the_same_turn_of_the_loop_with_both(
    dead: Callable[[Session], None], unread: int
) -> None:
    """Its second table is made when the others wait for it in the first: they waited for each other for ever.

    Nobody waits for it in tables made before that none reads.
    """
    between, made = threading.Event(), threading.Event()

    def tables(session: Session) -> list[Any]:
        return [mv.ArrayTableHandler(4, session=session) for _ in range(unread + 2)]

    with Node(2, on_lost="continue", replaces=True) as node:
        sessions = all_of(node, "sync", 2)
        (*_, first, second), _ = in_threads([lambda s=s: tables(s) for s in sessions])  # type: ignore[misc]
        dead(sessions[1])

        def stay() -> float:
            first.get()
            between.set()
            assert made.wait(30)
            second.get()
            for table in (first, second):
                table.add(np.ones(4))
            return float(first.get()[0] + second.get()[0])

        def come() -> float:
            assert between.wait(30)
            with Session(node.address, 1, **job("sync")) as again, pytest.MonkeyPatch.context() as patch:
                look = again.wait_graph
                patch.setattr(again, "wait_graph", lambda: (made.set(), look())[1])
                ours = tables(again)
                made.set()
                for table in ours[unread:]:
                    table.add(np.ones(4))
                return sum(float(table.get()[0]) for table in ours[unread:])

        assert in_threads([stay, come]) == [4.0, 4.0]
        for session in sessions:
            session.shutdown()


def test_a_loop_with_a_barrier_in_each_turn_is_told_at_once_what_it_cannot_do(
    dead: Callable[[Session], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are at a barrier, and the one that has come again is in the first round of its first turn."""
    monkeypatch.setattr("multiverso.runtime.session.waiting._STILL_SECONDS", 0.3)
    died, alone, there = threading.Event(), threading.Event(), threading.Event()
    told = [threading.Event(), threading.Event()]

    def tell(worker_id: int) -> None:
        """Stays in the job until the other has its error, too."""
        told[worker_id].set()
        told[1 - worker_id].wait(30)

    def turn(session: Session, table: Any) -> None:
        table.get()
        session.barrier()

    def stay(node: Node) -> Any:
        with Session(node.address, 0, **job("sync")) as session:
            table = mv.ArrayTableHandler(4, session=session)
            turn(session, table)
            assert died.wait(30)
            table.get()
            alone.set()
            assert there.wait(30)
            error = outcome(session.barrier)
            tell(0)
            return error

    def come_again(node: Node) -> Any:
        session = Session(node.address, 1, **job("sync"))
        turn(session, mv.ArrayTableHandler(4, session=session))
        dead(session)
        died.set()
        assert alone.wait(30)  # or it would take part in the round that the other goes through without it
        with Session(node.address, 1, **job("sync")) as again:
            there.set()
            error = outcome(lambda: turn(again, mv.ArrayTableHandler(4, session=again)))
            tell(1)
        session.shutdown()
        return error

    with Node(2, on_lost="continue", replaces=True) as node:
        errors = in_threads([lambda: stay(node), lambda: come_again(node)])
    for error in errors:
        assert isinstance(error, DeadlockError), errors
        assert "with barriers outside of them" in str(error)


def test_it_has_its_second_table_within_a_deadline_that_is_shorter_than_the_wait_for_the_others(
    dead: Callable[[Session], None],
) -> None:
    """The others train for longer than that between two rounds."""
    with Node(2, on_lost="continue", replaces=True) as node:
        sessions = all_of(node, "sync", 2)
        tables = in_threads([lambda s=s: [mv.ArrayTableHandler(4, session=s, name=n) for n in "ab"] for s in sessions])
        in_threads([pair[0].get for pair in tables])
        dead(sessions[1])
        with Session(node.address, 1, **job("sync", timeout_seconds=1)) as again:
            for name in "ab":
                assert mv.ArrayTableHandler(4, session=again, name=name).name == name
        for session in sessions:
            session.shutdown()


def test_nobody_is_replaced_in_a_job_whose_workers_want_it_to_end() -> None:
    with Node(1, on_lost="continue", replaces=True) as node:
        for on_lost, may_be in ((None, True), ("stop", False)):
            with Session(node.address, 0, on_lost=on_lost) as session:
                session.barrier()
                assert node.may_be_replaced(0) is may_be


def test_who_comes_when_the_others_have_begun_another_job_is_refused(dead: Callable[[Session], None]) -> None:
    """It would begin at the first line, and they are further: they begin without it."""
    with Node(2, on_lost="continue", replaces=True) as node:
        sessions = all_of(node, "async", 2)
        dead(sessions[1])
        sessions[0].shutdown()

        def come() -> str:
            wait_for(lambda: not node.may_be_replaced(1))
            with pytest.raises(StartupError, match="the others have left it and called init again since"):
                Session(node.address, 1, **job("async"))
            node.absent(1)  # as a launcher says of one that is not started again
            return "refused"

        again, refused = in_threads([lambda: Session(node.address, 0, **job("async")), come])
        assert refused == "refused"
        again.barrier()
        for session in (again, sessions[1]):
            session.shutdown()


def test_it_joins_the_next_round(dead: Callable[[Session], None]) -> None:
    def rounds(table: Any, number: int) -> list[float]:
        seen = []
        for _ in range(number):
            table.add(np.ones(3))
            seen.append(float(table.get()[0]))
        return seen

    with Node(3, on_lost="continue", replaces=True) as node:
        sessions = all_of(node, "sync")
        tables = in_threads([lambda s=s: mv.ArrayTableHandler(3, session=s) for s in sessions])
        assert in_threads([lambda t=t: rounds(t, 2) for t in tables]) == [[3, 6]] * 3
        dead(sessions[1])
        del tables[1]
        assert in_threads([lambda t=t: rounds(t, 2) for t in tables]) == [[8, 10]] * 2
        with Session(node.address, 1, **job("sync")) as again:
            table = mv.ArrayTableHandler(3, session=again)
            assert table.snapshot().tolist() == [10.0] * 3
            assert in_threads([lambda t=t: rounds(t, 2) for t in [*tables, table]]) == [[13, 16]] * 3
        for session in sessions:
            session.shutdown()


def test_what_the_others_have_done_together_it_passes_or_is_told(
    dead: Callable[[Session], None], tmp_path: Path
) -> None:
    """Barriers that they have passed return at once; a save or load by all has no place for it, and says so."""
    with Node(3, on_lost="continue", replaces=True) as node:
        sessions = all_of(node, "async")
        shared = in_threads([lambda s=s: SharedParams([np.ones(2)], session=s) for s in sessions])
        in_threads([lambda s=s: s.save(tmp_path / "saved") for s in shared])
        in_threads([session.barrier for session in sessions])
        passed = sessions[0].barriers
        dead(sessions[2])
        table = mv.ArrayTableHandler(2, name="later", session=sessions[0])
        table.save(tmp_path / "table")
        table.add([1.0, 1.0])
        with Session(node.address, 2, **job("async")) as again:
            mine = SharedParams([np.zeros(2)], session=again)
            assert mine.values()[0].tolist() == [1.0, 1.0]
            with pytest.raises(MultiversoError, match=r"worker 2 has taken the place .* mv\.checkpoint"):
                mine.load(tmp_path / "saved")
            found = mv.ArrayTableHandler(2, name="later", session=again)
            found.load(tmp_path / "table")
            assert found.get().tolist() == [1.0, 1.0], "what it would load at its start the others have gone on from"
            while again.barriers < passed:
                again.barrier()
            in_threads([session.barrier for session in (*sessions[:2], again)])
        for session in sessions:
            session.shutdown()


@pytest.mark.parametrize("mode", ["sync", "bounded"])
def test_by_name_it_gets_what_there_is_and_is_in_step_for_what_comes(
    mode: str, dead: Callable[[Session], None]
) -> None:
    """It need not open what the others have closed, or what its part of the program does not need any more."""
    with Node(2, on_lost="continue", replaces=True) as node:
        sessions = all_of(node, mode, 2)

        def open_all(name: str, *some: Session) -> list[Any]:
            return in_threads([lambda s=s: mv.ArrayTableHandler(2, name=name, session=s) for s in some])

        in_threads([table.close for table in open_all("warm-up", *sessions)])
        first, second = (open_all(f"phase {phase}", *sessions) for phase in range(2))
        dead(sessions[1])
        with Session(node.address, 1, **job(mode)) as again:
            (mine,) = open_all("phase 1", again)
            assert mine.number == second[0].number
            later = open_all("phase 2", sessions[0], again)
            assert [table.number for table in later] == [first[0].number + 2] * 2
        for session in sessions:
            session.shutdown()


def test_alone_in_the_job_it_numbers_its_checkpoints_on(dead: Callable[[Session], None], tmp_path: Path) -> None:
    """No other worker says how far they are: it once began with 1 again, in the place of one that still counted."""
    sessions = []
    with Node(1, on_lost="continue", replaces=True) as node:
        for life in range(3):
            session = Session(node.address, 0, **job("async"))
            sessions.append(session)
            mv.ArrayTableHandler(2, session=session)
            checkpoint = mv.checkpoint(tmp_path, keep=1, session=session)
            assert checkpoint.restore() == ({"life": life - 1} if life else None)
            assert checkpoint.save({"life": life})
            checkpoint.close()
            assert [g.number for g in read_generations(open_store(tmp_path))] == [life + 1]
            if life < 2:
                dead(session)
        for session in sessions:
            session.shutdown()


def waiting(session: Session, function: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Calls something in a thread, and returns once its worker waits for the others."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(outcome(function)))
    thread.start()
    wait_for(lambda: session.control.worker(session.worker_id).wait is not None)
    return thread, results


def test_who_leads_a_checkpoint_dies_while_others_wait_for_it(dead: Callable[[Session], None], tmp_path: Path) -> None:
    """Another one leads then: neither its beginning nor what is saved is lost with the lowest worker."""
    with Node(1) as node, Session(node.address) as session:
        table = mv.ArrayTableHandler(2, session=session)
        table.add([1.0, 2.0])
        with mv.checkpoint(tmp_path, session=session) as checkpoint:
            checkpoint.save({"step": 3})
    with Node(3, on_lost="continue", replaces=True) as node:
        sessions = all_of(node, "async")
        tables = in_threads([lambda s=s: mv.ArrayTableHandler(2, session=s) for s in sessions])
        thread, begun = waiting(sessions[1], lambda: mv.checkpoint(tmp_path, resume=True, session=sessions[1]))
        dead(sessions[0])
        first, second = begun, [mv.checkpoint(tmp_path, resume=True, session=sessions[2])]
        thread.join(30)
        thread, found = waiting(sessions[2], second[0].restore)
        dead(sessions[1])
        thread.join(30)
        assert found == [{"step": 3}]
        assert tables[2].get().tolist() == [1.0, 2.0]
        first[0]._end()
        with Session(node.address, 0, **job("async")) as again:
            checkpoint = mv.checkpoint(tmp_path, session=again)
            assert checkpoint.restore() == {"step": 3}
            assert again.barriers == sessions[2].barriers
        second[0].close()
        for session in sessions:
            session.shutdown()


def test_a_replacement_may_be_there_before_the_others_begin_a_checkpoint(
    dead: Callable[[Session], None], tmp_path: Path
) -> None:
    """They do not wait for it where it has not come to, and both may save there: it is one job."""
    with Node(2, on_lost="continue", replaces=True) as node:
        sessions = all_of(node, "async", 2)
        dead(sessions[0])
        with Session(node.address, 0, **job("async")) as again:
            mine = mv.checkpoint(tmp_path, session=again)
            theirs = mv.checkpoint(tmp_path, session=sessions[1])
            assert again.barriers == sessions[1].barriers
            in_threads([again.barrier, sessions[1].barrier])
            mine.save({"step": 1})
            theirs.step({"step": 2})
            in_threads([mine.close, theirs.close])
            assert read_generations(open_store(tmp_path))[-1].workers == [0, 1]
        for session in sessions:
            session.shutdown()


@pytest.mark.parametrize("with_pidfd", [True, False])
def test_a_process_whose_exit_code_nobody_has_asked_for_yet_has_ended(
    monkeypatch: pytest.MonkeyPatch, with_pidfd: bool
) -> None:
    """As where an engine reaps its children late, or never: the place is free all the same."""
    if not with_pidfd:

        def refuse(pid: int) -> int:
            raise OSError(errno.ENOSYS, "Function not implemented")

        monkeypatch.setattr(os, "pidfd_open", refuse)
    child = os.fork()
    if not child:
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    assert numbers.has_ended(child)
    assert not numbers.has_ended(os.getpid())
    os.waitpid(child, 0)
    assert numbers.has_ended(child)
