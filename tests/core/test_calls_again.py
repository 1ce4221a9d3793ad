"""A call that raised is finished by calling it again; what it had begun is never left half."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from core_support import together

import multiverso as mv
from multiverso.errors import InterruptedRoundError, WaitTimeoutError
from multiverso.runtime import Session
from multiverso.spec.table import Partition, TableSpec
from multiverso.testing import faults

STRIPE = Partition.of(TableSpec("array", 1, 10**6)).stripe_size
SIZE = 3 * STRIPE


@contextmanager
def held(table: Any, session: Session, stripe: int = 2) -> Iterator[None]:
    """Somebody has a stripe, by default the last, as a process would that is stopped; nobody waits long for it."""
    faults.hold_stripe(table, stripe)
    patience = session.timeout_seconds
    session.timeout_seconds = 0.01
    try:
        yield
    finally:
        session.timeout_seconds = patience
        faults.free_stripe(table, stripe)


ROWS, COLUMNS = 3, STRIPE


def whole(table: Any, value: float) -> None:
    table.add(np.full(SIZE, value, "f4"))


def rows(table: Any, value: float) -> None:
    table.add(np.full((3, COLUMNS), value, "f4"), row_ids=[0, 1, 2])


@pytest.fixture
def stuck(alone: Session) -> Iterator[Any]:
    """A table of three stripes."""
    table = mv.MatrixTableHandler(ROWS, COLUMNS, session=alone)
    # pytest keeps what it has given to a test; this lets the memory go all the same
    yield weakref.proxy(table)
    table.close()


@pytest.mark.parametrize("add", [whole, rows])
def test_an_add_that_timed_out_goes_on_where_it_stopped(alone: Session, stuck: Any, add: Callable[..., None]) -> None:
    with held(stuck, alone):
        for _ in range(2):
            with pytest.raises(WaitTimeoutError):
                add(stuck, 1)
        assert np.unique(stuck.view()).tolist() == [0, 1]
    add(stuck, 1)
    assert (stuck.get() == 1).all()
    add(stuck, 1)  # that one has returned: this is another
    assert (stuck.get() == 2).all()
    assert stuck.version == 2


@pytest.mark.parametrize("add", [whole, rows])
@pytest.mark.parametrize("then", ["add", "get", "flush", "barrier", "exchange", "snapshot"])
def test_another_call_first_does_what_is_left(alone: Session, stuck: Any, add: Callable[..., None], then: str) -> None:
    with held(stuck, alone), pytest.raises(WaitTimeoutError):
        add(stuck, 1)
    local, last = np.full(SIZE, 5, "f4"), np.zeros(SIZE, "f4")
    calls: dict[str, Callable[[], Any]] = {
        "add": lambda: stuck.add(np.full(SIZE, 5, "f4")),
        "get": stuck.get,
        "flush": stuck.flush,
        "barrier": alone.barrier,
        "exchange": lambda: stuck.exchange(local, last),
        "snapshot": stuck.snapshot,
    }
    calls[then]()
    expected = 6 if then in ("add", "exchange") else 1
    assert (stuck.view() == expected).all()
    stuck.flush()
    assert (stuck.view() == expected).all(), "something was left, once more"


@pytest.mark.parametrize("add", [whole, rows])
def test_what_has_changed_is_looked_for_once_the_rest_of_an_add_is_done(
    alone: Session, stuck: Any, add: Callable[..., None]
) -> None:
    stuck.get(changed=True)
    with held(stuck, alone, 1), pytest.raises(WaitTimeoutError):
        add(stuck, 1)
    ids, values = stuck.get(changed=True)
    assert ids.tolist() == [0, 1, 2]
    assert (values == 1).all()
    assert stuck.get(changed=True)[0].size == 0


def test_an_exchange_that_timed_out_takes_no_step_twice(alone: Session) -> None:
    table = mv.ArrayTableHandler(SIZE, session=alone, updater=mv.updaters.nesterov(1.0, 0.5))
    twin = mv.ArrayTableHandler(SIZE, session=alone, updater=mv.updaters.nesterov(1.0, 0.5))
    local, last = np.ones(SIZE, "f4"), np.zeros(SIZE, "f4")
    other, before = local.copy(), last.copy()
    with held(table, alone), pytest.raises(WaitTimeoutError):
        table.exchange(local, last, timeout_seconds=0.01)
    table.exchange(local, last)
    twin.exchange(other, before)
    np.testing.assert_array_equal(local, other)
    np.testing.assert_array_equal(last, before)
    np.testing.assert_array_equal(table.snapshot(), twin.snapshot())


def test_a_round_is_finished_with_the_arrays_that_began_it() -> None:
    gave_up = threading.Event()

    def work(session: Session) -> Any:
        table = mv.ArrayTableHandler(3, session=session)
        local, last = np.ones(3, "f4"), np.zeros(3, "f4")
        if session.worker_id == 1:
            assert gave_up.wait(30)
        else:
            with pytest.raises(WaitTimeoutError):
                table.exchange(local, last, timeout_seconds=0.1)
            with pytest.raises(InterruptedRoundError, match="call exchange again with the same arrays"):
                table.exchange(local.copy(), last.copy())
            with pytest.raises(InterruptedRoundError, match="call exchange again to finish it first"):
                table.get()
            gave_up.set()
        table.exchange(local, last)
        return local.tolist(), table.version

    assert together(work, 2, sync=True) == [([2.0] * 3, 1)] * 2
