"""``model.fit`` that was saved and resumed ends as one that went on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import multiverso as mv
from multiverso.testing.laws import in_each

EPOCHS, SAVED = 4, 2


def fit(folder: str, part: str) -> Any:
    import keras

    from multiverso.keras import MVCallback

    mv.init(sync=True)
    keras.utils.set_random_seed(mv.worker_id() if part != "resumed" else 9)
    model = keras.Sequential(
        [
            keras.Input((3,)),
            keras.layers.Dense(4),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(1),
        ]
    )
    model.compile(keras.optimizers.Adam(0.05), "mse")
    x = np.random.default_rng(mv.worker_id()).normal(size=(40, 3)).astype("float32")
    y = x.sum(1, keepdims=True)
    place = Path(folder, "whole" if part == "whole" else "parts")
    callback = MVCallback(model, freq=3, directory=place, rule=mv.rules.easgd(0.3))
    first = callback.resume()
    assert first == (SAVED if part == "resumed" else 0)
    epochs = SAVED if part == "begun" else EPOCHS
    model.fit(x, y, batch_size=8, epochs=epochs, initial_epoch=first, callbacks=[callback], verbose=0)
    return [variable.numpy() for variable in (*model.variables, *model.optimizer.variables)]


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_a_resumed_fit_ends_as_one_that_went_on(tmp_path: Path, backend: str) -> None:
    runs = [(2, str(tmp_path), part) for part in ("whole", "begun", "resumed")]
    ended = in_each(runs, fit, env={"KERAS_BACKEND": backend})
    whole, begun, resumed = (ended(*run) for run in runs)
    for me in range(2):
        for one, other in zip(whole[me], resumed[me], strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
        assert any((one != other).any() for one, other in zip(whole[me], begun[me], strict=True))
