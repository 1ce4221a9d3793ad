"""The layer over a shared table against Keras's own, on PyTorch and on JAX; each backend is a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import multiverso as mv

SECONDS = 200


def learn() -> dict[str, Any]:
    """Fits the same model with both layers; returns losses, rows and predictions."""
    import keras

    from multiverso.keras import Embedding

    mv.init()
    rows, dim = 30, 4
    start = np.random.default_rng(0).normal(size=(rows, dim)).astype("f4")
    table = mv.MatrixTableHandler(rows, dim, start, updater="sgd")
    ours = Embedding(table, learning_rate=0.1)
    theirs = keras.layers.Embedding(rows, dim)
    random = np.random.default_rng(1)
    x, y = random.integers(0, rows, (64, 5)), random.normal(size=(64, 1)).astype("f4")
    found: dict[str, Any] = {"losses": []}
    for layer in (ours, theirs):
        keras.utils.set_random_seed(3)
        inputs = keras.Input((5,), dtype="int32")
        outputs = keras.layers.Dense(1)(keras.layers.Flatten()(layer(inputs)))
        model = keras.Model(inputs, outputs)
        if layer is theirs:
            theirs.set_weights([start])
        model.compile(keras.optimizers.SGD(0.1), "mse")
        history = model.fit(x, y, batch_size=16, epochs=4, shuffle=False, verbose=0)
        found["losses"].append(history.history["loss"])
        before = table.get()
        found.setdefault("predicted", []).append(model.predict(x, verbose=0))
        assert np.array_equal(table.get(), before), "a prediction trained"
    found["rows"] = [table.get(), theirs.get_weights()[0]]
    with pytest.raises(ValueError, match="uphill"):
        Embedding(mv.KeyedTable(2))
    with pytest.raises(ValueError, match="save_weights"):
        ours.get_config()
    keyed = Embedding(mv.KeyedTable(3, initial=1.0, updater="sgd"))
    assert np.array_equal(keras.ops.convert_to_numpy(keyed(np.array([[5, -1]], "int32"))), np.ones((1, 2, 3)))
    mv.shutdown()
    return found


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_it_trains_as_keras_s_own_layer_does(backend: str) -> None:
    found = mv.run(learn, 1, env={"KERAS_BACKEND": backend}, timeout_seconds=SECONDS)[0]
    for what in ("losses", "predicted", "rows"):
        np.testing.assert_allclose(*found[what], rtol=1e-4, atol=1e-5)
    assert found["losses"][0][-1] < found["losses"][0][0]


def test_other_backends_are_refused_in_words() -> None:
    program = (
        "import multiverso as mv; from multiverso.keras import Embedding; mv.init(); "
        "Embedding(mv.KeyedTable(2, updater='sgd'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "KERAS_BACKEND": "numpy"},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert "works on the backends torch and jax; this is numpy" in done.stderr
