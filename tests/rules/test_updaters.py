"""Every updater agrees with its paper's formula in NumPy, on whole tables and on rows by key."""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

import multiverso as mv
from multiverso.errors import SnapshotError
from multiverso.runtime import Node, Session
from multiverso.spec.states import states_of
from multiverso.testing import updaters
from multiverso.updaters import State, Updater

Array = Any


def momentum(values: Array, g: Array, states: list[Array]) -> None:
    states[0][:] = 0.9 * states[0] + g
    values -= 0.1 * states[0]


def nesterov(values: Array, g: Array, states: list[Array]) -> None:
    states[0][:] = 0.9 * states[0] + g
    values += 0.1 * (g + 0.9 * states[0])


def adagrad(values: Array, g: Array, states: list[Array]) -> None:
    states[0] += g**2
    values -= 0.1 * g / (np.sqrt(states[0]) + 1e-10)


def rmsprop(values: Array, g: Array, states: list[Array]) -> None:
    states[0][:] = 0.9 * states[0] + 0.1 * g**2
    values -= 0.1 * g / (np.sqrt(states[0]) + 1e-8)


def adam(values: Array, g: Array, states: list[Array]) -> None:
    mu, nu, power_1, power_2 = states
    mu[:] = 0.9 * mu + 0.1 * g
    nu[:] = 0.99 * nu + 0.01 * g**2
    power_1 *= 0.9
    power_2 *= 0.99
    values -= 0.1 * (mu / (1 - power_1)) / (np.sqrt(nu / (1 - power_2)) + 1e-8)


def adamw(values: Array, g: Array, states: list[Array]) -> None:
    values *= 1 - 0.1 * 0.05
    adam(values, g, states)


def counted_adam(values: Array, g: Array, states: list[Array]) -> None:
    mu, nu, count = states
    mu[:] = 0.9 * mu + 0.1 * g
    nu[:] = 0.99 * nu + 0.01 * g**2
    count += 1
    t = int(count[0])
    values -= 0.1 * (mu / (1 - 0.9**t)) / (np.sqrt(nu / (1 - 0.99**t)) + 1e-8)


def ftrl(values: Array, g: Array, states: list[Array]) -> None:
    n, z = states
    sigma = (np.sqrt(n + g**2) - np.sqrt(n)) / 0.1
    z += g - sigma * values
    n += g**2
    values[:] = np.where(abs(z) <= 0.2, 0, (np.sign(z) * 0.2 - z) / ((1 + np.sqrt(n)) / 0.1 + 0.3))


def delayed_nesterov(values: Array, g: Array, states: list[Array]) -> None:
    velocity, total, pushes = states
    total += g
    pushes += 1
    last = pushes == 3
    velocity[last] = 0.9 * velocity[last] + total[last] / 3
    part = np.where(last, 1 - 0.2 * 3 + 0.2, 0.2)
    values += 0.1 * (part * 0.9 * velocity + g / 3)
    total[last] = 0
    pushes[last] = 0


def clipped_and_decayed(values: Array, g: Array, states: list[Array]) -> None:
    g = np.clip(g, -1.5, 1.5)
    g = g * (2 / max(2, np.sqrt((g.astype("f8") ** 2).sum())))
    values -= 0.1 * 0.05 * values
    adagrad(values, g, states)


def decayed_sum(values: Array, g: Array, states: list[Array]) -> None:
    values *= 1 - 0.05
    values += g


def chained() -> Updater:
    return mv.updaters.chain(
        mv.updaters.clip(1.5, norm=2), mv.updaters.weight_decay(0.05), mv.updaters.adagrad(0.1, initial=0.5)
    )


