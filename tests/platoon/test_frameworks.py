"""With each framework: parameters that meet the shared ones, operations within graphs, rules of synchronous training.

All of a framework's workers are forked from one interpreter that has imported it.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from platoon import ops
from platoon.params import adapt
from platoon.training import global_dynamics
from platoon.util import PlatoonError
from warm import Warm

OURS = ("platoon.channel", "platoon.param_sync", "platoon.params", "platoon.ops", "platoon.training.global_dynamics")
UNUSED = ("sklearn", "matplotlib", "orbax")  # which Keras imports only because they are installed here


@pytest.fixture(scope="module")
def warm_torch() -> Iterator[Warm]:
    with Warm("torch", "keras", *OURS, env={"KERAS_BACKEND": "torch"}, without=(*UNUSED, "jax")) as made:
        yield made


@pytest.fixture(scope="module")
def warm_jax() -> Iterator[Warm]:
    env = {"KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu"}
    with Warm("jax", "jax.numpy", "keras", *OURS, env=env, without=(*UNUSED, "torch")) as made:
        yield made


@pytest.fixture(scope="module")
def warm_pytensor() -> Iterator[Warm]:
    env = {"NUMBA_OPT": "0"}  # its functions run once
    with Warm("pytensor", "pytensor.tensor", *OURS, env=env) as made:
        yield made


PYTENSOR = """
    import pickle, warnings
    import numpy as np
    import pytensor
    import pytensor.tensor as pt
    from platoon import Worker
    from platoon.ops import AllReduceMax, AllReduceMin, AllReduceProd, AllReduceSum

    pytensor.config.cxx = ""
    worker = Worker()
    rank, size = worker.global_rank, worker.global_size
    value = np.arange(6.0).reshape(2, 3) + rank + 1
    everyone = [np.arange(6.0).reshape(2, 3) + other + 1 for other in range(size)]
    x = pt.dmatrix("x")
    for mode in (None, "FAST_COMPILE"):
        outputs = [make(x) for make in (AllReduceSum, AllReduceProd, AllReduceMax, AllReduceMin)]
        function = pytensor.function([x], outputs, mode=mode)
        for result, loop in zip(function(value), (np.sum, np.prod, np.max, np.min)):
            np.testing.assert_array_equal(result, loop(everyone, axis=0))
        shape = pytensor.function([x], AllReduceSum(x).shape, mode=mode)
        assert shape(value).tolist() == [2, 3]

    # the gradient of the sum of all workers' costs
    w = pytensor.shared(np.full(3, 2.0))
    cost = (AllReduceSum(w * (rank + 1)) ** 2).sum()
    slope = pytensor.function([], pytensor.grad(cost, w), mode="FAST_COMPILE")()
    total = 2.0 * sum(range(1, size + 1))
    np.testing.assert_allclose(slope, np.full(3, 2 * total * size * (rank + 1)))

    # in place, and into another variable
    s = pytensor.shared(np.full(4, rank + 1.0))
    pytensor.function([], [], updates=[(s, AllReduceSum(s, inplace=True))], accept_inplace=True)()
    assert (s.get_value() == sum(range(1, size + 1))).all()
    d = pytensor.shared(np.zeros(4))
    pytensor.function([], [], updates=[(d, AllReduceMax(s * (rank + 1), dest=d))], accept_inplace=True)()
    assert (d.get_value() == s.get_value() * size).all()

    constant = pytensor.function([], AllReduceSum(pt.constant(np.ones(2))), mode="FAST_COMPILE")
    assert constant().tolist() == [size, size]
    again = pickle.loads(pickle.dumps(AllReduceSum(x)))
    result = again.eval({again.owner.inputs[0]: value}, mode="FAST_COMPILE")
    np.testing.assert_array_equal(result, np.sum(everyone, axis=0))
    try:
        AllReduceSum(x, dest=pt.fmatrix())
    except TypeError as error:
        print(error)
    print("pytensor agrees")
