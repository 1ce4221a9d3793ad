"""What every updater has to do: agree with its formula, wherever the stripes are cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from multiverso.layout import words as at
from multiverso.runtime import Node, Session
from multiverso.spec.states import states_of
from multiverso.tables import ArrayTableHandler
from multiverso.updaters import Updater

Array = NDArray[Any]
Reference = Callable[[Array, Array, list[Array]], None]
"""The formula in NumPy: ``reference(values, delta, states)`` changes values and states in place."""

_ADDS = 6


def check(updater: Updater, reference: Reference, *, dtype: str, size: int, sync: bool) -> None:
    """Raises AssertionError unless a table with this updater does what the formula says.

    Args:
        updater: the updater.
        reference: its formula.
        dtype: ``"float32"`` or ``"float64"``.
        size: numbers in the table.
        sync: in a synchronous job, where a round's adds are summed and reach the updater as one.
    """
    random = np.random.default_rng(size)
    expected = random.normal(size=size).astype(dtype)
    states = [
        np.full(size, state.initial, dtype) if state.per == "element" else np.array([state.initial])
        for state in states_of(updater.states)
    ]
    node = Node(workers=1)
    try:
        with Session(node.address, sync=sync) as session:
            table = ArrayTableHandler(size, expected, dtype=dtype, updater=updater, session=session)
            for number in range(_ADDS):
                delta = random.normal(size=size).astype(dtype)
                delta[number % size] = 0
                kept = delta.copy()
                table.add(delta)
                value = table.get()
                assert np.array_equal(delta, kept), "the delta that was handed in was changed"
                reference(expected, delta, states)
                tolerance = 2e-5 if dtype == "float32" else 1e-12
                worst = np.abs(value - expected).max()
                assert np.allclose(value, expected, rtol=tolerance, atol=tolerance), (
                    f"after add {number + 1} of {size} {dtype}: off by {worst}"
                )
            assert np.isfinite(value).all(), f"became {value}"
    finally:
        node.close()


def suite(updater: Updater, reference: Reference) -> type:
    """Returns a class of pytest tests of an updater; give it a name that begins with ``Test``.

    Sizes around the stripes' ends, both floating dtypes, asynchronous and synchronous.
    """
    import pytest

    stripe = at.STRIPE_BYTES // 4

    class Conformance:
        """An updater agrees with its formula."""

        @pytest.mark.parametrize("sync", [False, True])
        @pytest.mark.parametrize("dtype", ["float32", "float64"])
        @pytest.mark.parametrize("size", [1, stripe, 2 * stripe + 3])
        def test_agrees_with_the_formula(self, size: int, dtype: str, sync: bool) -> None:
            """The table holds what the formula says after each add."""
            check(updater, reference, dtype=dtype, size=size, sync=sync)

    return Conformance
