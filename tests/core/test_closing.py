"""Tables that are closed: their memory goes to the next, and nobody touches it by a stale handle."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from typing import Any

import numpy as np
import pytest
from core_support import MODES, in_threads, outcome, shared_memory_of, together, wait_for

import multiverso as mv
from multiverso.errors import ClosedError, InterruptedRoundError, TableMismatchError
from multiverso.runtime import Node, Session
from multiverso.runtime.session.node_link import NodeLink
from multiverso.tables import ArrayTableHandler, MatrixTableHandler
from multiverso.tables.ruled import Ruled
from multiverso.tables.save_all import handlers
from multiverso.wire.requests import Close


@pytest.mark.parametrize("mode", MODES)
def test_tables_made_and_closed_again_and_again_leave_nothing(mode: str) -> None:
    """Descriptors, mappings and memory are flat, and each table begins with zeros."""
    counts: list[tuple[int, int, int]] = []
    with Node(2) as node:

        def work(session: Session) -> None:
            for i in range(60):
                with ArrayTableHandler(100_000, session=session, updater="sgd" if i % 2 else "add") as table:
                    assert not table.snapshot().any()
                    session.barrier()
                    table.add(np.ones(100_000))
                    table.get()
                with MatrixTableHandler(3, 2, session=session) as table:
                    table.get(row_ids=[1])
                session.barrier()
                if session.worker_id == 0 and i in (9, 59):
                    memory = node.status()["memory_bytes"]  # the node has done what came before that
                    looks = [len(os.listdir("/proc/self/fd")) for _ in range(100)]  # some come and go
                    descriptors = min(looks)
                    counts.append((descriptors, len(shared_memory_of(os.getpid())), memory))
                session.barrier()

        together(work, 2, node=node, **MODES[mode])
    assert counts[0][0] == counts[1][0]
    assert counts[1][1] <= counts[0][1] + 6
    assert counts[1][2] <= counts[0][2] + 3_000_000


def test_the_memory_is_freed_when_the_last_worker_has_closed_or_left() -> None:
    with Node(3) as node:
        sizes: list[int] = []

        def work(session: Session) -> None:
            table = ArrayTableHandler(1_000_000, session=session)
            session.barrier()
            if session.worker_id == 0:
                sizes.append(node.status()["memory_bytes"])
            session.barrier()
            if session.worker_id == 0:
                table.close()
                table.close()
            session.barrier()
            if session.worker_id == 1:
                session.shutdown()  # its part ends, too
                return
            wait_for(lambda: session.live_workers() == [0, 2])
            if session.worker_id == 2:
                table.add(np.ones(1_000_000))  # who has not closed it goes on
                assert table.get().sum() == 1_000_000
                table.close()
            session.barrier()
            if session.worker_id == 0:
                wait_for(lambda: node.status()["memory_bytes"] <= sizes[0] - 4_000_000)
                assert node.status()["tables"] == []
            session.barrier()

        together(work, 3, node=node)


def test_every_call_of_a_closed_handle_raises_and_its_twin_goes_on(alone: Session) -> None:
    table, twin = (MatrixTableHandler(2, 2, np.ones((2, 2)), name="w", session=alone) for _ in range(2))
    local, last = np.zeros(4, "f4"), np.zeros(4, "f4")
    table.close()
    for call in (
        lambda: table.get(),
        lambda: table.get(row_ids=[0]),
        lambda: table.get_async().wait(),
        lambda: table.add(np.ones(4)),
        lambda: table.add(np.ones(2), row_ids=[0]),
        lambda: table.add_async(np.ones(4)).wait(),
        lambda: table.exchange(local, last),
        lambda: table.view(),
        lambda: table.snapshot(),
        lambda: Ruled(table).local_state(),
        lambda: table.save("/nowhere"),
        lambda: table.version,
    ):
        with pytest.raises(ClosedError, match=r"table .* was closed|was closed: close\(\) was called"):
            call()
    assert handlers(alone) == [twin]
    twin.add(np.ones(4))
    assert twin.get().sum() == 8
    twin.close()
    assert alone.tables() == {}
    fresh = MatrixTableHandler(3, 3, name="w", session=alone)  # another table by the same name
    assert (fresh.number, fresh.get().sum()) == (2, 0)


def test_views_outlive_it_frozen_while_the_memory_is_another_table(alone: Session) -> None:
    table = ArrayTableHandler(5000, np.arange(5000), session=alone)
    view, part = table.view(), table.view()[10:13]
    shared = mv.rules.share(np.ones(5000, "f4"), mv.rules.asgd(), session=alone)
    own = shared.ruled.local_state()[0]
    table.close()
    shared.table.close()
    with ArrayTableHandler(5000, 7 * np.ones(5000), session=alone) as other:
        other.add(np.ones(5000))
        own[:] = 99
        np.testing.assert_array_equal(view, np.arange(5000))
        assert part.tolist() == [10, 11, 12]
        assert not view.flags.writeable
        assert (other.get() == 8).all()
        with pytest.raises(ClosedError):
            shared.exchange(np.ones(5000, "f4"))


def test_a_thread_in_the_middle_of_a_call_never_touches_the_next_table(alone: Session) -> None:
    """Closed under a thread that adds without end: it raises, and what lies there next stays as it is."""
    ones = np.ones(200_000, "f4")

    def once() -> Any:
        table = ArrayTableHandler(200_000, session=alone)
        begun = threading.Event()

        def add() -> None:
            while True:
                table.add(ones)
                begun.set()

        def close() -> None:
            assert begun.wait(30)
            table.close()
            with ArrayTableHandler(200_000, session=alone) as other:
                for _ in range(20):
                    assert not other.get().any()

        return in_threads([lambda: outcome(add), close])[0]

    for _ in range(5):
        assert isinstance(once(), ClosedError)


def test_the_others_rounds_and_clocks_go_on_without_who_has_closed() -> None:
    for mode in ("sync", "bounded"):

        def work(session: Session) -> Any:
            table = ArrayTableHandler(3, session=session)
            table.add([1, 1, 1])
            if session.worker_id == 0 and session.consistency.in_rounds:
                with pytest.raises(InterruptedRoundError, match=r"has added .* no round has taken up; get\(\)"):
                    table.close()
            table.get()
            if session.worker_id == 0:
                table.close()
                return None
            for _ in range(5):
                table.add([1, 0, 0])
                last = table.get()
            return last.tolist()

        assert together(work, 2, **MODES[mode])[1] == [7.0, 2.0, 2.0]


def test_a_name_is_attached_to_again_while_somebody_has_it() -> None:
    with Node(None) as node, Session(node.address) as one, Session(node.address) as two:
        first = ArrayTableHandler(2, [1, 2], name="w", session=one)
        ArrayTableHandler(2, name="w", session=two).close()
        again = ArrayTableHandler(2, name="w", session=two)
        assert again.get().tolist() == [1, 2]
        first.close()
        again.close()
        assert node.status()["tables"] == []  # whichever connection the node reads first from here on
        assert ArrayTableHandler(2, name="w", session=one).get().tolist() == [0, 0]


def test_a_table_by_order_that_all_have_closed_is_not_made_anew_for_a_latecomer() -> None:
    with Node(None) as node, Session(node.address) as one:
        ArrayTableHandler(2, session=one).close()
        kept = ArrayTableHandler(2, [3, 4], session=one)
        assert kept.number == 2
        with (
            Session(node.address) as late,
            pytest.raises(TableMismatchError, match="table number 1 was closed by all workers that had it"),
        ):
            ArrayTableHandler(2, session=late)


@pytest.mark.parametrize("heard", [False, True])
def test_an_interrupted_close_is_finished_by_the_next_call(alone: Session, monkeypatch: Any, heard: bool) -> None:
    table = ArrayTableHandler(2, session=alone)
    ask, calls = NodeLink.ask, []

    def interrupted(link: NodeLink, message: Any, *arguments: Any) -> Any:
        calls.append(message)
        if len(calls) == 1 and not heard:
            raise KeyboardInterrupt
        answer = ask(link, message, *arguments)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return answer

    monkeypatch.setattr(NodeLink, "ask", interrupted)
    with pytest.raises(KeyboardInterrupt):
        table.close()
    with pytest.raises(ClosedError):
        table.get()
    table.close()
    assert calls == [Close(1), Close(1)]
    assert ArrayTableHandler(3, session=alone).number == 2
    gc.collect()


def test_a_table_that_is_kept_keeps_no_other_memory_of_a_job_that_is_over() -> None:
    """As in a loop that trains again and again in one process, and keeps a table of before."""
    node = Node(1)
    session = Session(node.address, on_close=node.close)
    kept = ArrayTableHandler(3, session=session)
    others, node_was_there = ArrayTableHandler(3, session=session), weakref.ref(node)
    memory_was_there = weakref.ref(session.tables()[others.number].segment)
    session.shutdown()
    del node, session, others
    wait_for(lambda: gc.collect() >= 0 and node_was_there() is None)
    assert memory_was_there() is None
    with pytest.raises(ClosedError):
        kept.get()
