"""A signal's handler, or a finalizer, that uses the table whose call it has interrupted."""

from __future__ import annotations

import copy
import pickle
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from core_support import MODES, in_threads, wait_for

import multiverso as mv
from multiverso.errors import LockStateError
from multiverso.kernels.keyed import calls as kernels
from multiverso.runtime import Node, Session
from multiverso.spec.table import Partition, TableSpec
from multiverso.tables.keyed.progress import Call, Removing
from multiverso.tables.save_all import handlers
from multiverso.testing import faults

STRIPE = Partition.of(TableSpec("array", 1, 10**6)).stripe_size


@contextmanager
def alone(mode: str = "async") -> Iterator[Session]:
    with Node(1) as node, Session(node.address, timeout_seconds=30, **MODES[mode]) as session:
        yield session


def test_a_handler_adds_while_the_call_that_it_interrupted_has_done_a_part() -> None:
    """Both wrote how far they were into one place: the handler's began where the other one had stopped."""
    with alone() as session:
        _interrupt_an_add(mv.ArrayTableHandler(3 * STRIPE, session=session))


def _interrupt_an_add(table: Any) -> None:
    faults.hold_stripe(table, 2)

    def handle(*_: Any) -> None:
        faults.free_stripe(table, 2)
        table.add(np.full(3 * STRIPE, 10.0))

    before = signal.signal(signal.SIGALRM, handle)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.02)
        table.add(np.ones(3 * STRIPE))
        assert np.unique(table.get()).tolist() == [11.0]
    finally:
        signal.signal(signal.SIGALRM, before)


def test_a_handler_closes_a_table_while_another_one_is_waited_for() -> None:
    """The node's answer was the handler's then: the call that it had interrupted waited for its own to its deadline."""
    with Node(2) as node:
        sessions = [lambda i=i: Session(node.address, i, timeout_seconds=30) for i in range(2)]
        one, two = in_threads(sessions)
        one.made_by = threading.get_ident()
        tables = [mv.ArrayTableHandler(2, name=name, session=one) for name in "ab"]
        with ThreadPoolExecutor() as pool:

            def handle(*_: Any) -> None:
                tables[0].close()
                pool.submit(mv.ArrayTableHandler, 3, session=two)

            before = signal.signal(signal.SIGALRM, handle)
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.05)
                assert mv.ArrayTableHandler(3, session=one).get().tolist() == [0, 0, 0]
            finally:
                signal.signal(signal.SIGALRM, before)
        wait_for(lambda: [table["name"] for table in node.status()["tables"]] == ["b", None])
        assert len(handlers(one)) == 2
        in_threads([one.shutdown, two.shutdown])


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_what_can_do_one_thing_at_a_time_refuses_its_own_thread(mode: str) -> None:
    """It waited for the lock that its own thread has, with no deadline."""
    with alone(mode) as session:
        keyed = None
        if not session.consistency.in_rounds:
            keyed = mv.KeyedTable(2, eviction=mv.Eviction(idle_ticks=9), session=session)
        table = mv.ArrayTableHandler(3, session=session)
        locks = [(keyed._calls.lock, lambda: keyed.add(np.ones((1, 2)), [1]))] if keyed is not None else []
        if session.consistency.in_rounds:
            locks.append((table._operations.how._lock, lambda: table.add(np.ones(3))))
        for lock, add in locks:
            with lock:  # as in the middle of a call
                with pytest.raises(LockStateError, match="signal's handler"):
                    add()
                if keyed is not None:
                    keyed._calls._mine.call = outer = Call(Removing.of(np.array([1])))
                    for refused in (keyed.tick, keyed.evict):
                        with pytest.raises(LockStateError):
                            refused()
                    assert keyed._calls._mine.call is outer, "it is still known if it is made again"
                    keyed._calls._mine.call = None
                session.flush()  # which a handler's shutdown() does
            add()
        values = keyed.get([1])[0, 0] if keyed is not None else table.get()[0]
        assert values == 1.0, "what was refused was not done, neither then nor later"


