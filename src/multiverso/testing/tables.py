"""What every table has to do, whatever holds its values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

import multiverso as mv
from multiverso.testing.laws import Law, suite_of
from multiverso.testing.nursery import Preload

Factory = Callable[[int, Any, str], Any]
"""Makes a table of (size, initial value, dtype name) with ``get()``, ``add(data)`` and ``size``; collective."""

_ROUNDS = 10
_SIZES = (1, 7, 1000, 100_003)
_DTYPES = ("float32", "float64", "int32", "int64")


def _begin(factory: Factory, me: int) -> Any:
    tables = [factory(5, np.arange(5) + me, dtype) for dtype in _DTYPES]
    mv.barrier()
    return [np.asarray(table.get()) for table in tables]


def _check_begin(records: list[Any]) -> None:
    for values in records:
        for value, dtype in zip(values, _DTYPES, strict=True):
            assert value.dtype.name == dtype, f"a table of {dtype} gave {value.dtype}"
            assert np.array_equal(value, np.arange(5)), f"began with {value}; the master's value is 0 1 2 3 4"


def _add_up(factory: Factory, me: int) -> Any:
    tables = [factory(size, None, "float32") for size in _SIZES]
    for _ in range(_ROUNDS):
        for table in tables:
            table.add(np.full(table.size, me + 1, "float32"))
    mv.barrier()
    return [np.asarray(table.get()) for table in tables]


def _check_add_up(records: list[Any]) -> None:
    expected = _ROUNDS * sum(range(1, len(records) + 1))
    for values in records:
        for value, size in zip(values, _SIZES, strict=True):
            assert value.shape == (size,), f"expected shape ({size},), got {value.shape}"
            assert (value == expected).all(), f"adds of size {size} made {value}; expected {expected}"


def _own_adds(factory: Factory, me: int) -> Any:
    table = factory(3, None, "float32")
    seen = []
    for _ in range(_ROUNDS):
        table.add(np.ones(3, "float32"))
        seen.append(np.asarray(table.get()))
    mv.barrier()
    return seen


def _check_own_adds(records: list[Any]) -> None:
    for seen in records:
        for number, value in enumerate(seen, 1):
            assert (value >= number).all(), f"after {number} own adds a worker read {value}"


def _refuse(factory: Factory, me: int) -> Any:
    table = factory(4, np.arange(4), "int64")
    mv.barrier()
    refused = []
    for wrong in (np.ones(3), np.ones(5, "int64"), np.ones(4), np.array(["a"] * 4), np.ones(4, complex)):
        try:
            table.add(wrong)
        except (ValueError, TypeError) as error:
            refused.append(str(error))
    mv.barrier()
    return refused, np.asarray(table.get())


def _check_refuse(records: list[Any]) -> None:
    for refused, value in records:
        assert len(refused) == 5, f"of five adds that cannot be, {len(refused)} were refused: {refused}"
        assert np.array_equal(value, np.arange(4)), f"a refused add changed the table to {value}"


def _untouched(factory: Factory, me: int) -> Any:
    given = np.arange(6, dtype="float32").reshape(2, 3)
    table = factory(6, given, "float32")
    table.add(given)
    first = np.asarray(table.get())
    first[:] = -1  # a result is the caller's own
    mv.barrier()
    return given, np.asarray(table.get())


def _check_untouched(records: list[Any]) -> None:
    for given, value in records:
        assert np.array_equal(given, np.arange(6).reshape(2, 3)), "what was handed in was changed"
        assert np.array_equal(value, np.arange(6) * (1 + len(records))), f"expected sums, got {value}"


LAWS: dict[str, Law] = {
    "begins with the master's value, in its dtype": Law(_begin, _check_begin),
    "adds add up exactly": Law(_add_up, _check_add_up),
    "a worker reads its own adds": Law(_own_adds, _check_own_adds),
    "bad input is refused and changes nothing": Law(_refuse, _check_refuse),
    "nothing handed in is changed, results are fresh": Law(_untouched, _check_untouched),
}


def suite(
    factory: Factory,
    *,
    workers: Sequence[int] = (1, 2, 4),
    hosts: Sequence[tuple[int, ...]] = (),
    env: Mapping[str, str] | None = None,
    preload: Preload = (),
) -> type:
    """Returns a class of pytest tests of a table; give it a name that begins with ``Test``.

    Args:
        factory: makes a table (`Factory`); must travel to other processes, as with `multiverso.run`.
        workers: how many real processes to run with; each asynchronously and synchronously.
        hosts: rehearsals of several hosts to run with, too: how many workers each host has, as ``[(1, 1), (2, 1, 1)]``.
        env: environment variables for the workers.
        preload: modules that one process imports, to fork itself for each worker; with none, the workers are
            fresh interpreters.
    """
    return suite_of(LAWS, factory, workers, hosts=hosts, env=env, preload=preload)[0]