ALL: dict[str, tuple[Updater, updaters.Reference]] = {
    "momentum": (mv.updaters.momentum(0.1, 0.9), momentum),
    "adagrad": (mv.updaters.adagrad(0.1, initial=0.5), adagrad),
    "rmsprop": (mv.updaters.rmsprop(0.1, 0.9), rmsprop),
    "adam": (mv.updaters.adam(0.1, 0.9, 0.99), adam),
    "adamw": (mv.updaters.adamw(0.1, 0.9, 0.99, weight_decay=0.05), adamw),
    "nesterov": (mv.updaters.nesterov(0.1, 0.9), nesterov),
    "ftrl": (mv.updaters.ftrl(0.1, 1.0, 0.2, 0.3), ftrl),
    "delayed_nesterov": (mv.updaters.delayed_nesterov(3, 0.1, 0.9, 0.2), delayed_nesterov),
    "chain": (chained(), clipped_and_decayed),
    "decayed sum": (mv.updaters.chain(mv.updaters.weight_decay(0.05), mv.updaters.add()), decayed_sum),
}
COUNTED = mv.updaters.adam(0.1, 0.9, 0.99, count_per="table")
TestMomentum = updaters.suite(*ALL["momentum"])
TestAdagrad = updaters.suite(*ALL["adagrad"])
TestRmsprop = updaters.suite(*ALL["rmsprop"])
TestAdam = updaters.suite(*ALL["adam"])
TestAdamw = updaters.suite(*ALL["adamw"])
TestAdamWithOneCount = updaters.suite(COUNTED, counted_adam)
TestFtrl = updaters.suite(*ALL["ftrl"])
TestDelayedNesterov = updaters.suite(*ALL["delayed_nesterov"])
TestChain = updaters.suite(*ALL["chain"])


@pytest.mark.parametrize("name", ALL)
def test_rows_by_key_step_when_they_are_named_and_then_once(name: str) -> None:
    """Rows have steps of their own; keys that a call names twice are one step with the sum."""
    updater, reference = ALL[name]
    random = np.random.default_rng(5)
    expected = np.zeros((6, 3))
    states = [np.full((6, 3), state.initial) for state in states_of(updater.states)]
    with Node(1) as node, Session(node.address) as session:
        table = mv.KeyedTable(3, dtype="float64", updater=updater, session=session)
        for _ in range(12):
            keys = random.integers(0, 6, 5)
            delta = random.normal(size=(5, 3))
            table.add(delta, keys)
            for key in np.unique(keys):
                row = [state[key] for state in states]
                reference(expected[key], delta[keys == key].sum(axis=0), row)
        np.testing.assert_allclose(table.get(np.arange(6)), expected, rtol=1e-12)


def test_rowwise_adagrad_keeps_one_number_a_row() -> None:
    random = np.random.default_rng(6)
    expected, sums = np.zeros((6, 5)), np.full(6, 0.25)
    with Node(1) as node, Session(node.address) as session:
        updater = mv.updaters.rowwise_adagrad(0.1, initial=0.25)
        table = mv.KeyedTable(5, dtype="float64", updater=updater, session=session)
        assert table.spec.row_bytes == 64  # five numbers and one
        for _ in range(12):
            keys = random.integers(0, 6, 4)
            delta = random.normal(size=(4, 5))
            table.add(delta, keys)
            for key in np.unique(keys):
                gradient = delta[keys == key].sum(axis=0)
                sums[key] += (gradient**2).mean()
                expected[key] -= 0.1 * gradient / (np.sqrt(sums[key]) + 1e-10)
        np.testing.assert_allclose(table.get(np.arange(6)), expected, rtol=1e-12)
        with pytest.raises(ValueError, match="KeyedTable"):
            mv.MatrixTableHandler(4, 2, updater="rowwise_adagrad", session=session)


