"""A call on a keyed table that raised is finished by calling it again, and is never left half."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from core_support import in_threads, outcome

import multiverso as mv
from multiverso.errors import OutOfMemoryError, WaitTimeoutError
from multiverso.kernels.stripe_words import owner_word
from multiverso.layout.keyed import at
from multiverso.layout.words import ATTACHMENT
from multiverso.memory.heap import Budget
from multiverso.memory.words import load64, store64
from multiverso.runtime import Node, Session

KEYS = np.arange(8)


@contextmanager
def stopped_owner(table: mv.KeyedTable, key: int) -> Iterator[None]:
    """Another worker, which lives, holds the word of a key's row meanwhile, as if it had been stopped."""
    memory, session = table._calls._memory, table._session
    row = int(table._calls.find(np.array([key]))[0])
    place = memory.address + memory.word("ROW_WORDS") + 8 * (row >> memory.word("SHIFT"))
    block = session.control.block(1)
    owner = owner_word(load64(block + ATTACHMENT), 1)
    free = load64(place)
    store64(place, free | owner)
    try:
        yield
    finally:
        store64(place, free)


@contextmanager
def rows_apart() -> Iterator[mv.KeyedTable]:
    """Rows of which each has a word of its own, in a job of two workers."""
    with Node(2) as node:
        both = in_threads([lambda: Session(node.address, 0), lambda: Session(node.address, 1)])
        with both[1], both[0]:
            table = mv.KeyedTable(2048, dtype="float64", session=both[0])
            table.add(np.zeros((8, 2048)), KEYS)
            yield table


def _values(table: mv.KeyedTable) -> list[float]:
    return table.get(KEYS)[:, 0].tolist()


def test_an_add_goes_on_where_it_stopped() -> None:
    with rows_apart() as table:
        delta = np.ones((8, 2048))
        with stopped_owner(table, 4):
            assert isinstance(outcome(lambda: table.add(delta, KEYS, timeout_seconds=0.05)), WaitTimeoutError)
            assert isinstance(outcome(lambda: table.add(delta, KEYS, timeout_seconds=0.05)), WaitTimeoutError)
        table.add(delta, KEYS)
        assert _values(table) == [1.0] * 8
        table.add(delta, KEYS)  # another one
        assert _values(table) == [2.0] * 8
        assert table.stats()["adds"] == 3


def test_what_was_begun_is_finished_by_whatever_comes_next() -> None:
    with rows_apart() as table:
        delta = np.ones((8, 2048))
        with stopped_owner(table, 4):
            assert isinstance(outcome(lambda: table.add(delta, KEYS, timeout_seconds=0.05)), WaitTimeoutError)
            delta[:] = 100  # the rest is added as it was
            assert isinstance(outcome(lambda: table.get([0], timeout_seconds=0.05)), WaitTimeoutError)
        assert _values(table) == [1.0] * 8
        with stopped_owner(table, 2):
            outcome(lambda: table.add(delta, KEYS, timeout_seconds=0.05))
        table._session.flush()
        with stopped_owner(table, 7):
            outcome(lambda: table.add(delta, KEYS, timeout_seconds=0.05))
        table.add(delta * 2, KEYS)
        assert _values(table) == [401.0] * 8


def test_what_was_not_begun_is_not_done_later() -> None:
    with rows_apart() as table:
        with stopped_owner(table, 0):
            error = outcome(lambda: table.add(np.ones((8, 2048)), KEYS, timeout_seconds=0.05))
            assert isinstance(error, WaitTimeoutError)
        assert _values(table) == [0.0] * 8


def test_what_was_not_begun_does_not_stick_to_the_rows_that_it_had_found() -> None:
    with rows_apart() as table:
        keys, delta = KEYS.copy(), np.ones((8, 2048))
        with stopped_owner(table, 0):
            assert isinstance(outcome(lambda: table.add(delta, keys, timeout_seconds=0.05)), WaitTimeoutError)
        keys += 8  # the caller's own array
        table.add(delta, keys)
        assert _values(table) == [0.0] * 8
        assert table.get(keys)[:, 0].tolist() == [1.0] * 8


def test_an_add_that_raised_once_it_was_done_is_not_taken_for_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    with Node(1) as node, Session(node.address) as session:
        table = mv.KeyedTable(2, eviction=mv.Eviction(most_keys=100), session=session)
        keys, delta = np.arange(200), np.ones((200, 2), "f4")
        for number in range(2):
            with monkeypatch.context() as patched:
                patched.setattr(table._calls, "evict_excess", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    table.add(delta, keys)
            delta += number  # first the same call, then another one from the same array
            table.add(delta, keys)
        assert table.stats()["adds"] == 3


def test_what_cannot_be_done_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    with rows_apart() as table:
        with monkeypatch.context() as patched:
            patched.setattr("multiverso.memory.heap.free_memory", lambda: 0)
            table._calls._budget = Budget()
            with pytest.raises(OutOfMemoryError):
                table.add(np.ones((3, 2048)), [100, 101, 102])
        assert table.contains([100, 101, 102]).tolist() == [False] * 3
        table.add(np.ones((3, 2048)), [100, 101, 102])
        assert table.get(101)[0] == 1.0
        assert table.remove([100, 101]).tolist() == [True, True]
        assert table.remove([100, 101]).tolist() == [False, False]
        assert load64(table._calls._memory._line(0) + at.PIN) == 0
