"""Plain memory by name: create or attach, zeroed, aligned, and no table."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from core_support import outcome, together

import multiverso as mv
from multiverso.errors import ClosedError, ShapeMismatchError, TableMismatchError
from multiverso.runtime import Node, Session, SharedMemory
from multiverso.runtime.collective.reducer import Reducer
from multiverso.tables.save_all import save_all


def test_all_workers_see_the_same_zeroed_aligned_bytes() -> None:
    def work(session: Session) -> Any:
        small, large = (session.shared_memory(f"m{n}", n) for n in (3, 100_000))
        clean = not small.array.any() and not large.array.any()
        session.barrier()
        large.view("int64")[session.worker_id] = session.worker_id + 1
        session.barrier()
        again = session.shared_memory("m100000", 100_000)
        assert again.view("int64")[:3].tolist() == [1, 2, 3]
        return clean, small.nbytes, small.array.dtype == np.uint8, small.address % 64, large.address % 4096

    assert together(work, 3) == [(True, 3, True, 0, 0)] * 3


def test_only_its_creator_initialises_it_and_nobody_sees_it_before() -> None:
    calls: list[int] = []

    def work(session: Session) -> Any:
        def initialise(memory: SharedMemory) -> None:
            calls.append(session.worker_id)
            memory.array[:] = 7

        return int(session.shared_memory("m", 1000, initialise).array.min())

    assert together(work, 4) == [7] * 4
    assert len(calls) == 1


def test_an_error_while_it_is_initialised_leaves_it_to_the_next_worker_from_zeros() -> None:
    failing, asked = threading.Event(), threading.Event()

    def work(session: Session) -> Any:
        if session.worker_id == 0:

            def fail(memory: SharedMemory) -> None:
                memory.array[:] = 9
                failing.set()
                assert asked.wait(30)
                raise KeyError("the user's own")

            return repr(outcome(lambda: session.shared_memory("m", 64, fail)))
        assert failing.wait(30)

        def initialise(memory: SharedMemory) -> None:
            memory.array[0] += 1

        asked.set()
        return session.shared_memory("m", 64, initialise).array[:2].tolist()

    assert together(work, 2) == ['KeyError("the user\'s own")', [1, 0]]


def test_another_size_and_no_size_are_refused() -> None:
    with Node(None) as node, Session(node.address) as one, Session(node.address) as two:
        one.shared_memory("m", 10)
        with pytest.raises(TableMismatchError, match=r"shared memory 'm' is .* of 10 bytes .* asked for"):
            two.shared_memory("m", 11)
        with pytest.raises(ShapeMismatchError, match="nbytes must be an integer"):
            two.shared_memory("m", 0)
        with pytest.raises(ValueError, match="name is a text"):
            two.shared_memory("", 8)


def test_it_is_no_table(alone: Session, tmp_path: Path) -> None:
    """Not in statistics, status, saves or numbers; and a table may have the same name."""
    alone.shared_memory("w", 64)
    reducer = Reducer(alone, 1)
    assert reducer.all_reduce(np.ones(100_000)).sum() == 100_000
    table = mv.ArrayTableHandler(2, name="w", session=alone)
    assert table.number == 1
    assert list(alone.statistics()["tables"]) == ["w"]
    assert list(alone.tables()) == [1]
    save_all(alone, tmp_path)
    assert len(list(tmp_path.glob("table-*"))) == 1


def test_it_stays_readable_after_the_session_which_gives_no_more() -> None:
    with Node(1) as node:
        session = Session(node.address)
        memory = session.shared_memory("m", 64)
        memory.array[:] = 5
        session.shutdown()
        assert memory.array.sum() == 5 * 64
        with pytest.raises(ClosedError):
            session.shared_memory("m", 64)