"""
TORCH = """
    import numpy as np
    import torch
    from platoon.ops import AllReduceMax, AllReduceProd, AllReduceSum

    w = torch.full((3,), 2.0, requires_grad=True)
    total = AllReduceSum(w * (rank + 1))
    (total ** 2).sum().backward()
    whole = 2.0 * sum(range(1, size + 1))
    assert w.grad.tolist() == [2 * whole * size * (rank + 1)] * 3
    x = torch.ones(3) * (rank + 1)
    assert AllReduceMax(x).tolist() == [size] * 3
    assert AllReduceProd(x, inplace=True) is x and x[0] == np.prod(range(1, size + 1))
    y = torch.zeros(3)
    assert AllReduceSum(x, dest=y) is y and y[0] == size * x[0]
    assert AllReduceSum(np.ones(2)).tolist() == [size] * 2
    assert AllReduceSum([1, 2]).tolist() == [size, 2 * size]
    print("torch agrees")
"""


def test_operations_in_graphs_of_pytensor(experiment: Any, warm_pytensor: Warm) -> None:
    experiment.warm = warm_pytensor
    said = experiment.write(graph_worker=PYTENSOR).train("graph", 2)
    assert all("agrees" in text for text in said)


# What the original's own test of its rules expects, for each kind of parameter.
DYNAMICS = """
    import sys
    import numpy as np
    from platoon import Worker
    from platoon.training import global_dynamics as gd

    worker = Worker()
    rank, size = worker.global_rank, worker.global_size
    first = (30 * np.random.default_rng(5).random((8, 10, 5))).astype(np.float32)
    second = (50 * np.random.default_rng(6).random((5, 20))).astype(np.float32)
    close = lambda read, parameter, value: np.testing.assert_allclose(read(parameter), value, rtol=1e-5)

    def rules_hold(make, read):
        one, two = make(first), make(second)
        rule = gd.SumSGD()
        rule.make_rule(one)
        rule()
        close(read, one, first * size)
        rule = gd.SGD(average=False, worker=worker)
        rule.make_rule([one, two])
        rule()
        close(read, one, first * size * size)
        close(read, two, second * size)
        rule = gd.AverageSGD()
        rule.make_rule([one, two])
        rule()
        rule()
        close(read, one, first * size * size)

        sign = -1 if rank % 2 else 1
        local, centre = make(np.array([3.0, 4.0], np.float32) * sign), make(np.zeros(2, np.float32))
        rule = gd.EASGD()
        rule.make_rule(local, centre, 0.5)
        rule()
        close(read, local, np.array([1.5, 2.0]) * sign)
        close(read, centre, np.array([1.5, 2.0]) * (size % 2))

        for average in (False, True):
            local = make(np.full(2, 7.0, np.float32))
            everyone = make(np.array([0, 1], np.float32))
            gathered = make((rank + 1) * np.ones(2, np.float32))
            rule = gd.Downpour(average=average)
            rule.make_rule(local, gathered, everyone)
            rule()
            step = sum(range(size + 1)) / (size if average else 1)
            close(read, gathered, [0, 0])
            close(read, everyone, [step, step + 1])
            close(read, local, [step, step + 1])

    for kind in sys.argv[1].split(","):
        if kind == "pytensor":
            import pytensor
            rules_hold(pytensor.shared, lambda p: p.get_value())
        elif kind == "torch":
            import torch
            rules_hold(lambda v: torch.nn.Parameter(torch.tensor(v)), lambda p: p.detach().numpy())
        elif kind == "keras":
            import keras
            rules_hold(keras.Variable, lambda p: np.asarray(p.numpy()))
        else:
            rules_hold(np.array, lambda p: p)
    print("rules hold")
