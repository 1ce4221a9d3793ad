"""JAX, saved at the end of each epoch: started again, it goes on after the last one.

multiverso run -n 2 examples/resuming/with_jax.py --directory saved
"""

import argparse
import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import multiverso as mv
from multiverso.jax import ParamManager


def logits(params, x):
    """One hidden layer."""
    return jax.nn.relu(x @ params["in"]) @ params["out"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", required=True)
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()

    mv.init(sync=True)
    print(f"worker {mv.worker_id()} is process {os.getpid()}", flush=True)
    digits = load_digits()
    x, y = jnp.asarray(digits.data / 16), jnp.asarray(digits.target)
    draw = np.random.default_rng(0)
    begun = {"in": jnp.asarray(draw.normal(size=(64, 32)) / 8), "out": jnp.asarray(draw.normal(size=(32, 10)) / 6)}
    manager = ParamManager(begun, every=5, rule=mv.rules.easgd(0.3))
    optimizer = optax.adam(0.005)

    @jax.jit
    def train(params, moments, x, y):
        def loss(params):
            return optax.softmax_cross_entropy_with_integer_labels(logits(params, x), y).mean()

        updates, moments = optimizer.update(jax.grad(loss)(params), moments)
        return optax.apply_updates(params, updates), moments

    state = {"epoch": 0, "params": manager.params, "moments": optimizer.init(manager.params)}
    saved = manager.load(options.directory, like=state, missing_ok=True)
    if saved is not None:
        state = saved
        print(f"worker {mv.worker_id()} goes on after epoch {state['epoch']}", flush=True)

    for epoch in range(state["epoch"], options.epochs):
        print(f"epoch {epoch + 1} begins", flush=True)
        params, moments = state["params"], state["moments"]
        rows = mv.shard(len(x), epoch)
        for batch in np.array_split(rows, len(rows) // 32):
            params, moments = train(params, moments, x[batch], y[batch])
            params = manager.step(params)
        state = {"epoch": epoch + 1, "params": params, "moments": moments}
        manager.save(options.directory, state)

    if mv.is_master_worker():
        accuracy = (logits(state["params"], x).argmax(1) == y).mean()
        print(f"epochs={options.epochs} accuracy={accuracy:.4f}", flush=True)
    mv.shutdown()


if __name__ == "__main__":
    main()
