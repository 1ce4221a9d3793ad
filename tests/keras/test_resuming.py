"""``model.fit`` that was saved and resumed ends as one that went on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import multiverso as mv
from multiverso.testing.laws import Job, Raised, run_jobs

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
    place = Path(folder, {"whole": "whole", "alone": "grown", "joined": "grown"}.get(part, "parts"))
    callback = MVCallback(model, freq=3, directory=place, rule=mv.rules.easgd(0.3))
    first = callback.resume()
    assert first == (SAVED if part in ("resumed", "joined") else 0)
    if part == "joined":
        assert callback.kpm.newcomer == (mv.worker_id() == 1)
        now = [weight.numpy() for weight in (*model.trainable_weights, *model.non_trainable_weights)]
        held = callback.kpm._shared.centre()
        same = all(any(np.array_equal(a, b) for b in now) for a in held)
        assert same == callback.kpm.newcomer, "the other one goes on with its own"
    epochs = SAVED if part in ("begun", "alone") else EPOCHS
    model.fit(x, y, batch_size=8, epochs=epochs, initial_epoch=first, callbacks=[callback], verbose=0)
    return [variable.numpy() for variable in (*model.variables, *model.optimizer.variables)]


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_a_resumed_fit_ends_as_one_that_went_on(tmp_path: Path, backend: str) -> None:
    runs = [(str(tmp_path), part) for part in ("whole", "begun", "resumed")]
    jobs = [Job((0, 1), args) for args in runs]
    jobs += [Job((0,), (str(tmp_path), "alone")), Job((0, 1), (str(tmp_path), "joined"))]
    ended = run_jobs(jobs, fit, env={"KERAS_BACKEND": backend})
    for worker in (result for results in ended for result in results):
        assert not isinstance(worker, Raised), worker.text
    whole, begun, resumed, _, _ = ended
    for me in range(2):
        for one, other in zip(whole[me], resumed[me], strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
        assert any((one != other).any() for one, other in zip(whole[me], begun[me], strict=True))
