"""Softmax regression in Keras 3, trained by any number of processes.

    KERAS_BACKEND=torch multiverso run -n 4 examples/keras/logistic_regression.py

It is a complete program for one process, and what made it one for many is marked: a line that ends with
"# multiverso" was added, and one below "# multiverso, was: ..." stood there as that. It trains on scikit-learn's
digits, or on CIFAR-10's own files with --data FOLDER.
"""

import argparse

import keras
from keras import layers
from load_data import load

import multiverso as mv  # multiverso
from multiverso.keras import MVCallback  # multiverso


def network(shape):
    """One linear layer with a softmax."""
    return keras.Sequential([keras.Input(shape), layers.Flatten(), layers.Dense(10, activation="softmax")])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", help="folder with CIFAR-10's files (default: bundled digits)")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--rate", type=float, default=0.02)
    options = parser.parse_args()

    mv.init()  # multiverso
    keras.utils.set_random_seed(0)
    x_train, y_train, x_test, y_test = load(options.data)
    x_train, x_test = x_train.transpose(0, 2, 3, 1), x_test.transpose(0, 2, 3, 1)
    model = network(x_train.shape[1:])
    optimizer = keras.optimizers.SGD(options.rate, momentum=0.9)
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    callbacks = []
    callbacks.append(MVCallback(model))  # multiverso
    # multiverso, was: rows = slice(None)
    rows = mv.shard(len(x_train))
    # multiverso, was: master = True
    master = mv.is_master_worker()
    model.fit(
        x_train[rows],
        y_train[rows],
        batch_size=options.batch_size,
        epochs=options.epochs,
        callbacks=callbacks,
        validation_data=(x_test, y_test) if master else None,
        verbose=2 if master else 0,
    )
    mv.barrier()  # multiverso
    callbacks[0].kpm.sync_all_param()  # multiverso
    if master:
        # multiverso, was: workers = 1
        workers = mv.workers_num()
        accuracy = model.evaluate(x_test, y_test, verbose=0)[1]
        print(f"workers={workers} accuracy={accuracy:.4f}", flush=True)
    mv.shutdown()  # multiverso


if __name__ == "__main__":
    main()