def test_as_many_delayed_pushes_as_workers_are_one_step_of_nesterov() -> None:
    once, delayed = mv.updaters.nesterov(0.1, 0.9), mv.updaters.delayed_nesterov(4, 0.1, 0.9, 0.1)
    g = np.random.default_rng(7).normal(size=5)
    with Node(1) as node, Session(node.address) as session:
        one = mv.ArrayTableHandler(5, dtype="float64", updater=once, session=session)
        four = mv.ArrayTableHandler(5, dtype="float64", updater=delayed, session=session)
        for _ in range(3):
            one.add(g)
            for _ in range(4):
                four.add(g)
        assert not np.allclose(four.get(), 3 * 0.1 * g)
        # the velocity of the pushes before the last one is the previous round's
        v, expected = np.zeros(5), np.zeros(5)
        for _ in range(3):
            before, v = v, 0.9 * v + g
            expected += 0.1 * (3 * 0.1 * 0.9 * before + (1 - 4 * 0.1 + 0.1) * 0.9 * v + g)
        np.testing.assert_allclose(four.get(), expected, rtol=1e-12)
    with Node(1) as node, Session(node.address) as session:  # without activation: to rounding
        one = mv.ArrayTableHandler(5, dtype="float64", updater=once, session=session)
        delayed = mv.updaters.delayed_nesterov(4, 0.1, 0.9)
        four = mv.ArrayTableHandler(5, dtype="float64", updater=delayed, session=session)
        for _ in range(3):
            one.add(g)
            for _ in range(4):
                four.add(g)
            np.testing.assert_allclose(four.get(), one.get(), rtol=1e-12)


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_the_smallest_integer_is_clipped_and_the_rest_stays_exact(dtype: str) -> None:
    """It is its own absolute; and a bound that is a float made floats of all."""
    least = np.iinfo(dtype).min
    assert mv.updaters.clip(5.5)(np.array([least, 3], dtype)).tolist() == [-5, 3]
    assert mv.updaters.clip(1e30)(np.array([least, 3], dtype)).tolist() == [least, 3]
    exact = np.array([2**53 + 1, 2**62, -(2**63)])
    assert mv.updaters.clip(2.0**60)(exact).tolist() == [2**53 + 1, 2**60, -(2**60)]


def test_adam_keeps_no_subnormal_powers(tmp_path: Path) -> None:
    """They stayed at the smallest numbers for ever, and a step took nearly twice as long; the values are the same."""
    with Node(1) as node, Session(node.address) as session:
        table = mv.ArrayTableHandler(3, updater=mv.updaters.adam(0.1, 0.5, 0.6), session=session)
        values, states = np.zeros(3, np.float32), [np.zeros(3, np.float32) for _ in range(2)]
        for step in range(1, 401):
            gradient = np.array([0.0, 1.0, step % 7 - 3], np.float32)
            table.add(gradient)
            states[0] = np.float32(0.5) * states[0] + np.float32(0.5) * gradient
            states[1] = np.float32(0.6) * states[1] + np.float32(0.4) * gradient**2
            first, second = states[0] / (1 - 0.5**step), states[1] / (1 - 0.6**step)
            values -= (0.1 * first / (np.sqrt(second) + 1e-8)).astype(np.float32)
        np.testing.assert_allclose(table.get(), values, rtol=1e-3)
        table.save(tmp_path / "adam")
    kept = np.concatenate([array for name, array in load_file(tmp_path / "adam").items() if "power" in name])
    assert kept.size == 6
    assert not kept.any()


def test_a_nan_keeps_nothing_else_from_being_clipped() -> None:
    delta = np.array([[np.nan, 5], [3, 4]], np.float32)
    by_value = mv.updaters.clip(2.0)(delta.reshape(-1), 2)
    assert np.array_equal(by_value, [np.nan, 2, 2, 2], equal_nan=True)
    by_norm = mv.updaters.clip(norm=1)(delta.reshape(-1), 2)
    assert np.isnan(by_norm[0])
    assert np.allclose(by_norm[2:], [0.6, 0.8])


@pytest.mark.parametrize("size", [1e-310, 1e-200, 1e-160, 1.0, 1e154, 1e200, 1e300])
def test_a_norm_whose_square_is_no_number_is_bounded_all_the_same(size: float) -> None:
    delta = np.array([[3.0, 4.0], [0.0, 0.0], [0.3, 0.4]]) * [[size], [1.0], [1.0]]
    clipped = mv.updaters.clip(norm=size)(delta.reshape(-1), 3).reshape(3, 2)
    expected = np.array([0.6, 0.8]) * size
    np.testing.assert_allclose(clipped[0], expected, rtol=1e-12 if size > 1e-300 else 1e-3)
    np.testing.assert_array_equal(clipped[1], 0)
    np.testing.assert_allclose(clipped[2], np.array([0.3, 0.4]) * min(1, size / 0.5), rtol=1e-3)


def test_a_norm_beyond_its_dtype_is_bounded_for_the_whole_delta_too() -> None:
    delta = np.full(10_000, 1e307)
    np.testing.assert_allclose(np.linalg.norm(mv.updaters.clip(norm=2.0)(delta)), 2.0)
    with np.errstate(invalid="ignore"):
        spoilt = mv.updaters.clip(norm=2.0)(np.array([np.inf, 1.0, 3.0, 4.0]), 2)
    np.testing.assert_allclose(spoilt[2:], [1.2, 1.6])


