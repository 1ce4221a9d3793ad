"""Keyed tables that are closed: their memory is freed, and nobody comes to it by a stale object."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from core_support import shared_memory_of, together, wait_for

import multiverso as mv
from multiverso.errors import ClosedError, NodeLostError, TableMismatchError
from multiverso.layout.keyed import at
from multiverso.memory.words import load64
from multiverso.runtime import Node, Session
from multiverso.runtime.session.holdings import Holdings
from multiverso.tables.keyed.calls import KeyedCalls

KEYS = np.arange(40_000)


def _memory(of: Callable[[os.stat_result], int]) -> int:
    """What a job's memory says of itself, of the only job of this process."""
    found = []
    for path in Path("/proc/self/fd").iterdir():
        try:
            if "memfd:multiverso" in os.readlink(path):
                found.append(of(os.stat(path)))
        except FileNotFoundError:
            continue
    return max(found)


def test_it_is_freed_when_the_last_worker_has_closed_it_and_its_name_is_another_s() -> None:
    blocks = lambda: _memory(lambda stat: stat.st_blocks)  # noqa: E731
    before: list[int] = []

    def work(session: Session) -> None:
        table = mv.KeyedTable(16, name="words", session=session)
        session.barrier()
        if session.worker_id == 0:
            before.append(blocks())
            table.add(np.ones((KEYS.size, 16)), KEYS)
            batches = table.items(batch=100)
            next(batches)
            table.close()
            table.close()
            uses: list[Callable[[], Any]] = [
                lambda: table.get([1]),
                lambda: table.add(np.ones((1, 16)), [1]),
                lambda: table.remove([1]),
                lambda: table.contains([1]),
                lambda: len(table),
                lambda: list(batches),
                lambda: table.ticks,
                table.stats,
                table.check,
                table.tick,
                lambda: table.save("/nowhere"),
            ]
            for use in uses:
                with pytest.raises(ClosedError, match="close\\(\\) was called"):
                    use()
            assert table.dim == 16
            assert "words" in repr(table)
        session.barrier()
        if session.worker_id == 1:
            table.add(np.ones((KEYS.size, 16)), KEYS)
            assert (table.get(KEYS) == 2).all()
            assert blocks() > before[0] + 5_000
            table.close()
            wait_for(lambda: blocks() <= before[0])
        session.barrier()
        with mv.KeyedTable(3, name="words", session=session, updater="adagrad") as other:
            session.barrier()
            assert len(other) == 0
            session.barrier()

    together(work)


def test_tables_made_and_closed_again_and_again_leave_nothing() -> None:
    seen: list[tuple[int, int, int]] = []
    with Node(2) as node:

        def work(session: Session) -> None:
            for i in range(12):
                with mv.KeyedTable(4, session=session) as first, mv.KeyedTable(4, session=session) as second:
                    first.add(np.ones((100, 4)), KEYS[:100])
                    second.add(np.ones((100, 4)), KEYS[:100] + 50 * session.worker_id)
                    session.barrier()
                    assert (len(first), len(second)) == (100, 150)
                    session.barrier()
                session.barrier()
                if session.worker_id == 0 and i in (2, 11):
                    gc.collect()
                    size = _memory(lambda stat: stat.st_size)
                    seen.append((size, len(os.listdir("/proc/self/fd")), len(shared_memory_of(os.getpid()))))
                session.barrier()

        together(work, node=node)
    assert seen[1][0] == seen[0][0]
    assert seen[1][1] <= seen[0][1] + 2
    assert seen[1][2] <= seen[0][2] + 2


def test_each_object_of_a_table_is_closed_for_itself(alone: Session) -> None:
    first = mv.KeyedTable(2, name="twice", session=alone)
    second = mv.KeyedTable(2, name="twice", session=alone)
    first.add([[1, 1]], [7])
    first.close()
    with pytest.raises(ClosedError):
        first.get([7])
    assert second.get([7]).tolist() == [[1, 1]]
    alone.flush()
    second.close()
    again = mv.KeyedTable(2, name="twice", session=alone)
    assert len(again) == 0


