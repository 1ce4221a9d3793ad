"""Kernels against NumPy, on memory that no node or session knows."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from multiverso import kernels, updaters
from multiverso.compiling.on_demand import compile_update, load_module
from multiverso.consistency.protocol import Call
from multiverso.kernels import dense as dense_kernels
from multiverso.kernels import locking
from multiverso.layout import words as at
from multiverso.layout.worker_index import WorkerIndex
from multiverso.memory import heap, segment
from multiverso.memory.words import load32, store32, store64
from multiverso.shards.shard import Shard, initialise
from multiverso.spec.modes import MODES
from multiverso.spec.table import DTYPES, Partition, Places, TableSpec
from multiverso.updaters import Updater

pytestmark = pytest.mark.usefixtures("fresh")
WORKERS = 3
INDEX = WorkerIndex(WORKERS)
one_stripe = Partition.of(TableSpec("array", 1, 10**6)).stripe_size
SIZES = (1, 2, 15, 1000, one_stripe - 1, one_stripe, one_stripe + 1, 3 * one_stripe + 7)
_segments: list[int] = []
_control = np.zeros(at.control_bytes(WORKERS) // 8, np.int64)
CONTROL = _control.ctypes.data
_calls: list[Call] = []


def compiled(module: str, dtype: str) -> Any:
    """The kernels of a module for a dtype."""
    return SimpleNamespace(**load_module(f"multiverso.kernels.{module}", dtype))


def new(done: int = 0) -> int:
    """Returns the address of a new call's record."""
    _calls.append(Call())
    _calls[-1].done.value = done
    return _calls[-1].address


@pytest.fixture
def fresh() -> Any:
    yield
    for descriptor in _segments:
        os.close(descriptor)
    _segments.clear()
    _calls.clear()


def table(spec: TableSpec, mode: str = "async") -> Shard:
    places = Places.of(spec, INDEX, mode == "sync")
    descriptor = heap.create("kernels", places.size)
    _segments.append(descriptor)
    memory = segment.Segment(descriptor)
    initialise(memory.address, spec, 1, INDEX, MODES[mode].code)
    return Shard(memory, spec, INDEX, MODES[mode].code)


def numbers(size: int, dtype: str, seed: int = 0) -> Any:
    random = np.random.default_rng(seed)
    if dtype.startswith("float"):
        return random.standard_normal(size).astype(dtype)
    return random.integers(-1000, 1000, size).astype(dtype)


@cache
def _leaky() -> Updater:
    def apply(values, delta, state, stride, hyper, count):  # type: ignore[no-untyped-def]
        for i in range(count):
            state[i] += delta[i] * delta[i]
            state[stride + i] += hyper[0]
            values[i] += delta[i] - hyper[1] * state[i]

    return Updater("leaky", apply, states=2, hyper=(2.0, 0.5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_whole_tables(dtype: str, size: int) -> None:
    shard = table(TableSpec("array", 1, size, dtype=dtype))
    dense = compiled("dense", dtype)
    model = numbers(size, dtype)
    assert dense.put(CONTROL, shard.base, 0, model.copy(), new()) == 0
    for me in range(WORKERS):
        delta = numbers(size, dtype, me)
        assert dense.add(CONTROL, shard.base, 0, me, delta, new()) == 0
        np.testing.assert_array_equal(delta, numbers(size, dtype, me))
        model += delta
    out = np.empty(size, dtype)
    assert dense.get(CONTROL, shard.base, 1, out, 0, new()) == 0
    np.testing.assert_array_equal(out, model)
    local, last = numbers(size, dtype, 7), numbers(size, dtype, 8)
    model = model + (local - last)
    assert dense.exchange(CONTROL, shard.base, 0, 2, local, last, 0, new()) == 0
    for array in (local, last, shard.values()):
        np.testing.assert_array_equal(array, model)
    assert dense_kernels.version.compiled()(shard.base) == WORKERS + 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (11, 10), (5000, 33), (3, 2 * one_stripe)])
