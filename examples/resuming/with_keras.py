"""Keras 3, saved at the end of each epoch: started again, it goes on after the last one.

multiverso run -n 2 examples/resuming/with_keras.py --directory saved
"""

import argparse
import os

import keras
from sklearn.datasets import load_digits

import multiverso as mv
from multiverso.keras import MVCallback


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", required=True)
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()

    mv.init(sync=True)
    print(f"worker {mv.worker_id()} is process {os.getpid()}", flush=True)
    digits = load_digits()
    x, y = (digits.data / 16).astype("float32"), digits.target
    keras.utils.set_random_seed(mv.worker_id())
    model = keras.Sequential(
        [keras.Input((64,)), keras.layers.Dense(32, "relu"), keras.layers.Dropout(0.1), keras.layers.Dense(10)]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.005), loss, metrics=["accuracy"])
    callback = MVCallback(model, freq=5, directory=options.directory, rule=mv.rules.easgd(0.3))
    report = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: print(f"epoch {epoch + 1} begins", flush=True)
    )
    first = callback.resume()
    if first:
        print(f"worker {mv.worker_id()} goes on after epoch {first}", flush=True)
    rows = mv.shard(len(x))
    model.fit(
        x[rows],
        y[rows],
        batch_size=32,
        epochs=options.epochs,
        initial_epoch=first,
        callbacks=[callback, report],
        verbose=0,
    )
    if mv.is_master_worker():
        print(f"epochs={options.epochs} accuracy={model.evaluate(x, y, verbose=0)[1]:.4f}", flush=True)
    mv.shutdown()


if __name__ == "__main__":
    main()
