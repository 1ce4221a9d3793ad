"""Operations over all workers within graphs (PyTensor, torch), and the rules of synchronous training."""

from __future__ import annotations

import textwrap
from typing import Any

import numpy as np
import pytest

from platoon import ops
from platoon.training import global_dynamics
from platoon.util import PlatoonError

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


def test_operations_in_graphs_of_pytensor(experiment: Any) -> None:
    experiment.write(graph_worker=PYTENSOR)
    result = experiment.launch("graph", "-D", *["cpu"] * 3, NUMBA_OPT="0")  # PyTensor's functions run once
    assert result.code == 0, result
    assert all("agrees" in text for text in result.outputs())


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
            # what it imports only because it is installed here
            sys.modules.update(sklearn=None, matplotlib=None, orbax=None, jax=None)
            import keras
            rules_hold(keras.Variable, lambda p: np.asarray(p.numpy()))
        else:
            rules_hold(np.array, lambda p: p)
    print("rules hold")
"""


def test_rules_of_synchronous_training(experiment: Any) -> None:
    experiment.write(rules_worker=DYNAMICS)
    result = experiment.launch("rules", "-D", *["cpu"] * 3, "-w=numpy,pytensor")
    assert result.code == 0, result
    assert result.outputs() == ["rules hold\n"] * 3


def test_rules_of_synchronous_training_and_operations_with_torch_and_keras(experiment: Any) -> None:
    """In one job: to import the two takes longer than all the rest."""
    experiment.write(rules_worker=textwrap.dedent(DYNAMICS) + textwrap.dedent(TORCH))
    result = experiment.launch("rules", "-D", "cpu", "cpu", "-w=torch,keras", KERAS_BACKEND="torch")
    assert result.code == 0, result
    assert result.outputs() == ["rules hold\ntorch agrees\n"] * 2


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
    called = []
    rule.register_fn(lambda: called.append(1))
    rule()
    assert called == [1]