def test_rows(dtype: str, rows: int, columns: int) -> None:
    shard = table(TableSpec("matrix", rows, columns, dtype=dtype))
    by_row = compiled("rows", dtype)
    model = np.zeros((rows, columns), dtype)
    random = np.random.default_rng(1)
    for me in range(WORKERS):
        ids = random.integers(0, rows, 7)
        delta = numbers(7 * columns, dtype, me)
        assert by_row.add_rows(CONTROL, shard.base, 0, me, ids, delta, new()) == 0
        for i, row in enumerate(ids):  # one after another: the order of floating-point sums counts
            model[row] += delta.reshape(7, columns)[i]
    ids = random.integers(0, rows, 20)
    out = np.empty(20 * columns, dtype)
    assert by_row.get_rows(CONTROL, shard.base, 0, ids, out, 0, new()) == 0
    np.testing.assert_array_equal(out.reshape(20, columns), model[ids])
    np.testing.assert_array_equal(shard.values().reshape(rows, columns), model)


@pytest.mark.parametrize("bad", [-1, 5, 2**62])
def test_a_bad_row_is_found_before_anything_changes(bad: int) -> None:
    shard = table(TableSpec("matrix", 5, 2))
    by_row = compiled("rows", "float32")
    ids = np.array([0, 4, bad])
    code = by_row.add_rows(CONTROL, shard.base, 0, 0, ids, np.ones(6, "f4"), new())
    assert code == (2 << 16) | kernels.BAD_ROW
    assert by_row.get_rows(CONTROL, shard.base, 0, ids, np.ones(6, "f4"), 0, new()) == code
    assert not shard.values().any()


@pytest.mark.parametrize("size", [3, 5000, one_stripe + 5000])
def test_an_updater_with_state_in_every_operation(size: int) -> None:
    updater = _leaky()
    shard = table(TableSpec("array", 1, size, updater="leaky", hyper=updater.hyper, states=2))
    update = compile_update(updater.apply, "float32")
    dense = compiled("dense", "float32")
    values, squares, steps = (np.zeros(size, "f4") for _ in range(3))
    local, last = numbers(size, "float32", 3), numbers(size, "float32", 4)
    for delta in (numbers(size, "float32", 1), local - last):
        squares += delta * delta
        steps += np.float32(2)
        values += delta - np.float32(0.5) * squares
    dense.add(CONTROL, shard.base, update, 0, numbers(size, "float32", 1), new())
    dense.exchange(CONTROL, shard.base, update, 1, local, last, 0, new())
    # the compiler may fuse a product and a sum into one rounding
    np.testing.assert_allclose(shard.values(), values, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(shard.states()[0], squares, rtol=1e-5)
    np.testing.assert_array_equal(shard.states()[1], steps)
    np.testing.assert_array_equal(local, shard.values())
    np.testing.assert_array_equal(last, shard.values())


def test_sgd_subtracts_rows_too() -> None:
    shard = table(TableSpec("matrix", 4, 3, updater="sgd"))
    update = compile_update(updaters.sgd().apply, "float32")
    compiled("rows", "float32").add_rows(CONTROL, shard.base, update, 0, np.array([3, 1, 3]), np.ones(9, "f4"), new())
    np.testing.assert_array_equal(shard.values().reshape(4, 3)[:, 0], [0, -1, 0, -2])


@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf, -0.0])
def test_special_values_are_kept(special: float) -> None:
    shard = table(TableSpec("array", 1, 5))
    dense = compiled("dense", "float32")
    dense.put(CONTROL, shard.base, 0, np.full(5, special, "f4"), new())
    out = np.empty(5, "f4")
    dense.get(CONTROL, shard.base, 0, out, 0, new())
    assert out.tobytes() == np.full(5, special, "f4").tobytes()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], max_examples=40)