def test_rows_are_clipped_each_by_its_own_norm_and_before_that_summed() -> None:
    g = np.array([[3.0, 4.0], [0.3, 0.4], [3.0, 4.0]])
    with Node(1) as node, Session(node.address) as session:
        updater = mv.updaters.chain(mv.updaters.clip(norm=1), mv.updaters.add())
        matrix = mv.MatrixTableHandler(4, 2, dtype="float64", updater=updater, session=session)
        matrix.add(g, [0, 1, 0])
        np.testing.assert_allclose(matrix.get([0, 1]), [[1.2, 1.6], [0.3, 0.4]])
        matrix.add_async(g, [2, 3, 2]).wait()
        np.testing.assert_allclose(matrix.get([2, 3]), [[1.2, 1.6], [0.3, 0.4]])
        keyed = mv.KeyedTable(2, dtype="float64", updater=updater, session=session)
        keyed.add(g, [0, 1, 0])  # one step of each key
        np.testing.assert_allclose(keyed.get([0, 1]), [[0.6, 0.8], [0.3, 0.4]])
        with pytest.raises(mv.errors.MultiversoError, match="clips"):
            matrix.exchange(np.zeros((4, 2)), np.zeros((4, 2)))
        whole = mv.updaters.chain(mv.updaters.clip(2.5), mv.updaters.add())
        counts = mv.KeyedTable(2, dtype="int32", updater=whole, session=session)
        counts.add([[7, -7], [1, -2]], [0, 1])
        assert counts.get([0, 1]).tolist() == [[2, -2], [1, -2]]
        with pytest.raises(mv.errors.MultiversoError, match="clips"):
            rule = mv.rules.Rule("mine", mv.rules.asgd().push, updater=updater, per_worker=("centre",))
            mv.rules.share(np.zeros(4), rule, session=session)


def test_a_schedule_sets_the_learning_rate_by_the_number_of_adds() -> None:
    fall = mv.updaters.schedule(lambda step: 1 / (step + 1))
    updater = mv.updaters.chain(fall, mv.updaters.momentum(5.0, 0.0))
    with Node(1) as node, Session(node.address) as session:
        dense = mv.ArrayTableHandler(3, dtype="float64", updater=updater, session=session)
        keyed = mv.KeyedTable(3, dtype="float64", updater=updater, session=session)
        assert dense.learning_rate == keyed.learning_rate == 1
        for step in range(4):
            dense.add(np.ones(3))
            keyed.add(np.ones((1, 3)), [8])
            assert dense.learning_rate == keyed.learning_rate == pytest.approx(1 / (step + 1))
        expected = -np.full(3, 1 + 1 / 2 + 1 / 3 + 1 / 4)
        np.testing.assert_allclose(dense.get(), expected)
        np.testing.assert_allclose(keyed.get([8])[0], expected)
        keyed.learning_rate = 0.25
        assert keyed.learning_rate == 0.25
        with pytest.raises(ValueError, match="learning rate"):
            keyed.learning_rate = 0
        with pytest.raises(mv.errors.MultiversoError, match="no learning rate"):
            mv.KeyedTable(3, session=session).learning_rate = 1


def test_the_lowest_worker_that_is_left_follows_a_schedule() -> None:
    """Once worker 0 had left, the learning rate stayed where it was."""
    fall = mv.updaters.schedule(lambda step: 1 / (step + 1))
    updater = mv.updaters.chain(fall, mv.updaters.momentum(5.0, 0.0))
    one = np.ones((1, 3))
    with Node() as node:
        first, second, third = (Session(node.address) for _ in range(3))
        tables = [mv.ArrayTableHandler(3, name="t", updater=updater, session=s) for s in (first, second, third)]
        keyed = [mv.KeyedTable(3, name="k", updater=updater, session=s) for s in (first, second, third)]

        def rates_after(worker: int) -> list[float]:
            tables[worker].add(one)
            keyed[worker].add(one, [8])
            return [tables[2].learning_rate, keyed[2].learning_rate]

        assert rates_after(0) == [1, 1]
        assert rates_after(1) == rates_after(2) == [1, 1]  # it is worker 0's to set
        assert rates_after(0) == pytest.approx([1 / 4] * 2)
        first.shutdown()
        assert rates_after(2) == pytest.approx([1 / 4] * 2)
        assert rates_after(1) == pytest.approx([1 / 6] * 2)
        second.shutdown()
        assert rates_after(2) == pytest.approx([1 / 7] * 2)
        third.shutdown()


