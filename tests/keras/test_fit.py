"""`model.fit` with sharing, saved and resumed, and the layer over a shared table, on PyTorch and on JAX."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import multiverso as mv
from documentation import run_page
from multiverso.testing.laws import Job, call, run_jobs, unless_raised

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
    callback.set_model(keras.Sequential([keras.Input((64,)), keras.layers.Dense(10)], name="other"))
    with pytest.raises(ValueError, match="'other' is fitted with it"):
        callback.on_train_begin()
    begun = [w.copy() for w in model.get_weights()]
    rows = mv.shard(1440)
    early = keras.callbacks.EarlyStopping(monitor="loss", patience=5, restore_best_weights=True)
    options: dict[str, Any] = {"batch_size": 32, "validation_data": (x[1440:], y[1440:]), "verbose": 0}
    model.fit(x[rows], y[rows], epochs=2, callbacks=[callback, early], **options)
    history = model.fit(x[rows], y[rows], epochs=10, initial_epoch=2, callbacks=[early, callback], **options)
    exchanges = max(table["exchanges"] for table in mv.stats()["tables"].values())
    callback.kpm.finish()
    accuracy = model.evaluate(x[1440:], y[1440:], verbose=0)[1]
    frozen = model.layers[0]
    frozen.trainable = False
    with pytest.raises(RuntimeError, match="make a new one"):
        callback.kpm.sync_all_param()
    frozen.trainable = True
    newer = ParamManager(model, every=4, fragments=2)
    with pytest.raises(RuntimeError, match="a newer manager"):
        callback.kpm.sync_all_param()
    assert [newer.step() for _ in range(4)] == [False, True] * 2
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


EPOCHS, SAVED = 4, 2


def save_and_resume(folder: str, part: str) -> Any:
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
    # nothing to train but rows: the product of two
    users, items = (mv.KeyedTable(4, initial="uniform", updater="sgd") for _ in range(2))
    asked = [keras.Input((1,), dtype="int32") for _ in range(2)]
    looked = [keras.layers.Flatten()(Embedding(table)(ids)) for table, ids in zip((users, items), asked, strict=True)]
    model = keras.Model(asked, keras.layers.Dot(-1)(looked))
    model.compile(keras.optimizers.SGD(0.1), "mse")
    pairs = [random.integers(0, 5, (256, 1)) for _ in range(2)]
    history = model.fit(pairs, (pairs[0] == pairs[1]).astype("f4"), epochs=10, batch_size=16, verbose=0)
    found["factors"] = (history.history["loss"], len(users), len(items))
    with pytest.raises(TypeError, match='dtype="int32"'):
        Embedding(users)(np.array([1.7], "f4"))
    keyed = Embedding(mv.KeyedTable(3, initial=1.0, updater="sgd"))
    assert np.array_equal(keras.ops.convert_to_numpy(keyed(np.array([[5, -1]], "int32"))), np.ones((1, 2, 3)))
    mv.shutdown()
    return found


def publish() -> dict[str, Any]:
    """Publishes a model and reads it into another one; returns what there is to see."""
    import keras

    def model() -> Any:
        layers = [
            keras.layers.Input((4,), name="in"),
            keras.layers.Dense(3, name="dense"),
            keras.layers.BatchNormalization(name="norm"),
            keras.layers.Dropout(0.5, seed=1, name="dropout"),
        ]
        return keras.Sequential(layers, name="classifier")

    name = f"of-test-{os.urandom(8).hex()}"
    trained, served, inputs = model(), model(), np.ones((2, 4), np.float32)
    before = [keras.ops.convert_to_numpy(each(inputs)) for each in (trained, served)]
    with mv.Publication(name, like=trained) as publication, mv.subscribe(name) as subscription:
        publication.publish(trained)
        with subscription.latest() as snapshot:
            names = set(snapshot)
        subscription.load_into(served)
    return {
        "names": names,
        "before": before,
        "after": [keras.ops.convert_to_numpy(m(inputs)) for m in (trained, served)],
    }


@pytest.fixture(scope="module", params=[("torch", 4, True), ("jax", 1, False)], ids=lambda run: run[0])
def ended(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    forked_from: Callable[[str], AbstractContextManager[None]],
) -> Any:
    """How often its workers exchange, and what a run returns, by its name; two processes do all of a backend."""
    backend, freq, sync = request.param
    folder = str(tmp_path_factory.mktemp(backend))
    jobs = {"fit": Job((0, 1), (fit, freq, sync)), "embedding": Job((0,), (learn,)), "published": Job((0,), (publish,))}
    jobs["page"] = Job((0, 1), (run_page, "keras", folder))
    for part in ("whole", "begun", "resumed", "alone", "joined"):
        jobs[part] = Job((0,) if part == "alone" else (0, 1), (save_and_resume, folder, part))
    # what is small is compiled, not optimised, in half of the time
    env = {"KERAS_BACKEND": backend, "XLA_FLAGS": "--xla_backend_optimization_level=0"}
    with forked_from(f"keras on {backend}"):
        results = run_jobs([*jobs.values()], call, env=env, preload=("keras",))
    return freq, lambda name: unless_raised(results[[*jobs].index(name)])


def test_what_the_page_shows_runs(ended: Any) -> None:
    ended[1]("page")


def test_two_workers_fit_one_model(ended: Any) -> None:
    freq, results = ended[0], ended[1]("fit")
    batches = -(-720 // 32)
    for result in results:
        for name in ("begun", "ended"):
            for mine, first in zip(result[name], results[0][name], strict=True):
                np.testing.assert_array_equal(mine, first)
        assert result["epochs"] == [2, 3, 4, 5, 6, 7, 8, 9]
        assert result["exchanges"] == 10 * -(-batches // freq), "every freq minibatches, and at an epoch's end"
        assert result["optimizer"] == 10 * batches
        assert all(np.isfinite(weight).all() for weight in result["ended"])
        assert result["accuracy"] > 0.8


def test_a_resumed_fit_ends_as_one_that_went_on(ended: Any) -> None:
    whole, begun, resumed, *_ = (ended[1](part) for part in ("whole", "begun", "resumed", "alone", "joined"))
    for me in range(2):
        for one, other in zip(whole[me], resumed[me], strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
        assert any((one != other).any() for one, other in zip(whole[me], begun[me], strict=True))


def test_an_embedding_over_a_table_trains_as_keras_s_own_layer_does(ended: Any) -> None:
    (found,) = ended[1]("embedding")
    for what in ("losses", "predicted", "rows"):
        np.testing.assert_allclose(*found[what], rtol=1e-4, atol=1e-5)
    assert found["losses"][0][-1] < found["losses"][0][0]
    losses, *rows = found["factors"]
    assert rows == [5, 5]
    assert losses[-1] < 0.8 * losses[0], "nothing but rows is trained, too"


def test_a_published_model_is_read_by_its_paths(ended: Any) -> None:
    (found,) = ended[1]("published")
    parts = (
        "dense/kernel",
        "dense/bias",
        *(f"norm/{part}" for part in ("gamma", "beta", "moving_mean", "moving_variance")),
    )
    assert found["names"] == {f"classifier/{part}" for part in parts}, "what dropout draws is each process's own"
    assert not np.allclose(*found["before"])
    np.testing.assert_array_equal(*found["after"])


def test_an_embedding_refuses_other_backends_in_words() -> None:
    program = (
        "import sys; sys.modules.update(dict.fromkeys(('sklearn', 'orbax', 'matplotlib', 'torch'))); "
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
