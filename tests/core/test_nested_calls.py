"""A signal's handler, or a finalizer, that uses the table whose call it has interrupted."""

from __future__ import annotations

import copy
import pickle
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from core_support import MODES

import multiverso as mv
from multiverso.errors import LockStateError
from multiverso.runtime import Node, Session
from multiverso.spec import Partition, TableSpec
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


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_what_can_do_one_thing_at_a_time_refuses_its_own_thread(mode: str) -> None:
    """It waited for the lock that its own thread has, with no deadline."""
    with alone(mode) as session:
        keyed = mv.KeyedTable(2, session=session) if not session.consistency.in_rounds else None
        table = mv.ArrayTableHandler(3, session=session)
        locks = [(keyed._calls._lock, lambda: keyed.add(np.ones((1, 2)), [1]))] if keyed is not None else []
        if session.consistency.in_rounds:
            locks.append((table._operations.how._lock, lambda: table.add(np.ones(3))))
        for lock, add in locks:
            with lock:  # as in the middle of a call
                with pytest.raises(LockStateError, match="signal's handler"):
                    add()
                if keyed is not None:
                    with pytest.raises(LockStateError):
                        keyed.tick()
                session.flush()  # which a handler's shutdown() does
            add()
        values = keyed.get([1])[0, 0] if keyed is not None else table.get()[0]
        assert values == 1.0, "what was refused was not done, neither then nor later"


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
