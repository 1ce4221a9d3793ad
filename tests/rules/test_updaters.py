"""Every updater agrees with its paper's formula in NumPy, on whole tables and on rows by key."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import multiverso as mv
from multiverso.runtime import Node, Session
from multiverso.states import states_of
from multiverso.testing import updaters
from multiverso.updaters import Updater

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


def ftrl(values: Array, g: Array, states: list[Array]) -> None:
    n, z = states
    sigma = (np.sqrt(n + g**2) - np.sqrt(n)) / 0.1
    z += g - sigma * values
    n += g**2
    values[:] = np.where(abs(z) <= 0.2, 0, (np.sign(z) * 0.2 - z) / ((1 + np.sqrt(n)) / 0.1 + 0.3))


ALL: dict[str, tuple[Updater, updaters.Reference]] = {
    "momentum": (mv.updaters.momentum(0.1, 0.9), momentum),
    "adagrad": (mv.updaters.adagrad(0.1, initial=0.5), adagrad),
    "rmsprop": (mv.updaters.rmsprop(0.1, 0.9), rmsprop),
    "adam": (mv.updaters.adam(0.1, 0.9, 0.99), adam),
    "adamw": (mv.updaters.adamw(0.1, 0.9, 0.99, weight_decay=0.05), adamw),
    "nesterov": (mv.updaters.nesterov(0.1, 0.9), nesterov),
    "ftrl": (mv.updaters.ftrl(0.1, 1.0, 0.2, 0.3), ftrl),
}
TestMomentum = updaters.suite(*ALL["momentum"])
TestAdagrad = updaters.suite(*ALL["adagrad"])
TestRmsprop = updaters.suite(*ALL["rmsprop"])
TestAdam = updaters.suite(*ALL["adam"])
TestAdamw = updaters.suite(*ALL["adamw"])
TestFtrl = updaters.suite(*ALL["ftrl"])


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


@pytest.mark.parametrize(
    "make",
    [
        lambda: mv.updaters.adagrad(0),
        lambda: mv.updaters.adagrad(initial=-1),
        lambda: mv.updaters.adam(beta_1=1),
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