def test_a_schedule_sets_the_learning_rate_of_exchanges_and_rules_too() -> None:
    fall = mv.updaters.schedule(lambda step: 1 / (step + 1))
    updater = mv.updaters.chain(fall, mv.updaters.momentum(5.0, 0.0))
    with Node(1) as node, Session(node.address) as session:
        matrix = mv.MatrixTableHandler(2, 3, dtype="float64", updater=updater, session=session)
        local, last = np.zeros((2, 3)), np.zeros((2, 3))
        rows, before = np.zeros((1, 3)), np.zeros((1, 3))
        local += 1
        matrix.exchange(local, last)
        np.testing.assert_allclose(local, -1)
        rows += 1
        matrix.exchange(rows, before, row_ids=[1])
        np.testing.assert_allclose(rows, [[-1.5] * 3])
        local += 1
        matrix.exchange_async(local, last).wait()
        np.testing.assert_allclose(local, [[-1 - 1 / 3] * 3, [-1.5 - 1 / 3] * 3])
        matrix.exchange_async(rows + 1, rows, row_ids=[1]).wait()
        assert matrix.learning_rate == pytest.approx(1 / 4)
        rule = mv.rules.Rule("mine", mv.rules.asgd().push, updater=updater, per_worker=("centre",))
        shared = mv.rules.share(np.zeros(4), rule, session=session)
        for step in range(3):
            shared.exchange(np.zeros(4))
            assert shared.table.learning_rate == pytest.approx(1 / (step + 1))


def test_all_that_have_a_learning_rate_can_be_told_another_one() -> None:
    """adamw once had none: neither a schedule nor ``learning_rate`` could change it."""
    wanted = mv.updaters.chain(mv.updaters.schedule(lambda step: 0.5 / (step + 1)), mv.updaters.adamw())
    with Node(1) as node, Session(node.address) as session:
        table = mv.ArrayTableHandler(3, dtype="float64", updater=wanted, session=session)
        keyed = mv.KeyedTable(3, dtype="float64", updater=wanted, session=session)
        for step in range(3):
            table.add(np.ones(3))
            keyed.add(np.ones((1, 3)), [8])
            assert table.learning_rate == keyed.learning_rate == pytest.approx(0.5 / (step + 1))
        np.testing.assert_allclose(table.get(), -0.5 - 0.25 - 0.5 / 3, rtol=0.02)
        with pytest.raises(mv.errors.MultiversoError, match=r"has no learning rate.*adam, adamw"):
            mv.ArrayTableHandler(3, session=session).learning_rate = 1


def test_schedules_rise_and_fall() -> None:
    cosine = mv.updaters.cosine(2.0, 30, warmup=10, least=0.1)
    assert [cosine(step) for step in (0, 9, 10, 20, 30, 99)] == pytest.approx([0.2, 2, 2, 1.1, 0.2, 0.2])
    root = mv.updaters.inverse_square_root(2.0, 4)
    assert [root(step) for step in (0, 3, 15)] == pytest.approx([0.5, 2, 1])