"""


def test_rules_of_synchronous_training(experiment: Any, warm_pytensor: Warm) -> None:
    experiment.warm = warm_pytensor
    said = experiment.write(rules_worker=DYNAMICS).train("rules", 3, "numpy,pytensor")
    assert said == ["rules hold\n"] * 3


def test_rules_of_synchronous_training_and_operations_with_torch_and_keras(experiment: Any, warm_torch: Warm) -> None:
    experiment.warm = warm_torch
    experiment.write(rules_worker=textwrap.dedent(DYNAMICS) + textwrap.dedent(TORCH))
    assert experiment.train("rules", 2, "torch,keras") == ["rules hold\ntorch agrees\n"] * 2


def test_without_a_worker_and_without_a_rule() -> None:
    with pytest.raises(PlatoonError, match=r"Worker\(\)"):
        ops.AllReduceSum(np.ones(2))
    with pytest.raises(PlatoonError, match="no worker yet"):
        _ = global_dynamics.EASGD().worker
    with pytest.raises(TypeError, match="got int"):
        global_dynamics.SGD(worker=3)  # type: ignore[arg-type]
    rule = global_dynamics.GlobalDynamics()
    with pytest.raises(NotImplementedError, match="make_rule"):
        rule()
    with pytest.raises(NotImplementedError, match="override"):
        rule.make_rule(None)
    with pytest.raises(TypeError, match="function"):
        rule.register_fn(3)  # type: ignore[arg-type]
    with pytest.raises(AttributeError, match="make_rule"):
        global_dynamics.SGD().register_fn(print)
    with pytest.raises(PlatoonError, match="fractions, which int32"):
        global_dynamics.EASGD().make_rule(np.ones(2, np.int32), np.ones(2, np.int32), 0.5)
    one, two, three = (np.ones(n, np.float32) for n in (1, 2, 2))
    for other, why in ((one, r"0 has .* \(2,\) and \(1,\)"), ([two, three], "1 and 2 parameters")):  # one: broadcast
        with pytest.raises(PlatoonError, match=why):
            global_dynamics.EASGD().make_rule(two, other, 0.5)
        with pytest.raises(PlatoonError, match=why):
            global_dynamics.Downpour().make_rule(two, three, other)
    called = []
    rule.register_fn(lambda: called.append(1))
    rule()
    assert called == [1]


def test_torch_tensors_are_reduced(experiment: Any, warm_torch: Warm) -> None:
    experiment.write(
        torch_worker="""
        import os
        import torch
        from platoon import Worker
        worker = Worker()
        rank = worker.local_rank
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64):
            mine = torch.arange(6).reshape(2, 3).to(dtype) + rank
            wanted = (2 * torch.arange(6).reshape(2, 3) + 1).to(dtype)
            result = worker.all_reduce(mine)
            assert result.dtype == dtype and torch.equal(result, wanted)
            assert worker.all_reduce(mine.T, "max").equal(mine.T - rank + 1)
            assert worker.all_reduce(mine, "sum", mine) is None
            assert torch.equal(mine, wanted)
        parameter = torch.nn.Parameter(torch.ones(5) * rank)
        assert not worker.all_reduce(parameter, "average").requires_grad
        worker.all_reduce(parameter, "average", parameter)
        assert parameter.tolist() == [0.5] * 5
        """
    )
    experiment.warm = warm_torch
    experiment.train("torch", 2)


def test_torch_tensors_are_reduced_by_torch_distributed(experiment: Any, port: int, warm_torch: Warm) -> None:
    experiment.write(
        gloo_worker="""
        import os, sys
        import torch
        import torch.distributed
        from platoon import Worker
        from platoon.channel import collective
        worker = Worker()
        torch.distributed.init_process_group(
            "gloo", init_method=f"tcp://127.0.0.1:{sys.argv[1]}", rank=worker.global_rank,
            world_size=worker.global_size
        )
        collective._by_memory = None  # it must not go that way
        mine = torch.arange(3.0) + worker.local_rank
        assert worker.all_reduce(mine).tolist() == [1, 3, 5]
        assert worker.all_reduce(mine, "average").tolist() == [0.5, 1.5, 2.5]
        assert worker.all_reduce(mine.int(), "average").tolist() == [0, 1, 2]
        worker.all_reduce(mine, "product", mine)
        assert mine.tolist() == [0, 2, 6]
        torch.distributed.destroy_process_group()
        """
    )
    experiment.warm = warm_torch
    experiment.train("gloo", 2, str(port))


PARAMETERS = """
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
def test_parameters_meet_in_their_own_memory_where_that_is_possible(
    experiment: Any, kind: str, warm_torch: Warm, warm_pytensor: Warm, warm_jax: Warm
) -> None:
    # all begin before the test, which leaves nothing behind
    others = {"torch": warm_torch, "pytensor": warm_pytensor}
    experiment.warm = others.get(kind, warm_jax)
    experiment.write(params_worker=PARAMETERS.replace("    {make}\n", KINDS[kind]))
    assert experiment.train("params", 2) == ["met\n"] * 2


def test_what_is_no_parameter() -> None:
    for bad, message in (
        (["weights"], "str is not a parameter"),
        ([np.zeros(2, np.uint8)], "uint8 cannot be shared"),
        ([np.array(["a"])], "cannot be shared"),
        (np.broadcast_to(np.zeros(1), 3), "read-only"),
    ):
        with pytest.raises(PlatoonError, match=message):
            adapt(bad)
    assert len(adapt(np.zeros(3))) == 1  # not its elements
