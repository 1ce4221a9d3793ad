"""Lasagne 0.1 networks over the real Theano."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import lasagne
import numpy as np
import pytest
import theano
import theano.tensor as T

import multiverso as mv
from multiverso.errors import ShapeMismatchError
from multiverso.testing.laws import Job, Raised, in_each, run_jobs
from multiverso.theano_ext.lasagne_ext.param_manager import LasagneParamManager, MVNetParamManager

RUNS = [(1, False), (2, True), (3, False)]
MASTERS = [(1, 0), (1, None), (2, 1), (2, None)]

pytestmark = pytest.mark.timeout(300)  # the first use of a dtype compiles its kernels


class ScaleLayer(lasagne.layers.Layer):
    """Divides by a running root mean square: the one statistic, beside a parameter."""

    def __init__(self, incoming: Any, name: str | None = None) -> None:
        super().__init__(incoming, name=name)
        shape = (self.input_shape[1],)
        self.gain = self.add_param(lasagne.init.Constant(1), shape)
        self.rms = self.add_param(lasagne.init.Constant(1), shape, trainable=False, regularizable=False)

    def get_output_for(self, input: Any, **kwargs: Any) -> Any:
        return input / self.rms * self.gain


def build(value: float) -> tuple[Any, ScaleLayer]:
    layer = lasagne.layers.InputLayer((None, 3))
    scale = ScaleLayer(layer)
    network = lasagne.layers.DenseLayer(scale, 2, W=lasagne.init.Constant(value))
    return network, scale


def train(sync: bool) -> Any:
    mv.init(sync=sync)
    me = mv.worker_id()
    network, scale = build(me + 1)
    manager = LasagneParamManager(network)
    W = network.W
    begun = W.get_value()
    step = theano.function(
        [], [], updates=[(W, W + me + 1), (scale.rms, np.float32(0.9) * scale.rms + np.float32(0.1 * me))]
    )
    for _ in range(30):
        step()
        manager.sync_all_param()
    mv.barrier()
    manager.sync_all_param()
    values = lasagne.layers.get_all_param_values(network)
    assert lasagne.layers.get_all_params(network)[0] is scale.gain
    assert network.W is W
    return begun, values


def import_old_frameworks() -> None:
    """Before the processes fork; without their warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in ("lasagne",):
            importlib.import_module(name)


trained = in_each(RUNS, train, preload=(import_old_frameworks,))


@pytest.mark.parametrize(("workers", "sync"), RUNS)
def test_parameters_add_up_and_statistics_are_averaged(workers: int, sync: bool) -> None:
    results = trained(workers, sync)
    for begun, (gain, rms, W, b) in results:
        np.testing.assert_array_equal(begun, 1)
        np.testing.assert_array_equal(gain, 1)
        np.testing.assert_array_equal(W, 1 + 30 * sum(range(1, workers + 1)))
        np.testing.assert_array_equal(b, 0)
        np.testing.assert_array_equal(rms, results[0][1][1])
        assert np.isfinite(rms).all()
        assert (rms > 0).all(), "30 steps of a sum of decays would be below zero"
        assert (rms < max(2, workers)).all()
        assert W.dtype == rms.dtype == np.float32


def begin_with(master: int | None) -> Any:
    mv.init()
    network, _ = build(mv.worker_id() + 10)
    flag = () if master is None else (mv.worker_id() == master,)
    manager = MVNetParamManager(network, *flag)
    assert manager.network is manager.model is network
    begun = network.W.get_value()
    mv.barrier()
    network.W.set_value(network.W.get_value() + 1)
    manager.update_all_param()
    mv.barrier()
    manager.update_all_param()
    return begun, network.W.get_value()


begun_with = in_each(MASTERS, begin_with, preload=(import_old_frameworks,))


@pytest.mark.parametrize(("workers", "master"), MASTERS)
def test_the_older_manager_begins_with_the_flagged_workers_values(workers: int, master: int | None) -> None:
    for begun, ended in begun_with(workers, master):
        np.testing.assert_array_equal(begun, 10 + (master or 0))
        np.testing.assert_array_equal(ended, 10 + (master or 0) + workers)


def flag_in(masters: tuple[int, ...]) -> str:
    mv.init()
    network, _ = build(1)
    try:
        MVNetParamManager(network, mv.worker_id() in masters)
    except ValueError as error:
        return str(error)
    return "accepted"


flagged = in_each([(2, ()), (2, (0, 1))], flag_in, preload=(import_old_frameworks,))


@pytest.mark.parametrize("masters", [(), (0, 1)])
def test_one_worker_must_be_the_flagged_one(masters: tuple[int, ...]) -> None:
    answers = flagged(2, masters)
    assert answers == [f"is_master_worker is True in {len(masters)} workers; expected exactly one"] * 2


def test_a_changed_network_is_refused() -> None:
    mv.init()
    try:
        network, scale = build(1)
        manager = LasagneParamManager(network)
        scale.add_param(lasagne.init.Constant(0), (5,))
        with pytest.raises(ShapeMismatchError, match="LasagneParamManager"):
            manager.sync_all_param()
    finally:
        mv.shutdown()


def test_a_real_network_of_several_outputs_learns() -> None:
    mv.init()
    try:
        x, y = T.matrix("x"), T.ivector("y")
        hidden = lasagne.layers.DenseLayer(lasagne.layers.InputLayer((None, 4), x), 8)
        outputs = [lasagne.layers.DenseLayer(hidden, 2, nonlinearity=lasagne.nonlinearities.softmax) for _ in range(2)]
        manager = LasagneParamManager(outputs)
        cost = sum(
            lasagne.objectives.categorical_crossentropy(out, y).mean() for out in lasagne.layers.get_output(outputs)
        )
        params = lasagne.layers.get_all_params(outputs, trainable=True)
        step = theano.function([x, y], cost, updates=lasagne.updates.momentum(cost, params, 0.1))
        inputs = np.random.RandomState(0).normal(size=(64, 4)).astype("float32")
        labels = (inputs[:, 0] > 0).astype("int32")
        first = float(step(inputs, labels))
        for _ in range(30):
            last = float(step(inputs, labels))
            manager.sync_all_param()
        assert last < first / 2
    finally:
        mv.shutdown()


def save_and_go_on(folder: str, resumed: bool) -> Any:
    mv.init(sync=True)
    me = mv.worker_id()
    network, scale = build(me + 1 + 5 * resumed)
    manager = LasagneParamManager(network, rule="easgd")
    if resumed:
        assert manager.load(folder) == {"me": me}
    for step in range(2 if resumed else 0, 4):
        network.W.set_value(network.W.get_value() + np.float32(me + step))
        scale.rms.set_value(np.float32(0.9) * scale.rms.get_value() + np.float32(0.1 * me))
        manager.sync_all_param()
        if step == 1:
            manager.save(folder, {"me": me})
    mv.shutdown()
    return lasagne.layers.get_all_param_values(network)


def test_a_run_is_saved_and_resumed(tmp_path: Any) -> None:
    jobs = [Job((0, 1), (str(tmp_path), False)), Job((0, 1), (str(tmp_path), True))]
    whole, resumed = run_jobs(jobs, save_and_go_on, preload=(import_old_frameworks,))
    for result in (*whole, *resumed):
        assert not isinstance(result, Raised), result.text
    for went_on, again in zip(whole, resumed, strict=True):
        for one, other in zip(went_on, again, strict=True):
            np.testing.assert_array_equal(one, other)
    assert any((one != other).any() for one, other in zip(*whole, strict=True))