@pytest.mark.parametrize(
    "make",
    [
        lambda u: u.chain(),
        lambda u: u.chain(u.clip(1.0)),
        lambda u: u.chain("clip", u.add()),
        lambda u: u.chain(u.clip(1.0), u.clip(norm=1), u.add()),
        lambda u: u.chain(u.clip(1.0), u.chain(u.clip(1.0), u.add())),
        lambda u: u.chain(u.schedule(lambda step: 0.1), u.add()),
        lambda u: u.chain(u.schedule(lambda step: 0.0), u.adagrad()),
        lambda u: u.chain(u.weight_decay(0.1), u.adamw()),
        lambda u: u.chain(u.weight_decay(0.1), u.chain(u.weight_decay(0.1), u.sgd())),
        lambda u: u.chain(u.weight_decay(0.1), u.adam(count_per="table")),
        lambda u: u.schedule(0.1),
        lambda u: u.clip(),
        lambda u: u.clip(-1.0),
        lambda u: u.weight_decay(0),
        lambda u: u.delayed_nesterov(0),
        lambda u: u.delayed_nesterov(4, activation=0.3),
        lambda u: u.cosine(0.1, 5, warmup=5),
        lambda u: u.inverse_square_root(0.1, 0),
    ],
)
def test_transformations_that_make_no_sense_are_refused(make: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        make(mv.updaters)


@pytest.mark.parametrize("mode", [{}, {"sync": True}, {"staleness": 2}])
def test_a_count_of_the_tables_steps_is_saved_under_its_name(mode: dict[str, Any], tmp_path: Path) -> None:
    """All workers' adds count, in rounds each round; a table that loads it goes on from there."""

    def step(table: mv.MatrixTableHandler) -> None:
        table.add(np.ones((3, 2)))
        table.get()  # in synchronous mode the end of a round

    with Node(1) as node, Session(node.address, **mode) as session:
        table = mv.MatrixTableHandler(3, 2, dtype="float64", updater=COUNTED, session=session)
        for _ in range(3):
            step(table)
        table.save(tmp_path / "table")
        for _ in range(2):
            step(table)
        after = table.snapshot()
        with safe_open(tmp_path / "table", "numpy") as file:
            assert file.get_tensor("state.count").tolist() == [3]
            assert {*file.keys()} == {"values", "state.mu", "state.nu", "state.count"}
        other = mv.MatrixTableHandler(3, 2, dtype="float64", updater=COUNTED, session=session)
        step(other)
        other.load(tmp_path / "table")
        assert [*session.tables().values()][-1].steps == 3
        for _ in range(2):
            step(other)
        assert np.array_equal(other.snapshot(), after)
        lazy = mv.MatrixTableHandler(3, 2, dtype="float64", updater=mv.updaters.adam(0.1, 0.9, 0.99), session=session)
        with pytest.raises(SnapshotError, match="nothing was changed"):
            lazy.load(tmp_path / "table")


def test_a_row_add_is_a_step_of_the_table_and_adds_of_all_workers_count() -> None:
    def work(session: Session) -> tuple[int, Array]:
        table = mv.MatrixTableHandler(4, 2, updater=COUNTED, session=session)
        session.barrier()
        table.add(np.ones((1, 2)), row_ids=[session.worker_id])
        session.barrier()
        count = next(iter(session.tables().values())).steps
        session.barrier()
        if session.worker_id == 0:
            table.add(np.ones((4, 2)))
        session.barrier()
        return count, table.snapshot()

    with Node(2) as node:
        results = in_sessions(node, work)
    assert [count for count, _ in results] == [2, 2]
    # the first step of a number whose moments are empty, as the third of the table
    t = 3
    expected = -0.1 * (0.1 / (1 - 0.9**t)) / (np.sqrt(0.01 / (1 - 0.99**t)) + 1e-8)
    np.testing.assert_allclose(results[0][1][2:], expected, rtol=1e-5)


@pytest.mark.parametrize(("updater", "name"), [(mv.updaters.mean(), "add"), (mv.updaters.add(), "mean")])
def test_a_mean_is_not_taken_for_a_sum_by_its_name(updater: Updater, name: str) -> None:
    with pytest.raises(ValueError, match=f"'{name}' is that of"):
        mv.updaters.resolve(replace(updater, name=name))


def test_an_updater_of_ones_own_is_not_taken_for_one_of_ours_by_its_name() -> None:
    def halves(values: Any, delta: Any, state: Any, stride: Any, hyper: Any, count: Any) -> None:
        for i in range(count):
            values[i] += delta[i] / 2

    with Node(1) as node, Session(node.address) as session:
        for make in (partial(mv.ArrayTableHandler, 4), partial(mv.MatrixTableHandler, 2, 2), partial(mv.KeyedTable, 2)):
            with pytest.raises(ValueError, match=r"'add' is that of multiverso\.updaters\.add"):
                make(updater=Updater("add", halves), session=session)
        with pytest.raises(ValueError, match=r"'add' is that"):
            mv.ArrayTableHandler(4, updater=replace(mv.updaters.sgd(), name="add"), session=session)
        table = mv.ArrayTableHandler(4, updater=replace(mv.updaters.add(), mean=False), session=session)
        table.add(np.ones(4))
        assert table.get().tolist() == [1, 1, 1, 1]


def test_loops_that_decay_are_found_by_their_names_so_that_they_are_compiled_once_on_a_machine() -> None:
    for make in mv.updaters.BY_NAME.values():
        if not make().decays:
            loop = mv.updaters.chain(mv.updaters.weight_decay(0.1), make()).apply
            assert getattr(sys.modules[loop.__module__], loop.__name__, None) is loop


def test_where_a_count_of_steps_has_no_place() -> None:
    count = State("count", per="table")
    for states in ((count, State("mu")), (count, State("steps", per="table")), (State("mu", per="worker"),)):
        with pytest.raises(ValueError, match="per"):
            Updater("own", lambda *_: None, states=states)
    with pytest.raises(ValueError, match="whole number"):
        Updater("own", lambda *_: None, states=(State("count", 0.5, per="table"),))
    with pytest.raises(ValueError, match="count_per"):
        mv.updaters.adam(count_per="row")  # type: ignore[arg-type]
    with Node(1) as node, Session(node.address) as session, pytest.raises(ValueError, match="rows by key"):
        mv.KeyedTable(3, updater=COUNTED, session=session)


def in_sessions(node: Node, work: Callable[[Session], Any]) -> list[Any]:
    """What each of two workers, a thread each, returns."""

    def run(worker: int) -> Any:
        with Session(node.address, worker, start_timeout_seconds=60, timeout_seconds=60) as session:
            return work(session)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, range(2)))


