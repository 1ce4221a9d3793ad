"""Arrays shared as one: changes add up, statistics are averaged, nothing handed in is touched."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import pytest

import multiverso as mv
from multiverso.due import Due
from multiverso.errors import ClosedError, DtypeMismatchError, NotInitializedError, WaitTimeoutError
from multiverso.params import SharedParams, shared_dtype
from multiverso.runtime import Node, Session
from multiverso.testing.laws import in_each
from multiverso.theano.framework import framework

RUNS = [(1, False), (2, True), (3, False)]

ROUNDS = 20

pytestmark = pytest.mark.timeout(300)  # the first use of a dtype compiles its kernels


@pytest.fixture
def pair() -> Iterator[list[Session]]:
    """Two workers of an asynchronous job in this process, so that a test says whose turn it is."""
    with Node(workers=None) as node, Session(node.address) as first, Session(node.address) as second:
        sessions = [first, second]
        yield sessions
        sessions.clear()  # pytest keeps what a fixture yields until the test's last check


def train(rounds: int, sync: bool) -> Any:
    mv.init(sync=sync)
    me, workers = mv.worker_id(), mv.workers_num()
    weights = np.full((3, 5), me, "float32")
    wide = np.full(4, me, "float64")
    statistic = np.full(7, me, "float32")
    shared = SharedParams([weights, wide], [statistic])
    begun = [view.copy() for view in shared.arrays + shared.statistics]
    for step in range(rounds):
        shared.arrays[0] += me + 1
        shared.arrays[1] += 0.5
        shared.statistics[0][:] = step * workers + me
        shared.exchange()
    mv.barrier()
    shared.exchange()
    untouched = (weights == me).all() and (wide == me).all() and (statistic == me).all()
    return untouched, begun, [view.copy() for view in shared.arrays + shared.statistics]


trained = in_each(RUNS, train, ROUNDS, preload=(framework,))


@pytest.mark.parametrize(("workers", "sync"), RUNS)
def test_changes_add_up_exactly_and_statistics_are_averaged(workers: int, sync: bool) -> None:
    results = trained(workers, sync)
    last_round = [(ROUNDS - 1) * workers + me for me in range(workers)]
    for untouched, begun, (weights, wide, statistic) in results:
        assert untouched
        assert all((view == 0).all() for view in begun), "the master's values"
        assert weights.dtype == np.float32
        assert wide.dtype == np.float64
        np.testing.assert_array_equal(weights, ROUNDS * sum(range(1, workers + 1)))
        np.testing.assert_array_equal(wide, ROUNDS * 0.5 * workers)
        np.testing.assert_array_equal(statistic, results[0][2][2], "all workers agree")
        if sync:
            np.testing.assert_allclose(statistic, np.mean(last_round), rtol=1e-6)
        else:
            assert (statistic >= 0).all()
            assert (statistic <= max(last_round)).all()


def test_a_stragglers_old_variance_does_not_make_the_shared_one_negative(
    pair: list[Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    quick, slow = (SharedParams([], [np.ones(3, "float32")], name="variance", session=session) for session in pair)
    shared = slow._flats[0].shared

    def late(move: Any, *arguments: Any) -> None:
        """The last moment before the table is changed: here the slow one is held up."""
        for _ in range(60):
            quick.statistics[0][:] *= 0.5
            quick.exchange()
        move(*arguments)

    for owner, name in ((shared.table, "exchange"), (shared.ruled, "apply")):
        monkeypatch.setattr(owner, name, partial(late, getattr(owner, name)))
    slow.statistics[0][:] *= 0.5  # from the 1 that it has seen: a sum of halved changes gives -0.24
    slow.exchange()
    shrunk = quick.statistics[0].copy()
    assert (shrunk < 0.01).all()
    assert (slow.statistics[0] > shrunk).all()
    assert (slow.statistics[0] < 0.5).all()


def test_an_exchange_that_timed_out_goes_on_where_the_others_wait() -> None:
    """Parameters and statistics are two rounds: a worker that has finished the first must not begin it again."""
    gave_up = threading.Event()

    def work(session: Session) -> list[float]:
        shared = SharedParams([np.zeros(2, "float32")], [np.zeros(2, "float32")], session=session)
        shared.arrays[0] += 1
        shared.statistics[0][:] = 4
        if session.worker_id == 1:
            shared._flats[0].exchange(2, whole=True, always=False)
            assert gave_up.wait(60)
            shared._flats[1].exchange(2, whole=True, always=False)
        else:
            session.timeout_seconds = 0.5
            with pytest.raises(WaitTimeoutError):
                shared.exchange()
            session.timeout_seconds = 60
            gave_up.set()
            shared.exchange()
        return [*shared.arrays[0], *shared.statistics[0]]

    with Node(2) as node:

        def worker(worker_id: int) -> list[float]:
            with Session(node.address, worker_id, sync=True, timeout_seconds=60) as session:
                return work(session)

        with ThreadPoolExecutor(2) as pool:
            assert list(pool.map(worker, range(2))) == [[2, 2, 4, 4]] * 2


def test_closed_is_said_though_nobody_is_left(pair: list[Session]) -> None:
    shared = SharedParams([], [np.zeros(2, "float32")], name="mean", session=pair[0])
    for session in pair:
        session.shutdown()
    with pytest.raises(ClosedError):
        shared.exchange()


def test_an_unchanged_statistic_is_only_read(pair: list[Session]) -> None:
    first, second = (SharedParams([], [np.zeros(2, "float32")], name="mean", session=session) for session in pair)
    first.statistics[0][:] = 4
    first.exchange()
    for _ in range(3):
        second.exchange()
        first.exchange()
    np.testing.assert_array_equal(first.statistics[0], 2)
    np.testing.assert_array_equal(second.statistics[0], 2)


def test_views_keep_shape_and_order_and_share_memory_with_nothing_given(pair: list[Session]) -> None:
    given = [np.asfortranarray(np.arange(6, dtype="float32").reshape(2, 3)), np.float32(7), np.ones(0, "float32")]
    half = np.arange(3, dtype="float16")
    shared = SharedParams([*given, half], name="shapes", session=pair[0])
    assert [view.shape for view in shared.arrays] == [(2, 3), (), (0,), (3,)]
    assert [view.dtype.name for view in shared.arrays] == ["float32"] * 4
    np.testing.assert_array_equal(shared.arrays[0], given[0])
    np.testing.assert_array_equal(shared.arrays[3], half)
    assert not any(np.shares_memory(view, given[0]) for view in shared.arrays)


@pytest.mark.parametrize("dtype", ["int64", "int8", "bool", "complex64", "object", "float128"])
def test_other_dtypes_are_refused_before_any_table_is_made(pair: list[Session], dtype: str) -> None:
    arrays = [np.zeros(3, "float32"), np.zeros(3).astype(dtype)]
    with pytest.raises(DtypeMismatchError, match=dtype):
        SharedParams(arrays, name="refused", session=pair[0])
    with pytest.raises(DtypeMismatchError, match=dtype):
        shared_dtype(np.dtype(dtype))
    again = SharedParams([np.ones(5, "float32")], name="refused", session=pair[0])  # another size: no such table yet
    np.testing.assert_array_equal(again.arrays[0], 1)


def test_nothing_to_share_is_refused(pair: list[Session]) -> None:
    with pytest.raises(ValueError, match="nothing to share"):
        SharedParams([], session=pair[0])


@pytest.mark.parametrize("name", ["", 1, b"x"])
def test_what_is_no_name_is_refused(pair: list[Session], name: Any) -> None:
    with pytest.raises(ValueError, match="name is a text"):
        SharedParams([np.zeros(3, "float32")], name=name, session=pair[0])


def test_without_a_session() -> None:
    with pytest.raises((NotInitializedError, ClosedError)):  # the latter after another test's shutdown()
        SharedParams([np.zeros(3, "float32")])


def test_every_so_many_steps(pair: list[Session]) -> None:
    shared = SharedParams([np.zeros(1, "float32")], name="steps", every=3, session=pair[0])
    assert [shared.step() for _ in range(7)] == [False, False, True, False, False, True, False]
    shared.exchange()
    assert [shared.step() for _ in range(3)] == [False, False, True], "counted from the last exchange"


def test_every_so_much_time(pair: list[Session]) -> None:
    never = SharedParams([np.zeros(1, "float32")], name="h", every=timedelta(hours=1), session=pair[0])
    assert not any(never.step() for _ in range(100))
    always = SharedParams([np.zeros(1, "float32")], name="us", every=timedelta(microseconds=1), session=pair[0])
    assert any(always.step() for _ in range(1000))


@pytest.mark.parametrize("every", [0, -1, timedelta(0)])
def test_every_below_one_is_refused(every: int | timedelta) -> None:
    with pytest.raises(ValueError, match="every"):
        Due(every)


@pytest.mark.parametrize("every", [1.5, True, "1s"])
def test_every_of_another_type_is_refused(every: Any) -> None:
    with pytest.raises(TypeError, match="timedelta"):
        Due(every)


def test_time_is_refused_where_all_must_exchange_equally_often() -> None:
    mv.init(sync=True)
    try:
        with pytest.raises(ValueError, match="synchronous"):
            SharedParams([np.zeros(1, "float32")], every=timedelta(seconds=1))
    finally:
        mv.shutdown()
