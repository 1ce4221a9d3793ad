"""Workers and hosts that leave or are lost: what the others of a job on several hosts wait for, hear and do."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest
from core_support import in_threads, let_die, outcome, together, wait_for
from rehearsing import rehearsal

from multiverso.deadline import Deadline
from multiverso.errors import DeadlockError, NodeLostError, WorkerLostError
from multiverso.hosts.control.messages import Line, WaitOf
from multiverso.hosts.fabric import Fabric
from multiverso.layout import words as at
from multiverso.runtime import Session
from multiverso.runtime.several_hosts.mirror import read_lines, write_line
from multiverso.spec.table import TableSpec
from multiverso.tables import ArrayTableHandler


def test_a_barrier_waits_for_other_hosts_and_names_who_is_missing() -> None:
    with rehearsal(1, 1) as job:
        waits = {}

        def wait(session: Session) -> None:
            if session.worker_id == 0:
                session.barrier()
                return
            wait_for(lambda: _wait_of(session, 0) is not None)
            waits.update({0: _wait_of(session, 0), "lines": session.wait_graph().describe(time.monotonic_ns())})
            session.barrier()

        job.run(wait)
    assert "which needs worker 1" in waits["lines"][0]
    assert waits["lines"][0].startswith("worker 0 (pid ")
    assert "on host-0)" in waits["lines"][0]


def test_a_node_one_of_whose_threads_ends_by_a_fault_of_ours_ends_and_nobody_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*arguments: Any) -> Any:
        if threading.current_thread().name == "multiverso-hosts-report":
            raise NameError("a fault of ours")
        return read_lines(*arguments)

    def work(session: Session) -> Any:
        session.barrier()
        if session.worker_id == 1:
            monkeypatch.setattr("multiverso.runtime.several_hosts.reporting.read_lines", fail)
        error = None
        while error is None:
            error = outcome(lambda: session.barrier(timeout_seconds=60))
        return error

    with rehearsal(1, 1) as job:
        errors = job.run(work)
    assert all(isinstance(error, NodeLostError | WorkerLostError) for error in errors), errors


def _wait_of(session: Session, worker_id: int) -> Any:
    worker = session.wait_graph().workers.get(worker_id)
    return worker.wait if worker is not None else None


def test_a_deadlock_with_a_clock_in_it_is_told_to_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("multiverso.runtime.session.waiting._STILL_SECONDS", 0.3)
    told = threading.Barrier(2)

    def work(session: Session) -> Any:
        table = ArrayTableHandler(3, session=session)
        for _ in range(3 + 2 * session.worker_id):
            last = outcome(lambda: table.get(timeout_seconds=20))
        error = last if session.worker_id else outcome(lambda: session.barrier(timeout_seconds=20))
        told.wait(60)
        return error

    with rehearsal(1, 1) as job:
        errors = job.run(work, staleness=0)
    assert [type(error) for error in errors] == [DeadlockError] * 2
    assert any(
        "for tick 4 (bounded staleness)" in str(error) and "for barrier 1, which needs worker 1" in str(error)
        for error in errors
    )


def test_nothing_is_known_any_more_of_a_clock_in_a_table_that_its_worker_has_closed() -> None:
    """It has ticked since it was last seen, and those ticks are shown later: whoever waits for one is not stuck."""

    def work(session: Session) -> Any:
        table = ArrayTableHandler(3, session=session)
        shards, seen = session.tables(), []
        waits = WaitOf(at.FOR_BARRIER, 0, 0, 9, 0)
        for wait, progress in ((waits, {table.number: [1, 0, 0, 1, 4]}), (waits, {}), (None, {})):
            line = Line(0, os.getpid(), at.ALIVE, at.ACTIVE, created=1, wait=wait, progress=progress)
            write_line(session.control, line, shards)
            seen.append(shards[table.number].progress().members[0].reached)
        return seen

    assert together(work, 1, staleness=0) == [[5, 0, 0]]


def test_one_that_leaves_is_not_waited_for_and_its_adds_are_there() -> None:
    def work(session: Session) -> Any:
        table = ArrayTableHandler(1000, session=session)
        table.add(np.ones(1000))
        if session.worker_id == 2:
            return None
        session.barrier()
        total = table.get()
        session.barrier()
        return total.min(), total.max(), session.workers_num

    with rehearsal(2, 1) as job:
        assert job.run(work)[:2] == [(3.0, 3.0, 3)] * 2


def test_a_worker_that_dies_is_named_with_its_host_on_the_others() -> None:
    passed = threading.Event()
    with rehearsal(1, 1) as job:

        def stay(_: int) -> Any:
            with job.session(0) as session:
                session.barrier()
                passed.set()
                return outcome(session.barrier)

        def die(_: int) -> None:
            session = job.session(1)
            session.barrier()
            assert passed.wait(30)
            let_die(session)
            session.shutdown()

        error, _ = in_threads([lambda: stay(0), lambda: die(1)])
    assert isinstance(error, WorkerLostError)
    assert error.worker_ids == (1,)
    assert "on host-1)" in str(error)


def test_the_others_go_on_without_a_lost_worker_where_they_are_to() -> None:
    with rehearsal(1, 2, on_lost="continue") as job:

        def work(worker_id: int) -> Any:
            session = job.session(worker_id)
            with session:
                table = ArrayTableHandler(10, session=session)
                table.add(np.ones(10))
                session.barrier()
                if worker_id == 2:
                    let_die(session)
                    return None
                session.barrier()
                return table.get().tolist()

        results = in_threads([lambda i=i: work(i) for i in range(3)])  # type: ignore[misc]
    assert results[:2] == [[3.0] * 10] * 2


@pytest.mark.parametrize("name", [None, "w"])
def test_what_a_lost_worker_has_begun_to_write_is_no_initial_value_for_other_hosts(name: str | None) -> None:
    """They waited for another worker of its host to ask for it, which has no need to; later they got zeros."""
    begun, over = threading.Event(), threading.Event()

    def work(session: Session) -> Any:
        if session.worker_id == 0:

            def fill(*_: Any) -> None:
                begun.set()
                wait_for(lambda: session.control.worker(1).wait is not None)
                let_die(session)
                raise InterruptedError

            with pytest.raises(InterruptedError):
                session.open_table(TableSpec("array", 1, 3, name=name), fill)
            assert over.wait(30)
            return None
        if name is not None:
            assert begun.wait(30)
        try:
            with pytest.raises(WorkerLostError, match=r"worker 0 .*before the initial value of .*was written"):
                ArrayTableHandler(3, name=name, session=session)
            return ArrayTableHandler(3, np.ones(3), name=name, session=session).get().tolist()
        finally:
            over.set()

    with rehearsal(1, 1, on_lost="continue") as job:
        assert job.run(work, timeout_seconds=10) == [None, [1.0] * 3]


def test_a_lost_host_is_an_error_on_the_others() -> None:
    with rehearsal(1, 1) as job:
        passed = threading.Event()

        def stay() -> Any:
            with job.session(0) as session:
                session.barrier()
                passed.set()
                return outcome(session.barrier)

        def go() -> Any:
            with job.session(1) as session:
                session.barrier()
                assert passed.wait(30)
                job.nodes[1].close()

        error, _ = in_threads([stay, go])
    assert isinstance(error, WorkerLostError)
    assert error.worker_ids == (1,)


def test_the_others_go_on_without_a_lost_host_where_they_are_to() -> None:
    size = 300_000  # some chunks at each home
    with rehearsal(1, 1, 1, on_lost="continue") as job:
        gone, all_passed = threading.Event(), threading.Barrier(3)

        def work(worker_id: int) -> Any:
            with job.session(worker_id) as session:
                table = ArrayTableHandler(size, session=session)
                table.add(np.ones(size))
                session.barrier()
                all_passed.wait(30)  # a host that is lost before has not given the others what it is home of
                if worker_id == 1:
                    job.nodes[1].close()
                    gone.set()
                    return None
                assert gone.wait(30)
                table.add(np.full(size, 10.0))
                session.barrier()
                new = ArrayTableHandler(5, np.full(5, 2.0), session=session)
                seen = session.live_workers(), *(set(values.tolist()) for values in (table.get(), new.get()))
                session.barrier()
                return seen

        results = in_threads([lambda i=i: work(i) for i in range(3)])  # type: ignore[misc]
    assert results == [([0, 2], {23.0}, {2.0}), None, ([0, 2], {23.0}, {2.0})]


def test_who_waits_for_a_host_that_is_lost_just_now_goes_on_once_there_are_new_homes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    size = 300_000  # some chunks at each home
    fabrics: dict[int, Fabric] = {}
    waits, inside = threading.Event(), list[int]()

    class Watched(Fabric):
        def listen(self) -> tuple[str, int]:
            fabrics[self.host] = self
            return super().listen()

        def settle(self, deadline: Deadline, tables: Iterable[int] | None = None) -> None:
            inside.append(self.host)
            waits.set()
            super().settle(deadline, tables)
            inside.remove(self.host)

        def regroup(self, live: Sequence[int]) -> None:
            assert 0 in inside
            super().regroup(live)

    monkeypatch.setattr("multiverso.launch.rehearsing.Fabric", Watched)
    with rehearsal(1, 1, on_lost="continue") as job:
        made = threading.Barrier(2)

        def work(worker_id: int) -> Any:
            with job.session(worker_id) as session:
                table = ArrayTableHandler(size, session=session)
                session.barrier()
                made.wait(30)
                if worker_id == 1:
                    fabrics[1].close()
                    waits.clear()
                    made.wait(30)
                    assert waits.wait(30)
                    job.nodes[1].close()
                    return None
                made.wait(30)
                table.add(np.ones(size))
                session.barrier()
                return session.live_workers(), set(table.get().tolist())

        assert in_threads([lambda i=i: work(i) for i in range(2)])[0] == ([0], {1.0})  # type: ignore[misc]