@given(size=st.integers(1, 3 * one_stripe), start=st.integers(0, 3), me=st.integers(0, WORKERS - 1))
def test_an_add_that_was_stopped_goes_on_where_it_was(size: int, start: int, me: int) -> None:
    """Each stripe is taken once, whatever stripe the worker begins with."""
    shard = table(TableSpec("array", 1, size))
    stripes = Partition.of(shard.spec).stripe_count
    done = min(start, stripes)
    compiled("dense", "float32").add(CONTROL, shard.base, 0, me, np.ones(size, "f4"), new(done))
    touched = {int(i) // one_stripe for i in np.flatnonzero(shard.values())}
    assert len(touched) == stripes - done
    assert set(np.unique(shard.values())) <= {0.0, 1.0}
    first = me * stripes // WORKERS
    assert touched == {(first + i) % stripes for i in range(done, stripes)}


def live(worker: int, attachment: int = 1) -> None:
    """A life of a worker's number."""
    block = CONTROL + at.worker_block(worker)
    store64(block + at.ATTACHMENT, attachment)
    store32(block + at.LIVENESS, at.ALIVE)


@pytest.fixture
def alive() -> Iterator[None]:
    for worker in range(WORKERS):
        live(worker)
    yield
    _control[:] = 0


def take(shard: Shard, stripe: int, worker: int = 2) -> None:
    assert locking.hold_stripe.compiled()(CONTROL, shard.base, worker, stripe) == 0


def test_a_held_stripe_stops_a_kernel_after_a_slice_and_is_named(alive: None) -> None:
    shard = table(TableSpec("array", 1, 3 * one_stripe))
    dense = compiled("dense", "float32")
    take(shard, 2)
    call = new()
    code = dense.add(CONTROL, shard.base, 0, 0, np.ones(3 * one_stripe, "f4"), call)
    assert code == kernels.TIMED_OUT
    assert (_calls[-1].done.value, _calls[-1].complete.value) == (2, 0)
    block = CONTROL + at.worker_block(0)
    assert (load32(block + at.WAIT_KIND), load32(block + at.WAIT_STAGE)) == (at.FOR_WORD, 2)
    locking.free_stripe.compiled()(shard.base, 2, 2)
    assert dense.add(CONTROL, shard.base, 0, 0, np.ones(3 * one_stripe, "f4"), call) == 0
    assert (_calls[-1].done.value, _calls[-1].complete.value) == (0, 1)
    assert (shard.values() == 1).all()


def test_a_stripe_whose_owner_died_is_taken_over_and_counted(alive: None) -> None:
    shard = table(TableSpec("matrix", 10, 1))
    dense, ones, ids = compiled("dense", "float32"), np.ones(10, "f4"), np.arange(10)
    by_row = compiled("rows", "float32")
    one = np.zeros(1, np.int64)
    calls = (
        lambda: dense.add(CONTROL, shard.base, 0, 0, ones, new()),
        lambda: dense.get(CONTROL, shard.base, 0, ones.copy(), 0, new()),
        lambda: dense.exchange(CONTROL, shard.base, 0, 0, ones.copy(), ones.copy(), 0, new()),
        lambda: by_row.add_rows(CONTROL, shard.base, 0, 0, ids, ones, new()),
        lambda: by_row.get_rows(CONTROL, shard.base, 0, ids, ones.copy(), 0, new()),
        lambda: by_row.exchange_rows(CONTROL, shard.base, 0, 0, ids, ones.copy(), ones.copy(), 0, new()),
        lambda: by_row.get_stripes(CONTROL, shard.base, 0, one, one.copy(), ones.copy(), 0, new()),
        lambda: dense.put(CONTROL, shard.base, 0, ones, new()),
    )
    for number, call in enumerate(calls, 1):
        take(shard, 0)
        live(2, attachment=number + 1)  # it has died, and its number has come again
        assert call() == 0
        assert shard.statistics(0)["locks_recovered"] == number
        locking.enter.compiled()(CONTROL, shard.base, 2)
    assert shard.values()[0] == 1
    assert shard.statistics(2)["locks_recovered"] == 0


def test_a_new_attachment_releases_what_the_last_one_held(alive: None) -> None:
    shard = table(TableSpec("matrix", 10, 1))
    take(shard, 0)
    live(2, attachment=2)
    locking.enter.compiled()(CONTROL, shard.base, 2)
    assert shard.statistics(2)["locks_recovered"] == 1
    take(shard, 0)
    locking.enter.compiled()(CONTROL, shard.base, 2)  # not of this life
    assert shard.statistics(2)["locks_recovered"] == 1


def test_threads_of_a_worker_have_a_hand_each_and_wait_for_one(alive: None) -> None:
    shard = table(TableSpec("matrix", 3, 10_000))
    take(shard, 0)
    take(shard, 1)
    add = compiled("rows", "float32").add_rows
    arguments = (CONTROL, shard.base, 0, 2, np.array([2]), np.ones(10_000, "f4"))
    assert add(*arguments, new()) == kernels.TIMED_OUT
    assert not shard.values().any()
    locking.free_stripe.compiled()(shard.base, 2, 0)
    assert add(*arguments, new()) == 0
    assert (shard.values()[-10_000:] == 1).all()
