"""Models as lists of arrays or of shared variables: what is shared, what stays, what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import multiverso as mv
from multiverso.errors import DtypeMismatchError, ShapeMismatchError
from multiverso.testing.laws import Job, Raised, in_each, run_jobs
from multiverso.theano import MVSharedVariable, ParamManager
from multiverso.theano.framework import framework
from multiverso.theano_ext.param_manager import MVModelParamManager

RUNS = [(1, False), (2, True), (3, False)]

pytestmark = pytest.mark.timeout(300)  # the first use of a dtype compiles its kernels


class Manager(MVModelParamManager):
    """A model that is a namespace: two parameters, a statistic, a counter."""

    def get_all_param_values(self) -> list[Any]:
        model = self.model
        return [model.weights, model.mean, model.count, model.bias]

    def set_all_param_values(self, params: list[Any]) -> None:
        model = self.model
        model.weights, model.mean, model.count, model.bias = params

    def statistic_indices(self) -> list[int]:
        return [1]


def model_of(value: float) -> SimpleNamespace:
    return SimpleNamespace(
        weights=np.full((2, 3), value, "float32"),
        mean=np.full(3, value, "float64"),
        count=np.full((), value, "int64"),
        bias=np.full(3, value, "float16"),
    )


@pytest.fixture
def alone() -> Any:
    mv.init()
    yield
    mv.shutdown()


def test_one_variable_is_no_list_of_variables(alone: Any) -> None:
    """The framework said that its length cannot be determined."""
    with pytest.raises(TypeError, match=r"a list of shared variables: \[W\] for one"):
        ParamManager(framework().shared(np.zeros(2, "float32"), name="W"))


def test_a_variable_is_exchanged_by_its_newest_manager_alone(alone: Any) -> None:
    shared = framework().shared
    one, other, third = (shared(np.zeros(2, "float32")) for _ in range(3))
    older, apart = ParamManager([one, other]), ParamManager([third])
    newer = ParamManager([other])
    for refused in (older.sync_all_param, older.step):
        with pytest.raises(RuntimeError, match="a newer manager"):
            refused()
    newer.sync_all_param()
    apart.sync_all_param()
    newest = MVSharedVariable(other)
    with pytest.raises(RuntimeError, match="a newer manager"):
        newer.sync_all_param()
    newest.mv_sync()


def train(sync: bool) -> Any:
    mv.init(sync=sync)
    me = mv.worker_id()
    model = model_of(me + 1)
    first = vars(model).copy()
    manager = Manager(model)
    begun = {name: array.copy() for name, array in vars(model).items()}
    for _ in range(5):
        model.weights += me + 1
        model.bias += 1
        model.count = model.count + 1
        model.mean[:] = me
        manager.sync_all_param()
    mv.barrier()
    manager.sync_all_param()
    assert all((array == me + 1).all() for array in first.values())
    return begun, vars(model)


trained = in_each(RUNS, train, preload=(framework,))


@pytest.mark.parametrize(("workers", "sync"), RUNS)
def test_a_subclass_shares_any_model(workers: int, sync: bool) -> None:
    results = trained(workers, sync)
    for me, (begun, ended) in enumerate(results):
        assert [begun[name].max() for name in ("weights", "mean", "bias")] == [1, 1, 1]
        assert begun["count"] == me + 1, "integers stay with their worker"
        assert ended["count"] == me + 6
        np.testing.assert_array_equal(ended["weights"], 1 + 5 * sum(range(1, workers + 1)))
        np.testing.assert_array_equal(ended["bias"], 1 + 5 * workers)
        np.testing.assert_array_equal(ended["mean"], results[0][1]["mean"])
        assert (ended["mean"] >= 0).all()
        assert (ended["mean"] <= max(1, workers - 1)).all()
        if sync:
            np.testing.assert_allclose(ended["mean"], (workers - 1) / 2)
        assert {name: (a.dtype, a.shape) for name, a in ended.items()} == {
            name: (a.dtype, a.shape) for name, a in vars(model_of(0)).items()
        }


def test_the_model_gets_arrays_of_its_own(alone: None) -> None:
    model = model_of(1)
    manager = Manager(model)
    kept = model.weights
    model.weights = model.weights + 1
    manager.sync_all_param()
    np.testing.assert_array_equal(kept, 1)
    np.testing.assert_array_equal(model.weights, 2)


def test_a_changed_model_is_refused_before_anything_is_exchanged(alone: None) -> None:
    model = model_of(1)
    manager = Manager(model)
    model.bias = model.bias + 1
    model.weights = np.zeros((3, 2), "float32")
    with pytest.raises(ShapeMismatchError, match="Manager"):
        manager.sync_all_param()
    assert (model.bias == 2).all()
    model.weights = np.zeros((2, 3), "float32")
    manager.sync_all_param()
    assert (model.bias == 2).all()


def test_a_model_of_complex_numbers_is_refused(alone: None) -> None:
    model = model_of(1)
    model.weights = model.weights.astype("complex64")
    with pytest.raises(DtypeMismatchError, match="parameter 0"):
        Manager(model)


def test_the_base_class_is_made_to_be_subclassed(alone: None) -> None:
    with pytest.raises(TypeError, match="get_all_param_values"):
        MVModelParamManager(model_of(1))  # type: ignore[abstract]


def share_variables(sync: bool) -> Any:
    mv.init(sync=sync)
    shared, me = framework().shared, mv.worker_id()
    w = shared(np.full((2, 2), me, "float32"))
    v = shared(np.full(3, me, "float64"))
    mean = shared(np.full(2, me, "float32"))
    manager = ParamManager([w, v, w, mean], statistics=[mean], every=3)
    step = framework().function([], [], updates=[(w, w + 1), (v, v + 1)], mode="FAST_COMPILE")
    exchanged = []
    for _ in range(6):
        step()
        mean.set_value(np.full(2, me, "float32"))
        exchanged.append(manager.step())
    mv.barrier()
    manager.sync_all_param()
    return exchanged, w.get_value(), v.get_value(), mean.get_value()


exchanged_in_one = in_each(RUNS, share_variables, preload=(framework,))


@pytest.mark.parametrize(("workers", "sync"), RUNS)
def test_shared_variables_in_one_exchange(workers: int, sync: bool) -> None:
    results = exchanged_in_one(workers, sync)
    for exchanged, w, v, mean in results:
        assert exchanged == [False, False, True, False, False, True]
        np.testing.assert_array_equal(w, np.full((2, 2), 6 * workers, "float32"))
        np.testing.assert_array_equal(v, 6 * workers)
        assert v.dtype == np.float64
        np.testing.assert_array_equal(mean, results[0][3])
        assert (mean >= 0).all()
        assert (mean <= workers - 1).all()


def test_a_variable_of_another_shape_is_refused(alone: None) -> None:
    w = framework().shared(np.zeros((2, 2), "float32"))
    manager = ParamManager([w])
    w.set_value(np.zeros((4, 1), "float32"))
    with pytest.raises(ShapeMismatchError, match=r"4, 1"):
        manager.sync_all_param()


@pytest.mark.parametrize("variables", [[], [np.zeros(3)], ["W"]])
def test_what_cannot_be_managed_is_refused(alone: None, variables: list[Any]) -> None:
    with pytest.raises((TypeError, ValueError)):
        ParamManager(variables)


def save_and_go_on(folder: str, resumed: bool) -> Any:
    mv.init(sync=True)
    me = mv.worker_id()
    variables = [
        framework().shared(np.full(3, me + 7 * resumed, "float32")),
        framework().shared(np.ones((), "float64")),
    ]
    statistics = [framework().shared(np.full(2, 2.0 + me, "float32"))]
    model = model_of(me + 9 * resumed)
    managers: list[Any] = [ParamManager(variables, statistics, rule="easgd"), Manager(model, rule="easgd")]
    if resumed:
        assert [manager.load(f"{folder}/{i}") for i, manager in enumerate(managers)] == [{"me": me}] * 2
    for step in range(2 if resumed else 0, 4):
        for variable in (*variables, *statistics):
            variable.set_value(variable.get_value() + variable.get_value().dtype.type(me + step))
        model.weights, model.mean = model.weights + np.float32(me + 1), model.mean * 0.5
        model.count, model.bias = model.count + 1, model.bias + np.float16(step + me)
        for manager in managers:
            manager.sync_all_param()
        if step == 1:
            for i, manager in enumerate(managers):
                manager.save(f"{folder}/{i}", {"me": me})
    mv.shutdown()
    values = [variable.get_value() for variable in (*variables, *statistics)]
    return [*values, model.weights, model.mean, model.count, model.bias]


def test_runs_are_saved_and_resumed(tmp_path: Any) -> None:
    jobs = [Job((0, 1), (str(tmp_path), False)), Job((0, 1), (str(tmp_path), True))]
    whole, resumed = run_jobs(jobs, save_and_go_on, preload=(framework,))
    for result in (*whole, *resumed):
        assert not isinstance(result, Raised), result.text
    for went_on, again in zip(whole, resumed, strict=True):
        for one, other in zip(went_on, again, strict=True):
            np.testing.assert_array_equal(one, other)
            assert np.asarray(one).dtype == np.asarray(other).dtype
    assert any(np.any(one != other) for one, other in zip(*whole, strict=True))