@pytest.mark.parametrize(
    "make",
    [
        lambda: mv.updaters.adagrad(0),
        lambda: mv.updaters.adagrad(initial=-1),
        lambda: mv.updaters.adam(beta_1=1),
        lambda: mv.updaters.adam(beta_2=1 - 1e-12),  # which is 1 in float32: 0 by 0
        lambda: mv.updaters.rmsprop(decay=-0.1),
        lambda: mv.updaters.momentum(momentum=1.5),
        lambda: mv.updaters.ftrl(l1=-1),
        lambda: mv.updaters.adamw(weight_decay=-1),
        lambda: mv.updaters.rowwise_adagrad(initial=-1),
        lambda: mv.updaters.adam(float("nan")),
        lambda: mv.updaters.adam(float("inf")),
    ],
)
def test_hyperparameters_that_make_no_sense_are_refused(make: Any) -> None:
    with pytest.raises(ValueError, match="got"):
        make()


# -- the numbers of the original's own formulas, as docs/coming-from-multiverso.md has them ----------------------------


def _momentum_of_the_original(w: Array, deltas: list[Array], m: float) -> Array:
    smooth = np.zeros_like(w)
    for d in deltas:
        smooth = m * smooth + (1 - m) * d
        w = w - smooth
    return w


def _adagrad_of_the_original(w: Array, deltas: list[Array], rho: float, lr: float) -> Array:
    """As it is meant: the code subtracts the square, and from a copy."""
    historic = np.zeros_like(w)
    for d in deltas:
        historic = historic + d * d / lr / lr
        w = w - rho / np.sqrt(historic + 1e-6) * d / lr
    return w


@pytest.mark.parametrize("dtype, tolerance", [("float64", 1e-12), ("float32", 1e-4)])
def test_the_originals_formulas(dtype: str, tolerance: float) -> None:
    chance = np.random.default_rng(5)
    start, deltas = chance.normal(size=20), [chance.normal(size=20) for _ in range(30)]
    deltas[0][:10] *= 1e-5  # so small that the number under the root counts
    cases = [
        (mv.updaters.momentum(1 - 0.8, 0.8), 1.0, _momentum_of_the_original(start, deltas, 0.8)),
        (
            mv.updaters.adagrad(0.1, initial=1e-6, epsilon=1e-30),
            0.05,
            _adagrad_of_the_original(start, deltas, 0.1, 0.05),
        ),
        ("sgd", 1.0, start - np.sum(deltas, axis=0)),
    ]
    with Node(1) as node, Session(node.address) as session:
        for updater, lr, expected in cases:
            table = mv.ArrayTableHandler(20, start, dtype=dtype, updater=updater, session=session)
            for d in deltas:
                table.add(d / lr)
            np.testing.assert_allclose(table.get(), expected, rtol=tolerance, atol=tolerance)
