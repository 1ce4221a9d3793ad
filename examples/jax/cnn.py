"""A convolutional network in JAX, trained by any number of processes.

    multiverso run -n 4 examples/jax/cnn.py

It is a complete program for one process, and what made it one for many is marked: a line that ends with
"# multiverso" was added, and one below "# multiverso, was: ..." stood there as that. It trains on scikit-learn's
digits, or on CIFAR-10's own files with --data FOLDER.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from load_data import load

import multiverso as mv  # multiverso
from multiverso.jax import ParamManager  # multiverso


def network(shape):
    """Two convolutions of 3 x 3 with pooling, and one hidden layer."""
    side, channels = shape[0] // 4, shape[2]
    sizes = [(3, 3, channels, 16), (3, 3, 16, 32), (32 * side * side, 64), (64, 10)]
    random = np.random.default_rng(0)
    return [
        {"w": jnp.array(random.normal(0, np.sqrt(2 / np.prod(size[:-1])), size), jnp.float32), "b": jnp.zeros(size[-1])}
        for size in sizes
    ]


def apply(params, x):
    for layer in params[:2]:
        x = jax.lax.conv_general_dilated(x, layer["w"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        x = jax.nn.relu(x + layer["b"])
        x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    x = jax.nn.relu(x.reshape(len(x), -1) @ params[2]["w"] + params[2]["b"])
    return x @ params[3]["w"] + params[3]["b"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", help="folder with CIFAR-10's files (default: bundled digits)")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--rate", type=float, default=0.05)
    options = parser.parse_args()

    mv.init()  # multiverso
    x_train, y_train, x_test, y_test = load(options.data)
    x_train, x_test = x_train.transpose(0, 2, 3, 1), x_test.transpose(0, 2, 3, 1)
    params = network(x_train.shape[1:])
    manager = ParamManager(params)  # multiverso
    params = manager.params  # multiverso
    # multiverso, was: optimizer = optax.sgd(options.rate, momentum=0.9)
    optimizer = optax.chain(optax.sgd(options.rate, momentum=0.9), manager.transformation())
    state = optimizer.init(params)

    def loss(params, x, y):
        return optax.softmax_cross_entropy_with_integer_labels(apply(params, x), y).mean()

    @jax.jit
    def step(params, state, x, y):
        updates, state = optimizer.update(jax.grad(loss)(params, x, y), state, params)
        return optax.apply_updates(params, updates), state

    for epoch in range(options.epochs):
        # multiverso, was: rows = np.random.default_rng([0, epoch]).permutation(len(x_train))
        rows = mv.shard(len(x_train), epoch)
        for start in range(0, len(rows) - options.batch_size + 1, options.batch_size):
            batch = rows[start : start + options.batch_size]
            params, state = step(params, state, x_train[batch], y_train[batch])
        mv.barrier()  # multiverso
        params = manager.sync_all_param(jax.block_until_ready(params))  # multiverso
        # multiverso, was: if True:
        if mv.is_master_worker():
            accuracy = float((jnp.argmax(apply(params, x_test), axis=1) == y_test).mean())
            print(f"epoch {epoch + 1}: validation accuracy {accuracy:.4f}", flush=True)
    # multiverso, was: if True:
    if mv.is_master_worker():
        # multiverso, was: workers = 1
        workers = mv.workers_num()
        print(f"workers={workers} accuracy={accuracy:.4f}", flush=True)
    mv.shutdown()  # multiverso


if __name__ == "__main__":
    main()
