"""What every binding has to do: the laws of a framework's parameters, shared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

import multiverso as mv
from multiverso.errors import WorkerLostError
from multiverso.launch.job import OnFailure
from multiverso.testing import faults
from multiverso.testing.laws import JOBS_SECONDS, WAIT_SECONDS, Job, Law, Raised, suite_of
from multiverso.testing.nursery import Preload

Array = NDArray[Any]
_STEPS = 10
_SHAPES = ((3, 5), (4,), ())
_VICTIM_STEP = 3


class Model(Protocol):
    """One worker's shared model, as the suite drives it."""

    def values(self) -> list[Array]:
        """Returns the parameters' values, copied."""

    def statistics(self) -> list[Array]:
        """Returns the statistics' values, copied."""

    def add(self, deltas: Sequence[Array]) -> None:
        """Changes the parameters, as training does: adds these to them."""

    def set_statistics(self, values: Sequence[Array]) -> None:
        """Sets the statistics, as a forward pass does."""

    def sync(self) -> None:
        """Exchanges with the other workers."""

    def kinds(self) -> list[str]:
        """Returns dtype, shape and device of each parameter and statistic, in the framework's words."""


Factory = Callable[[list[Array], list[Array]], Model]
"""Makes a model with these parameters and statistics and shares it: called in each worker, after ``init()``.

The arrays are read-only and of the suite's dtypes; a binding without statistics gets an empty list of them.
"""


def _arrays(dtypes: Sequence[str], value: float) -> list[Array]:
    arrays = [np.full(shape, value).astype(np.dtype(dtype)) for dtype in dtypes for shape in _SHAPES]
    for array in arrays:
        array.flags.writeable = False
    return arrays


def _wide(values: Sequence[Any]) -> list[Array]:
    return [np.asarray(value).astype(np.float64) for value in values]


def _equal(rows: Sequence[Sequence[Array]], what: str) -> None:
    for me, row in enumerate(rows):
        assert len(row) == len(rows[0]), f"worker {me} has {len(row)} arrays, worker 0 has {len(rows[0])}"
        for index, (mine, first) in enumerate(zip(row, rows[0], strict=True)):
            assert np.array_equal(mine, first), f"{what}: array {index} of worker {me} is {mine}, of worker 0 {first}"


class _Subject:
    """A factory and the arrays that it is tried with; travels to the workers."""

    def __init__(self, factory: Factory, dtypes: Sequence[str], statistics: int) -> None:
        self.factory = factory
        self.dtypes = tuple(dtypes)
        self.statistics = statistics

    def make(self, value: float) -> Model:
        return self.factory(_arrays(self.dtypes, value), self.running(value))

    def running(self, value: float) -> list[Array]:
        return _arrays(self.dtypes[:1], value)[1:2] * self.statistics


def _begin_alike(subject: _Subject, me: int) -> Any:
    model = subject.make(me + 2)
    mv.barrier()
    return _wide(model.values()), _wide(model.statistics())


def _check_begin_alike(records: list[Any]) -> None:
    for values, statistics in records:
        for value in values + statistics:
            assert (value == 2).all(), f"began with {value}, and the master's value is 2"


def _add_up(subject: _Subject, me: int) -> Any:
    model = subject.make(1)
    for _ in range(_STEPS):
        model.add([np.full_like(array, me + 1) for array in _arrays(subject.dtypes, 0)])
        model.sync()
    mv.barrier()
    model.sync()
    return _wide(model.values())


def _check_add_up(records: list[Any]) -> None:
    expected = 1 + _STEPS * sum(range(1, len(records) + 1))
    for me, values in enumerate(records):
        for index, value in enumerate(values):
            assert (value == expected).all(), f"array {index} of worker {me} is {value}; expected {expected}"


def _all_equal(subject: _Subject, me: int) -> Any:
    model = subject.make(0)
    random = np.random.default_rng(me)
    for _ in range(_STEPS):
        model.add([random.normal(size=array.shape).astype(array.dtype) for array in _arrays(subject.dtypes, 0)])
        model.sync()
    mv.barrier()
    model.sync()
    mv.barrier()
    return _wide(model.values())


def _check_all_equal(records: list[Any]) -> None:
    _equal(records, "after a barrier and a sync")
    assert all(np.isfinite(value).all() and (value != 0).any() for value in records[0])


def _kinds_kept(subject: _Subject, me: int) -> Any:
    model = subject.make(1)
    before = model.kinds()
    for _ in range(2):
        model.add([np.ones_like(array) for array in _arrays(subject.dtypes, 0)])
        model.sync()
    mv.barrier()
    return before, model.kinds()


def _check_kinds_kept(records: list[Any]) -> None:
    for before, after in records:
        assert before, "the model describes no parameter"
        assert before == after, f"{before} became {after}"


def _averaged(subject: _Subject, me: int) -> Any:
    model = subject.make(1)
    model.sync()
    seen = []
    for _ in range(_STEPS):
        new = [np.asarray(value) * 0.1 + 0.01 * (me + 1) for value in model.statistics()]
        model.set_statistics([value.astype(old.dtype) for value, old in zip(new, subject.running(0), strict=True)])
        model.sync()
        seen += _wide(model.statistics())
    mv.barrier()
    model.sync()
    mv.barrier()
    return seen, _wide(model.statistics())


def _check_averaged(records: list[Any]) -> None:
    highest = 0.02 * len(records)  # the fixed point of the slowest worker
    for seen, _ in records:
        for value in seen:
            assert np.isfinite(value).all(), f"a statistic became {value}"
            assert (value > 0).all(), f"a variance became {value}"
            assert (value <= 1).all(), f"a statistic became {value}, though every worker only shrank it from 1"
    _equal([statistics for _, statistics in records], "statistics after a barrier and a sync")
    assert all((value < 0.5 + highest).all() for value in records[0][1]), "the statistics did not follow the workers'"