class _Interrupted:
    """A lock, and a signal's handler that comes while a call waits for it."""

    def __init__(self, lock: Any, handler: Callable[[], None]) -> None:
        self._lock, self._handlers, self._is_owned = lock, [handler], lock._is_owned

    def __enter__(self) -> None:
        while self._handlers:
            self._handlers.pop()()
        self._lock.__enter__()

    def __exit__(self, *about: Any) -> None:
        self._lock.__exit__(*about)


def test_a_handlers_add_while_another_one_waits_for_its_turn_leaves_that_to_be_made_again() -> None:
    """Its end was taken for that of the call that it had interrupted, whose repetition then was one more add."""
    with alone() as session:
        table = mv.KeyedTable(2, session=session)
        calls = table._calls
        run = calls.run

        def run_and_raise(kernel: Any, *arguments: Any, **more: Any) -> None:
            run(kernel, *arguments, **more)
            if kernel is kernels.add:
                calls.run = run
                raise KeyboardInterrupt

        def handle() -> None:
            table.add(np.full((1, 2), 10.0), [2])
            calls.run = run_and_raise

        calls.lock = _Interrupted(calls.lock, handle)
        with pytest.raises(KeyboardInterrupt):
            table.add(np.ones((1, 2)), [1])
        table.add(np.ones((1, 2)), [1])
        assert table.get([1, 2])[:, 0].tolist() == [1.0, 10.0]


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_what_belongs_to_this_process_is_neither_pickled_nor_copied(mode: str) -> None:
    with alone(mode) as session:
        table = mv.ArrayTableHandler(3, session=session)
        things = [table, session, mv.Counter("c", session=session), table.add_async(np.ones(3))]
        if not session.consistency.in_rounds:
            things.append(mv.KeyedTable(2, session=session))
        for thing in things:
            for copied in (pickle.dumps, copy.copy, copy.deepcopy):
                with pytest.raises(TypeError, match="belongs to this process"):
                    copied(thing)


@pytest.mark.parametrize("raises", [False, True])
def test_a_handlers_equal_add_is_none_of_the_add_that_it_has_interrupted(raises: bool) -> None:
    """An add that is complete, and has not returned yet, was taken for one that raised: the handler's was left out."""
    with alone() as session:
        table = mv.KeyedTable(2, session=session)
        make, delta = table._calls.make, np.ones((1, 2))
        handlers = [lambda: (table.add(delta, [1]), table.get([1]))]

        def make_interrupted(work: Any, do: Any, until: Any) -> Any:
            def do_interrupted(call: Any, until: Any) -> None:
                do(call, until)
                if handlers:  # a signal comes before the first add has returned
                    handlers.pop()()
                    if raises:
                        raise KeyboardInterrupt

            return make(work, do_interrupted, until)

        table._calls.make = make_interrupted
        if raises:
            with pytest.raises(KeyboardInterrupt):
                table.add(delta, [1])
        table.add(delta, [1])
        assert table.get([1]).tolist() == [[2.0, 2.0]], "the handler's once, and the other once"
        table.add(delta, [1])
        assert table.get([1]).tolist() == [[3.0, 3.0]]


def test_an_add_that_raised_with_a_handlers_add_is_recognised_all_the_same() -> None:
    """Both raise: the handler's, and by it the one that it has interrupted, which had done all its work."""
    with alone() as session:
        table = mv.KeyedTable(2, session=session)
        make, delta = table._calls.make, np.ones((1, 2))
        handlers = [lambda: table.add(delta, [2])]

        def make_interrupted(work: Any, do: Any, until: Any) -> Any:
            def do_interrupted(call: Any, until: Any) -> None:
                do(call, until)
                if handlers:
                    handlers.pop()()
                elif work.keys[0] == 2:
                    raise KeyboardInterrupt

            return make(work, do_interrupted, until)

        table._calls.make = make_interrupted
        with pytest.raises(KeyboardInterrupt):
            table.add(delta, [1])
        table.add(delta, [1])
        assert table.get([1, 2]).tolist() == [[1.0, 1.0]] * 2
        table.add(delta, [1])
        assert table.get([1, 2]).tolist() == [[2.0, 2.0], [1.0, 1.0]]