def test_who_reads_it_from_outside_is_told_that_it_is_gone(alone: Session) -> None:
    table = mv.KeyedTable(2, name="read", session=alone)
    table.add([[1, 1]], [7])
    with mv.attach_read_only("read", alone.address) as reader:
        assert reader.get([7]).tolist() == [[1, 1]]
        table.close()
        with pytest.raises(NodeLostError):
            reader.get([7])


def test_who_reads_it_from_outside_gets_nothing_of_the_table_in_its_place(alone: Session) -> None:
    table = mv.KeyedTable(2, name="read", session=alone)
    table.add(np.ones((100, 2)), KEYS[:100])
    numbers = np.full(1000, 7, np.float32)
    out = numbers[:200].reshape(100, 2)
    with mv.attach_read_only("read", alone.address) as reader:
        assert (reader.get(KEYS[:100], out) == 1).all()
        table.close()
        wider = mv.KeyedTable(200, session=alone)
        wider.add(np.ones((100, 200)), KEYS[:100])
        assert load64(reader._segment.address + at.COLUMNS) == 200, "not the same place: nothing is tested here"
        with pytest.raises(NodeLostError):
            reader.get(KEYS[:100], out)
    assert (numbers[200:] == 7).all(), "beyond what the caller gave"


def test_an_add_after_which_another_thread_closes_the_table_returns(
    alone: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = mv.KeyedTable(2, session=alone, eviction=mv.Eviction(most_keys=1))
    whole = KeyedCalls.add

    def add_and_close(calls: KeyedCalls, *arguments: Any) -> None:
        whole(calls, *arguments)
        other = threading.Thread(target=table.close)
        other.start()
        other.join()

    monkeypatch.setattr(KeyedCalls, "add", add_and_close)
    table.add(np.ones((100, 2)), KEYS[:100])
    with pytest.raises(ClosedError):
        table.get([1])


def test_a_handler_may_close_the_table_that_is_being_closed(alone: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    tell = Holdings._tell_closed
    tables = mv.KeyedTable(2, session=alone), mv.ArrayTableHandler(3, session=alone)
    told = []

    def interrupted(holdings: Holdings, number: int, what: str, may_ask: bool) -> None:
        told.append(number)
        if len(told) % 2:  # else this is the handler's own
            table.close()
        tell(holdings, number, what, may_ask)

    monkeypatch.setattr(Holdings, "_tell_closed", interrupted)
    for table in tables:
        table.close()
        with pytest.raises(ClosedError):
            table.save("/nowhere")
    assert len(told) == 4


def test_a_session_ends_whose_tables_could_not_be_closed() -> None:
    node = Node(1)
    session = Session(node.address)
    tables = mv.KeyedTable(2, session=session), mv.ArrayTableHandler(3, session=session)
    node.close()
    for table in tables:
        with pytest.raises(NodeLostError):
            table.close()
    session.flush()
    session.shutdown()


def test_who_comes_after_a_table_by_order_was_closed_is_told_so() -> None:
    def work(session: Session) -> None:
        if session.worker_id == 0:
            with mv.KeyedTable(2, session=session) as table:
                table.add([[1, 1]], [7])
        session.barrier()
        if session.worker_id == 1:
            with pytest.raises(TableMismatchError, match=r"closed by all workers that had it.*barrier\(\)"):
                mv.KeyedTable(2, session=session)
        session.barrier()

    together(work)


def test_a_worker_that_leaves_counts_as_one_that_has_closed_it() -> None:
    with Node(2) as node:

        def work(session: Session) -> None:
            table = mv.KeyedTable(2, name="left", session=session)
            session.barrier()
            if session.worker_id == 1:
                session.shutdown()
                return
            table.add([[1, 1]], [7])
            table.close()
            wait_for(lambda: session.live_workers() == [0])

            def is_new() -> bool:
                with mv.KeyedTable(2, name="left", session=session) as other:
                    return len(other) == 0

            wait_for(is_new)

        together(work, node=node)
