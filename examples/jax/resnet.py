"""ResNet-32 (arXiv 1512.03385, section 4.2) in JAX, trained by any number of processes.

    multiverso run -n 4 examples/jax/resnet.py

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


def network(shape, blocks, width):
    """Three stages of ``blocks`` blocks: 6 blocks + 2 layers, so 5 of width 16 make ResNet-32."""
    random = np.random.default_rng(0)

    def convolution(before, after):
        filters = random.normal(0, np.sqrt(2 / (9 * before)), (3, 3, before, after))
        normal = {"mean": jnp.zeros(after), "variance": jnp.ones(after)}
        return {"w": jnp.array(filters, jnp.float32), "scale": jnp.ones(after), "shift": jnp.zeros(after)}, normal

    layers = [convolution(shape[2], width)]
    before = width
    for after in (width, 2 * width, 4 * width):
        for _ in range(blocks):
            layers += [convolution(before, after), convolution(after, after)]
            before = after
    last = {"w": jnp.array(random.normal(0, np.sqrt(1 / before), (before, 10)), jnp.float32), "b": jnp.zeros(10)}
    return {"layers": [params for params, _ in layers], "last": last}, [normal for _, normal in layers]


def apply(params, statistics, x, training):
    """Returns scores, and the batch normalisations' statistics after this batch."""
    after = []

    def layer(x, stride=1):
        own, normal = params["layers"][len(after)], statistics[len(after)]
        x = jax.lax.conv_general_dilated(
            x, own["w"], (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        mean, variance = normal["mean"], normal["variance"]
        if training:
            mean, variance = x.mean((0, 1, 2)), x.var((0, 1, 2))
            after.append({key: 0.9 * normal[key] + 0.1 * new for key, new in (("mean", mean), ("variance", variance))})
        else:
            after.append(normal)
        return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * own["scale"] + own["shift"]

    x = jax.nn.relu(layer(x))
    while len(after) < len(statistics):
        grows = params["layers"][len(after)]["w"].shape[3] - x.shape[3]
        stride = 2 if grows else 1
        out = layer(jax.nn.relu(layer(x, stride)))
        x = jax.nn.relu(out + jnp.pad(x[:, ::stride, ::stride], ((0, 0), (0, 0), (0, 0), (0, grows))))
    return x.mean((1, 2)) @ params["last"]["w"] + params["last"]["b"], after


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
    x_train, y_train, x_test, y_test = load(options.data)
    x_train, x_test = x_train.transpose(0, 2, 3, 1), x_test.transpose(0, 2, 3, 1)
    params, statistics = network(x_train.shape[1:], options.blocks, options.width)
    manager = ParamManager(params, statistics=statistics)  # multiverso
    params, statistics = manager.params, manager.statistics  # multiverso
    optimizer = optax.sgd(options.rate, momentum=0.9)
    state = optimizer.init(params)

    def loss(params, statistics, x, y):
        scores, statistics = apply(params, statistics, x, True)
        return optax.softmax_cross_entropy_with_integer_labels(scores, y).mean(), statistics

    @jax.jit
    def step(params, statistics, state, x, y):
        gradients, statistics = jax.grad(loss, has_aux=True)(params, statistics, x, y)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), statistics, state

    for epoch in range(options.epochs):
        # multiverso, was: rows = np.random.default_rng([0, epoch]).permutation(len(x_train))
        rows = mv.shard(len(x_train), epoch)
        for start in range(0, len(rows) - options.batch_size + 1, options.batch_size):
            batch = rows[start : start + options.batch_size]
            params, statistics, state = step(params, statistics, state, x_train[batch], y_train[batch])
            params, statistics = manager.step(params, statistics)  # multiverso
        mv.barrier()  # multiverso
        params, statistics = manager.sync_all_param(params, statistics)  # multiverso
        # multiverso, was: if True:
        if mv.is_master_worker():
            accuracy = float((jnp.argmax(apply(params, statistics, x_test, False)[0], axis=1) == y_test).mean())
            print(f"epoch {epoch + 1}: validation accuracy {accuracy:.4f}", flush=True)
    # multiverso, was: if True:
    if mv.is_master_worker():
        # multiverso, was: workers = 1
        workers = mv.workers_num()
        print(f"workers={workers} accuracy={accuracy:.4f}", flush=True)
    mv.shutdown()  # multiverso


if __name__ == "__main__":
    main()
