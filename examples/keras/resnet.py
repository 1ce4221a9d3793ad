"""ResNet-32 (arXiv 1512.03385, section 4.2) in Keras 3, trained by any number of processes.

    KERAS_BACKEND=torch multiverso run -n 4 examples/keras/resnet.py

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


def block(x, width):
    """Two convolutions, and the shortcut around them: subsampled and padded with zeros where the size changes."""
    grows = width - x.shape[-1]
    out = layers.Conv2D(width, 3, 2 if grows else 1, "same", use_bias=False)(x)
    out = layers.ReLU()(layers.BatchNormalization()(out))
    out = layers.BatchNormalization()(layers.Conv2D(width, 3, padding="same", use_bias=False)(out))
    if grows:
        x = layers.AveragePooling2D(1, 2)(x)
        x = layers.Concatenate()([x, layers.Rescaling(0.0)(x)])
    return layers.ReLU()(layers.Add()([out, x]))


def network(shape, blocks, width):
    """Three stages of ``blocks`` blocks: 6 blocks + 2 layers, so 5 of width 16 make ResNet-32."""
    inputs = keras.Input(shape)
    x = layers.Conv2D(width, 3, padding="same", use_bias=False)(inputs)
    x = layers.ReLU()(layers.BatchNormalization()(x))
    for stage in range(3):
        for _ in range(blocks):
            x = block(x, width * 2**stage)
    return keras.Model(inputs, layers.Dense(10, activation="softmax")(layers.GlobalAveragePooling2D()(x)))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", help="folder with CIFAR-10's files (default: bundled digits)")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--rate", type=float, default=0.02)
    parser.add_argument("--blocks", type=int, default=1, help="blocks of a stage; 5 make ResNet-32")
    parser.add_argument("--width", type=int, default=8, help="channels of the first stage; 16 in ResNet-32")
    options = parser.parse_args()

    mv.init()  # multiverso
    keras.utils.set_random_seed(0)
    x_train, y_train, x_test, y_test = load(options.data)
    x_train, x_test = x_train.transpose(0, 2, 3, 1), x_test.transpose(0, 2, 3, 1)
    model = network(x_train.shape[1:], options.blocks, options.width)
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
