"""Every wait is seen by the others, has a name, and counts in the search for deadlocks."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import numpy as np
import pytest
from core_support import in_threads, outcome, together, wait_for

import multiverso as mv
from multiverso.errors import DeadlockError, WaitTimeoutError
from multiverso.kernels import waits
from multiverso.layout import words as at
from multiverso.memory.words import store32, store64
from multiverso.runtime import Node, Session, observe
from multiverso.runtime.collective.reducer import SMALL_BYTES, Reducer, all_reduce
from multiverso.testing import faults

SIZES = {"small": 3, "chunks": SMALL_BYTES}


def reduce_ones(session: Session, size: int, **options: Any) -> Any:
    return all_reduce(session, np.ones(size, "f4"), **options)


WAITS: dict[str, tuple[Any, dict[str, Any], int, str]] = {
    "barrier": (lambda s, t: s.barrier(), {}, at.FOR_BARRIER, "barrier 2"),
    "get": (lambda s, t: t.get(), {"sync": True}, at.FOR_ROUND, "round 1 of the table"),
    "exchange": (
        lambda s, t: t.exchange(np.ones(3, "f4"), np.zeros(3, "f4")),
        {"sync": True},
        at.FOR_ROUND,
        "round 1 of the table",
    ),
    "clock": (
        lambda s, t: (t.get(), t.get()),
        {"staleness": 0},
        at.FOR_CLOCK,
        "tick 1 (bounded staleness) of the table",
    ),
    "table": (lambda s, t: mv.ArrayTableHandler(1, session=s), {}, at.FOR_TABLE, "the creation of"),
    "reduce": (lambda s, t: reduce_ones(s, 3), {}, at.FOR_REDUCTION, "step 1 of a reduction by 2 workers"),
    "chunks": (lambda s, t: reduce_ones(s, 10**4), {}, at.FOR_REDUCTION, "step 1 of a reduction by 2"),
}


@pytest.mark.parametrize("case", WAITS)
def test_a_wait_is_seen_and_named_and_says_whom_it_needs(case: str) -> None:
    call, options, kind, words = WAITS[case]

    def work(session: Session) -> Any:
        table = mv.ArrayTableHandler(3, session=session, name="the table")
        session.barrier()  # all take part
        if session.worker_id == 1:
            control = session.control
            # not the first barrier, in which the other one may still be asleep
            earlier = session.barriers if kind == at.FOR_BARRIER else -1
            wait_for(
                lambda: (wait := control.worker(0).wait) is not None and wait.kind == kind and wait.target != earlier
            )
            if kind == at.FOR_REDUCTION:
                Reducer(session, 2)  # who has not mapped the memory cannot tell
            graph = session.wait_graph()
            wait = graph.workers[0].wait
            seen = graph.name_of(wait), graph.missing(wait), graph.describe(time.monotonic_ns())[0]
            call(session, table)
            return seen
        call(session, table)
        return session.control.worker(0).wait

    after, (name, missing, line) = together(work, 2, **options)
    assert after is None
    assert name.startswith(words)
    assert missing == [1]
    assert f"for {words}" in line
    assert line.endswith(", which needs worker 1")


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_a_reduction_that_times_out_names_who_is_missing(size: int) -> None:
    done = threading.Event()

    def work(session: Session) -> Any:
        if session.worker_id == 1:
            assert done.wait(30)
            return None
        error = outcome(lambda: reduce_ones(session, size, timeout_seconds=0.1))
        done.set()
        return error

    error, _ = together(work, 2)
    assert isinstance(error, WaitTimeoutError)
    assert "missing worker 1" in str(error)
    assert "worker 0 (pid" in str(error)
    assert "for step 1 of a reduction by 2 workers, which needs worker 1" in str(error)


def test_a_deadlock_with_a_reduction_in_it_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("multiverso.runtime.session.waiting._STILL_SECONDS", 0.3)
    told = threading.Barrier(2)

    def work(session: Session) -> Any:
        reducer = Reducer(session, 2)
        reducer.all_reduce(np.ones(3, "f4"))
        call = (lambda: reducer.all_reduce(np.ones(3, "f4"))) if session.worker_id else session.barrier
        error = outcome(call)
        told.wait(30)
        return error

    errors = together(work, 2)
    assert [type(error) for error in errors] == [DeadlockError] * 2
    assert any("for step 2 of a reduction by 2 workers, which needs worker 0" in str(e) for e in errors)


@pytest.mark.parametrize("operation", ["add", "get", "exchange", "rows"])
def test_a_worker_that_waits_for_a_lock_shows_so(operation: str) -> None:
    """In ``multiverso top`` (the node's view) and for SIGUSR1 (its own)."""
    with Node(1) as node, Session(node.address, timeout_seconds=60) as session:
        table = mv.MatrixTableHandler(3, 1, name="stuck", session=session)
        one, other = np.ones(3, "f4"), np.zeros(3, "f4")
        calls: dict[str, Any] = {
            "add": lambda: table.add(one),
            "get": table.get,
            "exchange": lambda: table.exchange(one, other),
            "rows": lambda: table.get([1]),
        }
        faults.hold_stripe(table)
        try:
            waiting = threading.Thread(target=calls[operation])
            waiting.start()
            wait_for(lambda: session.control.worker(0).wait)
            said = session.wait_graph().describe(time.monotonic_ns())
            (shown,) = observe(node.address)["workers"]
        finally:
            faults.free_stripe(table)
        waiting.join(30)
        assert session.control.worker(0).wait is None
        assert session.statistics()["tables"]["stuck"]["wait_seconds"] > 0
    words = f"a lock of stuck that process {os.getpid()} holds"
    assert f"for {words}" in said[0]
    assert (shown["waiting_for"], shown["needs"]) == (words, [0])


NEAR_THE_END = 2**31 - 3


def test_counters_that_pass_32_bits_go_on_counting() -> None:
    """Barriers (3.7 hours of nothing but barriers), reductions, tables, and the words that may wrap."""

    def work(session: Session) -> Any:
        control, me = session.control, session.worker_id
        block = control.block(me)
        reducer = Reducer(session, 2)
        session.barrier()
        store64(block + at.BARRIER, NEAR_THE_END)
        store64(reducer._lines_at + at.REDUCTION_STRIDE * me + at.PHASE, NEAR_THE_END)
        reducer._progress[0] = NEAR_THE_END
        session.barriers = session._holdings._created = NEAR_THE_END
        store32(block + at.WAIT_SEQ, NEAR_THE_END - 1)
        if me == 0:
            store32(control.address + at.EVENT, NEAR_THE_END)
        set_up.wait(30)
        for _ in range(8):
            before = control.worker(0).barrier
            if me == 1:  # the other one really waits
                wait_for(lambda: (wait := control.worker(0).wait) is not None and wait.kind == at.FOR_BARRIER)
                assert control.worker(0).wait.target == session.barriers + 1  # type: ignore[union-attr]
            session.barrier()
            assert before <= session.barriers
            if me == 1:
                wait_for(lambda: (wait := control.worker(0).wait) and wait.kind == at.FOR_REDUCTION)
            assert reducer.all_reduce(np.ones(2, "f4")).tolist() == [2, 2]
            table = mv.ArrayTableHandler(1, [4], session=session)
            assert table.snapshot().tolist() == [4]
        return session.barriers, control.worker(me).created, int(reducer._progress[0])

    set_up = threading.Barrier(2)
    last = NEAR_THE_END + 8
    assert together(work, 2) == [(last, last, last)] * 2


def test_waits_are_never_read_half_written() -> None:
    """A reader takes a wait's words as a whole, however fast they change."""
    stop = threading.Event()
    with Node(1) as node, Session(node.address, timeout_seconds=30) as session:
        control, seen = session.control, set()

        def write() -> None:
            for number in range(20_000):
                waits.begin_wait.compiled()(control.address, 0, at.FOR_LOCK, number, 0, number)
            stop.set()

        def read() -> None:
            while not stop.is_set():
                wait = control.worker(0).wait
                if wait is not None:
                    seen.add((wait.table, wait.target))

        in_threads([write, read])
        waits.finish_wait.compiled()(control.address, 0)
    assert all(table == target for table, target in seen)
