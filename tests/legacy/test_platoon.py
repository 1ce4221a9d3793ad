"""Platoon over the real Theano: shared variables meet, reductions within graphs, rules of synchronous training."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "platoon"))

from platoon_support import SECONDS, SHARED_VARIABLES, Experiment

from frameworks import PROGRAMS
from warm import Warm

pytestmark = pytest.mark.timeout(2 * SECONDS)
FLAGS = "floatX=float32,cxx=,mode=FAST_COMPILE"

TRAINING = """
    import sys
    import numpy as np
    import theano
    import theano.tensor as T
    from platoon.channel import Worker
    from platoon.param_sync import ASGD, EASGD, ParamSyncRule
    from platoon.ops import AllReduceMax, AllReduceSum

    assert theano.config.device == "cpu"
    worker = Worker(control_port=5567)
    rank, size = worker.global_rank, worker.global_size

    class Older(EASGD):
        # a rule written for Theano, as programs for the original have it
        def theano_update(self, local_params):
            inputs = [local.type() for local in local_params]
            moves = [self.alpha * (local - master) for local, master in zip(local_params, inputs)]
            return theano.function(
                inputs,
                [master + move for master, move in zip(inputs, moves)],
                updates=[(local, local - move) for local, move in zip(local_params, moves)],
            )

    # Every worker fits y = 3 x + 1 on data of its own, and they meet every 5 steps. Steps so small that three sums
    # of five converge however late they come; as many for each worker, so that one that comes late, with the first
    # values, has learned when it ends.
    rng = np.random.RandomState(rank)
    w, b = theano.shared(np.float32(rank)), theano.shared(np.zeros(1, "float32"))
    x, y = T.fvector(), T.fvector()
    cost = T.sqr(w * x + b[0] - y).mean()
    slopes = T.grad(cost, [w, b])
    train = theano.function([x, y], cost, updates=[(p, p - 0.03 * s) for p, s in zip((w, b), slopes)])
    for rule in (EASGD(0.4), Older(0.4), ASGD()):
        worker.init_shared_params([w, b], rule)
        worker.copy_to_local()
        while worker.send_req("next") == "train":
            for _ in range(5):
                inputs = rng.uniform(-1, 1, 32).astype("float32")
                train(inputs, 3 * inputs + 1)
            worker.sync_params(synchronous=True)
            worker.send_req("done", {"train_len": 5})
        worker.all_reduce(np.zeros(1))
        worker.copy_to_local()
        np.testing.assert_allclose(w.get_value(), 3, atol=0.05)
        np.testing.assert_allclose(b.get_value(), [1], atol=0.05)
        worker.all_reduce(np.zeros(1))
        worker.send_req("again")
        worker.all_reduce(np.zeros(1))

    v = T.dmatrix()
    value = np.arange(6.0).reshape(2, 3) + rank
    f = theano.function([v], [AllReduceSum(v), AllReduceMax(v), AllReduceSum(v).shape])
    total, largest, shape = f(value)
    np.testing.assert_array_equal(total, size * np.arange(6.0).reshape(2, 3) + sum(range(size)))
    np.testing.assert_array_equal(largest, np.arange(6.0).reshape(2, 3) + size - 1)
    assert tuple(shape) == (2, 3)
    slope = theano.function([v], T.grad((AllReduceSum(v) ** 2).sum(), v))(value)
    np.testing.assert_allclose(slope, 2 * size * total)
    s = theano.shared(np.full(4, rank + 1.0))
    theano.function([], [], updates=[(s, AllReduceSum(s, inplace=True))], accept_inplace=True)()
    assert (s.get_value() == sum(range(1, size + 1))).all()
    print("theano agrees")
"""
CONTROLLER = """
    import sys
    from platoon.channel import Controller

    from collections import Counter

    class Rounds(Controller):
        done = Counter()

        def handle_control(self, req, worker_id, req_info):
            if req == "next":
                return "train" if self.done[worker_id] < 1000 else "stop"
            if req == "done":
                self.done[worker_id] += req_info["train_len"]
            if req == "again":
                del self.done[worker_id]

    sys.exit(Rounds(**Controller.default_arguments(Controller.default_parser().parse_args())).serve())
"""


@pytest.fixture(scope="module")
def warm_theano() -> Iterator[Warm]:
    modules = ("theano.tensor", "platoon.launcher", "platoon.ops", "platoon.training.global_dynamics", *PROGRAMS)
    # importing mpi4py, as Theano does where it is installed, starts MPI: nothing to fork with
    with Warm(*modules, env={"THEANO_FLAGS": FLAGS}, without=("mpi4py",), forks=True) as made:
        yield made


@pytest.fixture
def experiment(tmp_path: Path, warm: Warm) -> Iterator[Experiment]:
    made = Experiment(tmp_path, warm)
    yield made
    made.end()


def test_training_and_reductions(experiment: Experiment, warm_theano: Warm) -> None:
    experiment.warm = warm_theano
    experiment.write(fit_worker=TRAINING, fit_controller=CONTROLLER)
    result = experiment.launch("fit", "-D", "cpu", "cpu", "cpu", THEANO_FLAGS=FLAGS)
    assert result.code == 0, result
    assert result.outputs() == ["theano agrees\n"] * 3


def test_shared_variables_themselves(experiment: Experiment, warm_theano: Warm) -> None:
    """The expectations of the original's own test of the worker."""
    experiment.warm = warm_theano
    experiment.write(variables_worker="\n    import theano\n    makers = [theano.shared]" + SHARED_VARIABLES)
    assert experiment.train("variables", 2) == ["all there\n"] * 2


def test_rules_of_synchronous_training(experiment: Experiment, warm_theano: Warm) -> None:
    """The expectations of the original's own test, on real shared variables."""
    experiment.warm = warm_theano
    experiment.write(
        rules_worker="""
        import numpy as np
        import theano
        from platoon import Worker
        from platoon.training import global_dynamics as gd

        worker = Worker()
        rank, size = worker.global_rank, worker.global_size
        first = (30 * np.random.RandomState(5).rand(8, 10, 5)).astype("float32")
        one, two = theano.shared(first), theano.shared(first[0].copy())
        close = lambda shared, value: np.testing.assert_allclose(shared.get_value(), value, rtol=1e-5)
        rule = gd.SumSGD()
        rule.make_rule([one, two])
        rule()
        close(one, first * size)
        rule = gd.AverageSGD()
        rule.make_rule(one)
        rule()
        close(one, first * size)
        sign = -1 if rank % 2 else 1
        local, centre = theano.shared(np.array([3.0, 4.0]) * sign), theano.shared(np.zeros(2))
        rule = gd.EASGD()
        rule.make_rule(local, centre, theano.shared(0.5))
        rule()
        close(local, np.array([1.5, 2.0]) * sign)
        close(centre, np.array([1.5, 2.0]) * (size % 2))
        local, everyone = theano.shared(np.full(2, 7.0)), theano.shared(np.array([0.0, 1.0]))
        gathered = theano.shared((rank + 1) * np.ones(2))
        rule = gd.Downpour()
        rule.make_rule(local, gathered, everyone)
        rule()
        close(gathered, [0, 0])
        close(local, [sum(range(size + 1)), sum(range(size + 1)) + 1])
        close(everyone, local.get_value())
        print("rules hold")
        """
    )
    assert experiment.train("rules", 2) == ["rules hold\n"] * 2
