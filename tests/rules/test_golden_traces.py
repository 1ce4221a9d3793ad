"""Every updater and rule does to the last bit what it did when its golden trace was stored."""

from __future__ import annotations

import pytest

from .golden_traces import cases, read

pytestmark = pytest.mark.timeout(300)  # the first use of a dtype compiles its kernels
AGAIN = "if that is meant: make golden, and look at its difference"


@pytest.mark.parametrize("name", cases())
def test_a_trace_is_as_it_was_stored(name: str) -> None:
    stored = read()
    assert name in stored, f"{name} has no golden trace; make golden stores one"
    assert cases()[name]() == stored[name], f"{name} gives other numbers than it did; {AGAIN}"


def test_no_trace_is_left_over() -> None:
    assert set(read()) == set(cases()), f"golden_traces.json is not of today's updaters and rules; {AGAIN}"