def _nothing_else(subject: _Subject, me: int) -> Any:
    given, running = _arrays(subject.dtypes, me + 1), subject.running(me + 1)
    model = subject.factory(given, running)
    deltas = _arrays(subject.dtypes, 3)
    model.add(deltas)
    model.sync()
    mv.barrier()
    return [*given, *running], deltas


def _check_nothing_else(records: list[Any]) -> None:
    for me, (given, deltas) in enumerate(records):
        assert all((array == me + 1).all() for array in given), "an array that was handed in was changed"
        assert all((array == 3).all() for array in deltas), "deltas that were handed in were changed"


LAWS: dict[str, Law] = {
    "all begin with the master's values": Law(_begin_alike, _check_begin_alike),
    "deltas add up exactly": Law(_add_up, _check_add_up),
    "all are equal after a barrier and a sync": Law(_all_equal, _check_all_equal),
    "dtype, shape and device are kept": Law(_kinds_kept, _check_kinds_kept),
    "statistics are averaged": Law(_averaged, _check_averaged),
    "nothing handed in is changed": Law(_nothing_else, _check_nothing_else),
}


def _survive(subject: _Subject, sync: bool, on_lost: OnFailure) -> Any:
    """The last worker is killed at its third exchange; what the others see."""
    mv.init(sync=sync, on_lost=on_lost, timeout_seconds=WAIT_SECONDS, start_timeout_seconds=JOBS_SECONDS)
    model = subject.make(0)
    mv.barrier()
    if mv.worker_id() == mv.workers_num() - 1:
        faults.die_at(model, "sync", _VICTIM_STEP)
    done, lost = 0, []
    for _ in range(3 * _VICTIM_STEP):
        model.add([np.ones_like(array) for array in _arrays(subject.dtypes, 0)])
        try:
            model.sync()
        except WorkerLostError as error:
            lost += list(error.worker_ids)
            break
        done += 1
    try:
        mv.barrier()
    except WorkerLostError as error:
        return done, lost, list(error.worker_ids), _wide(model.values())
    model.sync()
    return done, lost, [], _wide(model.values())


def _check_death(results: Sequence[Any], sync: bool, on_lost: str) -> None:
    """Raises AssertionError unless a worker's death stopped the others where it should, and only there."""
    victim = len(results) - 1
    assert isinstance(results[victim], WorkerLostError), f"worker {victim} was to be killed: {results[victim]}"
    waits = sync and on_lost == "stop"
    for me, result in enumerate(results[:victim]):
        assert not isinstance(result, Exception), f"worker {me} was lost: {result}"
        assert not isinstance(result, Raised), f"worker {me} failed:\n{result.text}"
        done, lost, at_barrier, values = result
        assert done == (_VICTIM_STEP - 1 if waits else 3 * _VICTIM_STEP), f"worker {me} did {done} exchanges"
        assert lost == ([victim] if waits else []), f"worker {me}'s exchange named {lost}"
        assert at_barrier == ([victim] if on_lost == "stop" else []), f"worker {me}'s barrier named {at_barrier}"
        if on_lost == "continue":
            expected = victim * 3 * _VICTIM_STEP + _VICTIM_STEP - 1
            for value in values:
                assert (value == expected).all(), f"worker {me} has {value}; expected {expected}"


_DEATHS = [(False, "stop"), (True, "stop"), (True, "continue")]


def suite(
    factory: Factory,
    *,
    dtypes: Sequence[str] = ("float32",),
    statistics: bool = True,
    workers: Sequence[int] = (1, 2, 4),
    hosts: Sequence[tuple[int, ...]] = (),
    deaths: bool = True,
    env: Mapping[str, str] | None = None,
    preload: Preload = (),
) -> type:
    """Returns a class of pytest tests of a binding; give it a name that begins with ``Test``.

    Args:
        factory: makes and shares a model (`Factory`); must travel to other processes, as with `multiverso.run`.
        dtypes: of the parameters to try: for each, arrays of the shapes (3, 5), (4,) and ().
        statistics: whether the binding has any; of the first dtype.
        workers: how many real processes to run with.
        hosts: rehearsals of several hosts to run with, too: how many workers each host has, as ``[(1, 1), (2, 1, 1)]``.
        deaths: whether to kill workers, too, one in each of several jobs of three, whatever ``workers`` says.
        env: environment variables for the workers: a framework's backend, say.
        preload: modules that one process imports (or functions that it calls) to fork itself for each worker:
            with ``("torch",)`` the suite pays for that import once. They must start no threads and use no
            accelerator. With none, the workers are fresh interpreters.
    """
    import pytest

    subject = _Subject(factory, dtypes, int(statistics))
    laws = {name: law for name, law in LAWS.items() if statistics or law is not LAWS["statistics are averaged"]}
    # Two processes live through all, and each job takes the life of another one, which the laws did without: who is
    # killed brings nothing.
    first = max(2, *workers, *map(sum, hosts))
    ends = [Job((0, 1, first + i), (_survive, subject, *death)) for i, death in enumerate(_DEATHS) if deaths]
    base, end = suite_of(laws, subject, workers, hosts=hosts, more=ends, env=env, preload=preload)
    if not deaths:
        return base

    class Conformance(base):  # type: ignore[misc, valid-type]
        """Laws of a binding, and what a death does."""

        @pytest.mark.parametrize(("sync", "on_lost"), _DEATHS)
        def test_death(self, sync: bool, on_lost: str) -> None:
            """A worker that dies stops the others only where it should."""
            _check_death(end(_DEATHS.index((sync, on_lost))), sync, on_lost)

    return Conformance
