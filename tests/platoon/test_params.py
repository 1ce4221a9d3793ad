"""Parameters of each framework meet the shared ones: in their own memory where that is possible."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from platoon.params import adapt
from platoon.util import PlatoonError

WORKER = """
    import sys
    import numpy as np
    from platoon import Worker
    from platoon.param_sync import ASGD, EASGD

    worker = Worker()
    rank = worker.local_rank

    {make}

    start = [np.array(value) for value in read()]
    for rule in (EASGD(0.5), ASGD()):
        worker.init_shared_params(model, rule)
        assert [shared.shape for shared in worker.shared_params] == [value.shape for value in start]
        worker.all_reduce(np.zeros(1))
        if rank == 0:
            worker.lock()
            for shared in worker.shared_params:
                shared[...] = 8
            worker.unlock()
        worker.all_reduce(np.zeros(1))
        worker.copy_to_local()
        assert all((value == 8).all() for value in read())
        worker.all_reduce(np.zeros(1))
        for turn in range(2):
            if turn == rank:
                add(4)
                worker.sync_params()
                # EASGD: 8 + 4 meets 8 at 10; then 12 meets 10 at 11. ASGD: all of each 4 is added.
                expected = {"EASGD": [10, 11], "ASGD": [12, 16]}[type(rule).__name__][rank]
                assert all((value == expected).all() for value in read()), (read(), expected)
            worker.all_reduce(np.zeros(1))
        worker.copy_to_global()
        worker.all_reduce(np.zeros(1))
    print("met")
"""
KINDS = {
    "torch": """
    import torch
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
    model[1].half()
    pointers = [p.data_ptr() for p in model.parameters()]

    def read():
        assert [p.data_ptr() for p in model.parameters()] == pointers
        return [p.detach().float().numpy() for p in model.parameters()]

    def add(x):
        with torch.no_grad():
            for p in model.parameters():
                p += x
    """,
    "pytensor": """
    import pytensor
    model = [pytensor.shared(value) for value in (np.ones((2, 3), np.float32), np.float64(1.0), np.ones(4))]
    read = lambda: [np.asarray(p.get_value()) for p in model]

    def add(x):
        for p in model:
            p.set_value(p.get_value() + np.asarray(x, p.dtype))
    """,
    "keras": """
    import keras
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(2), keras.layers.Dense(1)])
    read = lambda: [np.asarray(v.numpy()) for v in model.weights]

    def add(x):
        for v in model.weights:
            v.assign(v + x)
    """,
    "boxes": """
    import jax, jax.numpy as jnp

    class Box:  # how arrays that cannot change take part
        def __init__(self, value):
            self.value = value
        def get_value(self, borrow=False):
            return self.value
        def set_value(self, value, borrow=False):
            self.value = jnp.array(value)

    model = [Box(jnp.ones((3, 2))), Box(jnp.zeros(2))]
    read = lambda: [np.asarray(box.value) for box in model]

    def add(x):
        for box in model:
            box.value = box.value + x
    """,
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_framework(experiment: Any, kind: str) -> None:
    experiment.write(params_worker=WORKER.replace("    {make}\n", KINDS[kind]))
    result = experiment.launch("params", "-D", "cpu", "cpu", KERAS_BACKEND="jax", JAX_PLATFORMS="cpu")
    assert result.code == 0, result
    assert result.outputs() == ["met\n"] * 2


def test_what_is_no_parameter() -> None:
    for bad, message in (
        (["weights"], "str is no parameter"),
        ([np.zeros(2, np.uint8)], "uint8 cannot be shared"),
        ([np.array(["a"])], "cannot be shared"),
        (np.broadcast_to(np.zeros(1), 3), "read-only"),
    ):
        with pytest.raises(PlatoonError, match=message):
            adapt(bad)
    assert len(adapt(np.zeros(3))) == 1  # not its elements
