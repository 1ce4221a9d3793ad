"""Keras 1.2.2 over the real Theano, through the original module paths."""

from __future__ import annotations

import importlib
import subprocess
import sys
import warnings
from typing import Any

import numpy as np
import pytest
from keras.callbacks import EarlyStopping
from keras.layers import BatchNormalization, Dense, Input
from keras.models import Model, Sequential

import multiverso as mv
from multiverso.errors import ShapeMismatchError
from multiverso.testing.laws import Job, Raised, in_each, run_jobs
from multiverso.theano_ext.keras_ext.callbacks import MVCallback
from multiverso.theano_ext.keras_ext.param_manager import KerasParamManager

RUNS = [(1, False), (2, True), (3, False)]
FITS = [(1, 1), (2, 4)]

pytestmark = pytest.mark.timeout(300)  # the first use of a dtype compiles its kernels


def build(seed: int) -> Any:
    np.random.seed(seed)
    model = Sequential()
    model.add(Dense(6, input_dim=4, activation="relu"))
    model.add(BatchNormalization())
    model.add(Dense(1, activation="sigmoid"))
    model.compile(optimizer="sgd", loss="binary_crossentropy")
    return model


def data(seed: int) -> Any:
    x = np.random.RandomState(seed).normal(3, 2, size=(48, 4)).astype("float32")
    return x, (x[:, :1] > 3).astype("float32")


def add_up(sync: bool) -> Any:
    mv.init(sync=sync)
    me = mv.worker_id()
    model = build(me)
    manager = KerasParamManager(model)
    begun = model.get_weights()
    for _ in range(4):
        model.set_weights([w + me + 1 for w in model.get_weights()])
        manager.sync_all_param()
    mv.barrier()
    manager.sync_all_param()
    return begun, model.get_weights()


