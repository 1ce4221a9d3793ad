"""Shared variables of the framework that is installed: PyTensor, or Theano in the environment that has it."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import multiverso as mv
from multiverso.errors import ClosedError, DtypeMismatchError, NotInitializedError, ShapeMismatchError, WorkerLostError
from multiverso.testing.laws import Job, call, in_each, unless_raised, when_asked
from multiverso.theano import MVSharedVariable, mv_shared, sync_all_mv_shared_vars
from multiverso.theano.framework import framework

SECONDS = 250
RUNS = [(1, True), (2, False), (3, True)]
ROUNDS = 10

pytestmark = pytest.mark.timeout(300)  # the first use of a dtype compiles its kernels


@pytest.fixture
def alone() -> Any:
    mv.init()
    yield
    mv.shutdown()


def function(inputs: list[Any], updates: list[Any]) -> Any:
    return framework().function(inputs, [], updates=updates, mode="FAST_COMPILE")


def train(rounds: int, sync: bool) -> Any:
    mv.init(sync=sync)
    me = mv.worker_id()
    given = np.full((20, 30), me + 1, "float32")
    W = mv_shared(value=given, name="W", borrow=True)
    b = mv_shared(np.float64(me - 1))
    n = mv_shared(np.zeros(3, "int64"), "n")
    begun = W.get_value(), b.get_value()
    delta = np.arange(600, dtype="float32").reshape(20, 30)
    step = function([], [(W, W + delta), (b, b + 0.5), (n, n + 1)])
    W.mv_sync()
    seen = []
    mv.barrier()
    for _ in range(rounds):
        step()
        step()
        sync_all_mv_shared_vars()
        if not sync:
            mv.barrier()
            sync_all_mv_shared_vars()
            mv.barrier()
        seen.append((W.get_value(), float(b.get_value()), n.get_value()))
    assert (given == me + 1).all()
    assert [link.variable for link in mv_shared.shared_vars] == [W, b, n]
    assert mv_shared.shared_vars[0].name == "W"
    loaded = pickle.loads(pickle.dumps([W, b]))
    np.testing.assert_array_equal(loaded[0].get_value(), W.get_value())
    assert type(loaded[0]) is type(W)
    return type(W).__module__, type(W).__name__, begun, seen


trained = in_each(RUNS, train, ROUNDS, preload=(framework,))


@pytest.mark.parametrize(("workers", "sync"), RUNS)
def test_what_workers_train_adds_up_exactly(workers: int, sync: bool) -> None:
    results = trained(workers, sync)
    for module, name, (w, b), seen in results:
        assert (module, name) == (f"{framework().__name__}.tensor.sharedvar", "TensorSharedVariable")
        np.testing.assert_array_equal(w, 1)
        assert b == -1
        assert len(seen) == ROUNDS
        for i, (w, b, n) in enumerate(seen, 1):
            np.testing.assert_array_equal(w.reshape(-1), 1 + np.arange(600) * 2 * i * workers)
            assert b == i * workers - 1
            np.testing.assert_array_equal(n, 2 * i * workers)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int32", "int64"])
@pytest.mark.parametrize("shape", [(), (1,), (3, 1, 2)])
def test_dtype_and_shape_are_kept(alone: None, dtype: str, shape: tuple[int, ...]) -> None:
    W = mv_shared(np.ones(shape, dtype))
    W.set_value(W.get_value() + np.ones((), dtype))
    W.mv_sync()
    assert W.get_value().dtype == dtype
    assert W.get_value().shape == shape
    np.testing.assert_array_equal(W.get_value(), 2)


def test_any_memory_order(alone: None) -> None:
    value = np.arange(6, dtype="float32").reshape(2, 3)
    W = mv_shared(np.asfortranarray(value))
    np.testing.assert_array_equal(W.get_value(), value)
    W.set_value(np.asfortranarray(2 * value))
    W.mv_sync()
    np.testing.assert_array_equal(W.get_value(), 2 * value)


def test_two_variables_made_of_one_array_are_two(alone: None) -> None:
    zeros = np.zeros(3, "float32")
    a, b = mv_shared(zeros, borrow=True), mv_shared(zeros, borrow=True)
    function([], [(a, a + 1)])()
    sync_all_mv_shared_vars()
    np.testing.assert_array_equal(a.get_value(), 1)
    np.testing.assert_array_equal(b.get_value(), 0)
    np.testing.assert_array_equal(zeros, 0)


@pytest.mark.parametrize("value", [np.ones(2, bool), np.ones(2, "complex64"), np.ones(2, "int8")])
def test_other_dtypes_are_refused(alone: None, value: Any) -> None:
    with pytest.raises(DtypeMismatchError, match=str(value.dtype)):
        mv_shared(value)
    assert mv_shared.shared_vars == []


def test_what_is_no_shared_variable_is_refused(alone: None) -> None:
    with pytest.raises(TypeError, match="ndarray"):
        MVSharedVariable(np.ones(3))


def test_another_size_is_refused_and_another_shape_is_not(alone: None) -> None:
    W = mv_shared(np.zeros((2, 3), "float32"), name="W")
    W.set_value(np.ones((3, 3), "float32"))
    with pytest.raises(ShapeMismatchError, match=r"9 values now, shape \(3, 3\)"):
        W.mv_sync()
    W.set_value(np.ones((3, 2), "float32"))
    W.mv_sync()
    np.testing.assert_array_equal(W.get_value(), np.ones((3, 2)))


def test_a_loaded_variable_can_be_shared_again(alone: None) -> None:
    W = mv_shared(np.arange(3, dtype="float32"), name="W")
    loaded = pickle.loads(pickle.dumps(W))
    assert loaded.name == "W"
    assert not hasattr(loaded, "mv_sync")
    with pytest.raises(AttributeError, match=r"pickle.*MVSharedVariable\(variable\)"):
        loaded.mv_sync()
    with pytest.raises(NotInitializedError, match="pickle"):
        pickle.loads(pickle.dumps(MVSharedVariable(W))).mv_sync()
    link = MVSharedVariable(loaded)
    loaded.set_value(loaded.get_value() + 1)
    sync_all_mv_shared_vars()
    np.testing.assert_array_equal(link.get_value(), [1, 2, 3])
    np.testing.assert_array_equal(W.get_value(), [0, 1, 2])


def test_a_pickled_variable_is_loaded_where_there_is_no_multiverso(alone: None, tmp_path: Path) -> None:
    (tmp_path / "W").write_bytes(pickle.dumps(mv_shared(np.arange(3, dtype="float32"))))
    program = (
        "import pickle, sys; sys.modules['multiverso'] = None\n"
        f"print(pickle.load(open({str(tmp_path / 'W')!r}, 'rb')).get_value().tolist())"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=250, check=False)
    assert result.stdout == "[0.0, 1.0, 2.0]\n", result.stderr


def begin(values: list[float]) -> Any:
    mv.init()
    value = np.full(3, values[mv.worker_id()], "float32")
    try:
        return mv_shared(value).get_value().tolist()
    except ValueError as error:
        return str(error)


BEGUN = {(0, 5, 0): 5.0, (2, 5, 0): 2.0, (0, 5, 5): 5.0, (0, 0, 0): 0.0, (0, 5, 6): "zeros in the master"}
begun = in_each([(3, values) for values in BEGUN], begin, preload=(framework,))


@pytest.mark.parametrize("values", BEGUN)
def test_the_value_may_be_in_any_one_worker(values: tuple[float, ...]) -> None:
    for found in begun(3, values):
        if isinstance(BEGUN[values], str):
            assert "begins with zeros in the master worker and with different values in workers [1, 2]" in found
        else:
            assert found == [BEGUN[values]] * 3


def test_a_variable_that_is_not_shared_has_no_such_method(alone: None) -> None:
    mv_shared(np.zeros(3, "float32"))
    assert not hasattr(framework().shared(np.zeros(3, "float32")), "mv_sync")


def test_a_new_session_has_a_list_of_its_own() -> None:
    for _ in range(2):
        mv.init()
        W = mv_shared(np.zeros(2, "float32"))
        assert [link.variable for link in mv_shared.shared_vars] == [W]
        sync_all_mv_shared_vars()
        mv.shutdown()
    with pytest.raises(ClosedError):
        sync_all_mv_shared_vars()
    with pytest.raises(ClosedError):
        mv_shared(np.zeros(2, "float32"))
    with pytest.raises(ClosedError):
        W.mv_sync()


def test_variables_that_a_new_session_shares_again_are_in_its_list_and_the_others_are_not() -> None:
    mv.init()
    old = [mv_shared(np.zeros(2, "float32")) for _ in range(3)]
    mv.shutdown()
    mv.init()
    MVSharedVariable(old[1])
    made = mv_shared(np.zeros(2, "float32"))
    assert [link.variable for link in mv_shared.shared_vars] == [old[1], made]
    mv.shutdown()
    mv.init()
    MVSharedVariable(made)
    sync_all_mv_shared_vars()
    assert [link.variable for link in mv_shared.shared_vars] == [made]
    mv.shutdown()


def many_variables(count: int) -> tuple[int, float]:
    mv.init()
    variables = [mv_shared(np.full(10, i, "float32")) for i in range(count)]
    for variable in variables:
        variable.set_value(variable.get_value() + 1)
    sync_all_mv_shared_vars()
    mv.barrier()
    sync_all_mv_shared_vars()
    return len(os.listdir("/proc/self/fd")), sum(float(v.get_value().sum()) for v in variables)


# With the real Theano as well as here, they are descriptors of ours: many are made once.
MANY = 400 if framework().__name__ == "pytensor" else 150


def test_many_variables_take_few_descriptors() -> None:
    for descriptors, total in unless_raised(ended(0)):
        assert descriptors < 100
        assert total == 10 * sum(range(MANY)) + 2 * 10 * MANY


def die(sync: bool, on_lost: str) -> Any:
    mv.init(sync=sync, on_lost=on_lost)
    W = mv_shared(np.zeros(3, "float32"))
    W.mv_sync()
    mv.barrier()
    if mv.worker_id() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    W.set_value(W.get_value() + 1)
    try:
        W.mv_sync()
        W.mv_sync()
    except WorkerLostError as error:
        return error.worker_ids
    return W.get_value()


DEATHS = [(False, "stop", [1, 1, 1]), (True, "continue", [1, 1, 1]), (True, "stop", (1,))]


@pytest.mark.parametrize(("sync", "on_lost", "expected"), DEATHS)
def test_a_worker_that_dies_stops_the_others_only_in_a_round(sync: bool, on_lost: str, expected: Any) -> None:
    survivor, lost = ended(2 + DEATHS.index((sync, on_lost, expected)))
    np.testing.assert_array_equal(survivor, expected)
    assert isinstance(lost, WorkerLostError)


def add_small_steps(steps: int) -> Any:
    mv.init()
    W = mv_shared(np.array([2048.0], "float16"))
    for _ in range(steps):
        W.set_value(W.get_value() + np.float16(2))
        W.mv_sync()
    mv.barrier()
    W.mv_sync()
    return W.get_value()


def test_sixteen_bits_add_up_in_thirty_two() -> None:
    for value in unless_raised(ended(1)):
        assert value == 2048 + 2 * 50 * 2
        assert value.dtype == np.float16


# In the same processes, but for those that are killed.
JOBS = [Job((0, 1), (many_variables, MANY)), Job((0, 1), (add_small_steps, 50))] + [
    Job((0, 2 + i), (die, sync, on_lost)) for i, (sync, on_lost, _) in enumerate(DEATHS)
]
ended = when_asked(JOBS, call, on_failure="continue", preload=(framework,))
