"""A deadline is one moment for everything below a call, however many things that waits for."""

from __future__ import annotations

import math
import threading
import time
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
from core_support import outcome, together

import multiverso as mv
from multiverso.deadline import Deadline
from multiverso.errors import WaitTimeoutError
from multiverso.kernels import waits
from multiverso.layout import words as at
from multiverso.memory.words import load64
from multiverso.runtime import Node, Session
from multiverso.runtime.collective.reducer import Reducer
from multiverso.runtime.session.waiting import Patience
from multiverso.tables.pending import Queue
from multiverso.testing import faults


def test_a_deadline() -> None:
    before = time.monotonic()
    deadline = Deadline.after(100)
    assert before + 100 <= deadline.at <= time.monotonic() + 100
    assert deadline.left(5) == 5
    assert 90 < deadline.left() <= 100
    assert deadline.slice_left() == 0.5
    assert not deadline.passed
    assert Deadline.after(0).passed
    assert Deadline.after(0).left() == Deadline.after(0).slice_left() == 0
    assert str(Deadline.after(0.5)) == "0.5 s"


@pytest.mark.parametrize("forever", [math.inf, 1e10, 10**30, np.float64(1e300)])
def test_no_limit(forever: Any) -> None:
    deadline = Deadline.after(forever)
    assert deadline.slice_left() == 0.5
    assert deadline.left() > 1e9
    assert not deadline.passed


@pytest.mark.parametrize("bad", [-1, math.nan, "10", True, [1], "soon"])
def test_what_is_no_number_of_seconds_is_refused(bad: Any, alone: Session) -> None:
    table = mv.ArrayTableHandler(1, session=alone)
    for call in (table.get, alone.barrier, alone.flush, table.flush):
        with pytest.raises(ValueError, match="a timeout is a number of seconds, 0 or more"):
            call(timeout_seconds=bad)
    assert table.get().tolist() == [0]


@pytest.mark.parametrize("forever", [math.inf, 1e10])
@pytest.mark.parametrize("options", [{}, {"sync": True}, {"staleness": 1}], ids=["async", "sync", "bounded"])
def test_a_call_without_a_limit(forever: float, options: dict[str, Any]) -> None:
    limits = {"timeout_seconds": forever, "start_timeout_seconds": forever}

    def work(session: Session) -> Any:
        table = mv.ArrayTableHandler(2, session=session)
        session.barrier(forever)
        pending = [table.add_async([1, 1]) for _ in range(40)]  # more than may be pending
        for one in pending:
            one.wait(forever)
        session.flush(forever)
        Reducer(session, 2).all_reduce(np.ones(3), timeout_seconds=forever)
        session.barrier()
        return table.get(timeout_seconds=forever).tolist()

    assert together(work, 2, **options, **limits) == [[80.0, 80.0]] * 2


def test_a_short_deadline_ends_a_slice_early(alone: Session) -> None:
    control, me = alone.control.address, alone.worker_id
    began = time.monotonic_ns()
    whole = began + waits.SLICE_NANOSECONDS
    assert waits.slice_end(control, me, began) == whole
    alone.start_deadline(10)
    assert waits.slice_end(control, me, began) == whole
    deadline = alone.start_deadline(0.1)
    began = math.ceil(deadline.at * 1e9) - 10**8
    whole = began + waits.SLICE_NANOSECONDS
    assert waits.slice_end(control, me, began) == began + 10**8
    assert waits.slice_end(control, me, began + 10**9) == whole + 10**9  # one that has passed counts no more
    assert waits.slice_end(0, me, began) == whole


def test_the_last_slice_ends_with_the_deadline(alone: Session) -> None:
    table = mv.ArrayTableHandler(3, session=alone)
    look_at = alone.control.block(alone.worker_id) + at.LOOK_AT
    faults.hold_stripe(table)
    try:
        for seconds in (0.7, 3, 10, 30):  # this process may not run for as long
            error = outcome(lambda seconds=seconds: table.get(timeout_seconds=seconds))
            if load64(look_at):
                break
    finally:
        faults.free_stripe(table)
    assert isinstance(error, WaitTimeoutError)
    assert load64(look_at) > 0


def test_a_barrier_and_all_its_flushes_have_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    moments: dict[int, list[float]] = defaultdict(list)  # of each worker's thread
    flush, begin = Queue.flush, Patience.__init__

    def flush_noted(queue: Queue, deadline: Deadline) -> None:
        moments[threading.get_ident()].append(deadline.at)
        flush(queue, deadline)

    def begin_noted(patience: Patience, session: Session, deadline: Deadline, what: str, link: Any = None) -> None:
        if what.startswith("barrier"):
            moments[threading.get_ident()].append(deadline.at)
        begin(patience, session, deadline, what, link)

    monkeypatch.setattr(Queue, "flush", flush_noted)
    monkeypatch.setattr(Patience, "__init__", begin_noted)

    def work(session: Session) -> Any:
        tables = [mv.ArrayTableHandler(2, session=session) for _ in range(3)]
        for table in tables:
            table.add_async([1, 1])
        if session.worker_id == 1:
            session.flush()
            assert over.wait(30)
            return moments[threading.get_ident()][:]
        error = outcome(lambda: session.barrier(timeout_seconds=1.5))
        seen = moments[threading.get_ident()][:]
        over.set()
        assert isinstance(error, WaitTimeoutError)
        return seen

    over = threading.Event()
    barrier, flushes = together(work, 2)
    assert len(barrier) == 4  # three tables and the wait itself
    assert len(set(barrier)) == 1
    assert len(flushes) == 3
    assert len(set(flushes)) == 1


def test_a_read_and_its_flush_have_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = []
    flush, begin = Queue.flush, Patience.__init__

    def flush_noted(queue: Queue, deadline: Deadline) -> None:
        moments.append(deadline.at)
        flush(queue, deadline)

    def begin_noted(patience: Patience, session: Session, deadline: Deadline, what: str) -> None:
        moments.append(deadline.at)
        begin(patience, session, deadline, what)

    with Node(1) as node, Session(node.address, timeout_seconds=60) as session:
        table = mv.ArrayTableHandler(3, session=session)
        table.add_async([1, 2, 3]).wait(30)
        monkeypatch.setattr(Queue, "flush", flush_noted)
        monkeypatch.setattr(Patience, "__init__", begin_noted)
        faults.hold_stripe(table)
        try:
            error = outcome(lambda: table.get(timeout_seconds=0.1))
        finally:
            faults.free_stripe(table)
        assert isinstance(error, WaitTimeoutError)
        assert len(moments) == 2
        assert len(set(moments)) == 1
        monkeypatch.undo()