def import_old_frameworks() -> None:
    """Before the processes fork; without their warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in ("keras", "keras.models", "keras.layers"):
            importlib.import_module(name)


added_up = in_each(RUNS, add_up, preload=(import_old_frameworks,))


@pytest.mark.parametrize(("workers", "sync"), RUNS)
def test_weights_add_up_and_statistics_are_averaged(workers: int, sync: bool) -> None:
    first = build(0).get_weights()
    results = added_up(workers, sync)
    total = sum(range(1, workers + 1))
    for begun, ended in results:
        for index, (expected, begin, end) in enumerate(zip(first, begun, ended, strict=True)):
            np.testing.assert_array_equal(begin, expected, "the master's weights")
            np.testing.assert_array_equal(end, results[0][1][index], "all workers agree")
            if index in (4, 5):  # moving mean and variance
                assert (end <= expected + 4 * workers).all()
                if sync:
                    np.testing.assert_allclose(end, expected + 4 * total / workers, rtol=1e-5)
            else:
                np.testing.assert_allclose(end, expected + 4 * total, rtol=1e-4, atol=1e-4)


def fit(freq: int) -> Any:
    mv.init()
    model = build(mv.worker_id())
    x, y = data(mv.worker_id())
    callback = MVCallback(model, freq=freq)
    history = model.fit(
        x,
        y,
        batch_size=8,
        nb_epoch=6,
        initial_epoch=2,
        validation_split=0.25,
        verbose=0,
        callbacks=[callback, EarlyStopping(patience=100)],
    )
    mv.barrier()
    callback.kpm.sync_all_param()
    return history.epoch, history.history["val_loss"], model.get_weights(), mv.stats()


fitted = in_each(FITS, fit, preload=(import_old_frameworks,))


@pytest.mark.parametrize(("workers", "freq"), FITS)
def test_fit_with_validation_early_stopping_and_a_first_epoch(workers: int, freq: int) -> None:
    results = fitted(workers, freq)
    begun = build(0).get_weights()
    for epochs, losses, weights, _ in results:
        assert epochs == [2, 3, 4, 5]
        assert np.isfinite(losses).all()
        for index, (first, ours, masters) in enumerate(zip(begun, weights, results[0][2], strict=True)):
            np.testing.assert_array_equal(ours, masters)
            assert np.isfinite(ours).all()
            if index == 5:
                assert (ours > 0).all(), "a variance"
            elif index in (0, 4):
                assert (ours != first).any(), "it has learnt"


class Counting(MVCallback):
    """Counts its exchanges."""

    exchanges = 0

    def _exchange(self) -> None:
        self.exchanges += 1
        super()._exchange()


def test_freq_counts_minibatches_and_the_last_ones_are_not_forgotten() -> None:
    mv.init()
    try:
        model = build(0)
        x, y = data(0)
        counting = Counting(model, freq=4)
        model.fit(x, y, batch_size=8, nb_epoch=3, verbose=0, callbacks=[counting])  # 18 minibatches
        assert counting.exchanges == 5
    finally:
        mv.shutdown()


@pytest.mark.parametrize("freq", [0, -3])
def test_freq_below_one_is_refused_before_any_table_is_made(freq: int) -> None:
    mv.init()
    try:
        before = mv.stats()
        with pytest.raises(ValueError, match="freq"):
            MVCallback(build(0), freq=freq)
        assert mv.stats().keys() == before.keys()
        assert len(mv.stats()["tables"]) == len(before["tables"]) == 0
    finally:
        mv.shutdown()


def test_freq_that_is_no_integer_is_refused() -> None:
    with pytest.raises(TypeError):
        MVCallback(build(0), freq=1.5)  # type: ignore[arg-type]


def test_a_layer_used_twice_is_shared_once() -> None:
    mv.init()
    try:
        inputs = Input((4,))
        dense = Dense(4)
        model = Model(inputs, dense(dense(inputs)))
        manager = KerasParamManager(model)
        before = model.get_weights()
        model.set_weights([w + 1 for w in before])
        manager.sync_all_param()
        for was, now in zip(before, model.get_weights(), strict=True):
            np.testing.assert_allclose(now, was + 1, rtol=1e-5)
    finally:
        mv.shutdown()


def test_freezing_is_handled_and_a_new_layer_refused() -> None:
    mv.init()
    try:
        model = build(0)
        manager = KerasParamManager(model)
        before = model.get_weights()
        model.layers[0].trainable = False
        manager.sync_all_param()
        for was, now in zip(before, model.get_weights(), strict=True):
            np.testing.assert_array_equal(now, was)
        model.add(Dense(3))
        with pytest.raises(ShapeMismatchError, match="new manager"):
            manager.sync_all_param()
    finally:
        mv.shutdown()


def test_keras_does_not_need_lasagne() -> None:
    script = (
        "import sys; sys.modules['lasagne'] = None\n"
        "from multiverso.theano_ext.keras_ext.callbacks import MVCallback\n"
        "print(MVCallback.__module__)"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=250, check=True)
    assert result.stdout == "multiverso.theano_ext.keras_ext.keras1\n"


def save_and_go_on(folder: str, resumed: bool) -> Any:
    mv.init(sync=True)
    me = mv.worker_id()
    model = build(me + 5 * resumed)
    manager = KerasParamManager(model, rule="easgd")
    if resumed:
        assert manager.load(folder) == {"me": me}
    for step in range(2 if resumed else 0, 4):
        model.set_weights([w + me + 1 + step for w in model.get_weights()])
        manager.sync_all_param()
        if step == 1:
            manager.save(folder, {"me": me})
    mv.shutdown()
    return model.get_weights()


def test_a_run_is_saved_and_resumed(tmp_path: Any) -> None:
    whole, resumed = run_jobs(
        [Job((0, 1), (str(tmp_path), False)), Job((0, 1), (str(tmp_path), True))],
        save_and_go_on,
        preload=(import_old_frameworks,),
    )
    for result in (*whole, *resumed):
        assert not isinstance(result, Raised), result.text
    for went_on, again in zip(whole, resumed, strict=True):
        for one, other in zip(went_on, again, strict=True):
            np.testing.assert_array_equal(one, other)
    assert not np.array_equal(whole[0][0], whole[1][0])
