"""`model.fit` with sharing: validation, early stopping, several epochs, on PyTorch and on JAX."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import multiverso as mv

BACKENDS = ["torch", "jax"]
SECONDS = 280


def fit(freq: int, sync: bool) -> dict[str, Any]:
    """Fits a small network on this worker's part of real digits, in two calls; returns what there is to see."""
    import keras
    from sklearn.datasets import load_digits

    from multiverso.keras import MVCallback, ParamManager

    mv.init(sync=sync)
    tables = len(mv.stats()["tables"])
    x, y = (load_digits().data / 16).astype("float32"), load_digits().target
    keras.utils.set_random_seed(mv.worker_id())
    model = keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(16, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    for wrong in (0, -3):
        with pytest.raises(ValueError, match="freq"):
            MVCallback(model, freq=wrong)
    assert len(mv.stats()["tables"]) == tables, "a refused freq made a table"
    model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy", metrics=["accuracy"])
    callback = MVCallback(model, freq=freq)
    begun = [w.copy() for w in model.get_weights()]
    rows = mv.shard(1440)
    early = keras.callbacks.EarlyStopping(monitor="loss", patience=5, restore_best_weights=True)
    options: dict[str, Any] = {"batch_size": 32, "validation_data": (x[1440:], y[1440:]), "verbose": 0}
    model.fit(x[rows], y[rows], epochs=2, callbacks=[callback, early], **options)
    history = model.fit(x[rows], y[rows], epochs=10, initial_epoch=2, callbacks=[early, callback], **options)
    exchanges = max(table["exchanges"] for table in mv.stats()["tables"].values())
    mv.barrier()
    callback.kpm.sync_all_param()
    mv.barrier()
    callback.kpm.sync_all_param()
    accuracy = model.evaluate(x[1440:], y[1440:], verbose=0)[1]
    frozen = model.layers[0]
    frozen.trainable = False
    with pytest.raises(RuntimeError, match="make a new one"):
        callback.kpm.sync_all_param()
    frozen.trainable = True
    unbuilt = keras.Sequential([keras.layers.Dense(2)])
    with pytest.raises(ValueError, match="no weights yet"):
        ParamManager(unbuilt)
    return {
        "begun": begun,
        "ended": model.get_weights(),
        "epochs": history.epoch,
        "exchanges": exchanges,
        "accuracy": accuracy,
        "optimizer": int(model.optimizer.iterations.numpy()),
    }


@pytest.mark.parametrize(("backend", "freq", "sync"), [("torch", 4, True), ("jax", 1, False)])
def test_two_workers_fit_one_model(backend: str, freq: int, sync: bool) -> None:
    env = {"KERAS_BACKEND": backend}
    results = mv.run(fit, workers=2, args=(freq, sync), timeout_seconds=SECONDS, env=env)
    batches = -(-720 // 32)
    for result in results:
        for name in ("begun", "ended"):
            for mine, first in zip(result[name], results[0][name], strict=True):
                np.testing.assert_array_equal(mine, first)
        assert result["epochs"] == [2, 3, 4, 5, 6, 7, 8, 9]
        assert result["exchanges"] == 10 * -(-batches // freq), (
            "every freq minibatches, and at an epoch's end"
        )
        assert result["optimizer"] == 10 * batches
        assert all(np.isfinite(weight).all() for weight in result["ended"])
        assert result["accuracy"] > 0.8


def test_the_missing_framework_is_named() -> None:
    program = (
        "import importlib.metadata as m; real = m.version\n"
        "def version(name):\n"
        "    if name == 'keras': raise m.PackageNotFoundError(name)\n"
        "    return real(name)\n"
        "m.version = version; import multiverso.keras"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert 'pip install "multiverso[keras,torch]"' in result.stderr
    assert "ImportError" in result.stderr
