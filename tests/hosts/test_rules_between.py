"""Rules between hosts, beside the formulas of their papers."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from fabric_support import SECONDS, Adder, barrier, fabrics, interrupt, new_shard

from multiverso.deadline import Deadline
from multiverso.errors import DtypeMismatchError, StartupError
from multiverso.hosts.options import Every, RuleBetween
from multiverso.hosts.transport.credentials import new_credentials
from multiverso.hosts.values.shared_values import SharedValues
from multiverso.spec.table import TableSpec

SPEC = TableSpec("array", 1, 700_000, "float64")  # six chunks: each host is home of some
NEVER = Every(seconds=1e6)  # only when the test says so


def _expected(rule: str, initial: Any, rounds: list[list[Any]]) -> Any:
    """What synchronous outer steps over the hosts' mean make."""
    of = RuleBetween.of(rule, "float64")
    value, m = initial.copy(), np.zeros_like(initial)
    for pushed in rounds:
        g = sum(pushed) / len(pushed)
        m = of.momentum * m + g
        value += of.lr * (g + of.momentum * m)
    return value


@pytest.mark.parametrize("rule", ["mean", "local_sgd", "diloco", "diloco:0.5,0.8"])
@pytest.mark.parametrize("wire", ["native", "bfloat16"])
def test_one_push_of_each_host_is_a_synchronous_outer_step(rule: str, wire: str) -> None:
    random = np.random.default_rng(1)
    with fabrics(2, share=0) as made:
        shards = [new_shard(SPEC) for _ in made]
        for fabric, shard in zip(made, shards, strict=True):
            fabric.attach(1, shard, rule=rule, wire=wire, every=NEVER)
        adders = [Adder(shard) for shard in shards]
        initial = random.standard_normal(SPEC.elements)
        adders[1].add(initial)  # as one worker's initial value is written
        barrier(made)
        for shard in shards:
            assert np.array_equal(shard.values(), initial), "the initial value is no push"
        rounds = []
        for _ in range(3):
            pushed = [random.standard_normal(SPEC.elements) for _ in made]
            for adder, delta in zip(adders, pushed, strict=True):
                adder.add(delta)
            rounds.append(pushed)
            barrier(made)
            assert shards[0].values().tobytes() == shards[1].values().tobytes()
            np.testing.assert_allclose(shards[0].values(), _expected(rule, initial, rounds), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("rule", ["mean", "diloco"])
def test_a_push_for_which_memory_was_missing_moves_the_values_once(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that is missing ends the connection; on the next one the push comes again."""
    missing, times = threading.local(), iter(range(2))
    step = SharedValues.step

    def then_none(self: SharedValues, *arguments: Any) -> None:
        step(self, *arguments)
        missing.now = arguments[1] != made[0].host if self is held[0].outer else arguments[1] == 0

    with fabrics(2, share=0) as made:
        shards = [new_shard(SPEC) for _ in made]
        for fabric, shard in zip(made, shards, strict=True):
            fabric.attach(1, shard, rule=rule, every=NEVER)
            pool = fabric.links[1 - fabric.host]._pool

            def take(nbytes: int, of: Any = pool.take) -> Any:
                if getattr(missing, "now", False) and next(times, None) is not None:
                    missing.now = False
                    raise MemoryError
                return of(nbytes)

            monkeypatch.setattr(pool, "take", take)
        adders = [Adder(shard) for shard in shards]
        held = [fabric.tables.held[1] for fabric in made]
        barrier(made)
        monkeypatch.setattr(SharedValues, "step", then_none)
        rounds = [[np.full(SPEC.elements, 4.0), np.full(SPEC.elements, 8.0)]] * 3
        for pushed in rounds:
            for adder, delta in zip(adders, pushed, strict=True):
                adder.add(delta)
            barrier(made)
        assert made[0].statistics()[1]["connections"] > 1, "memory was never missing"
        for shard in shards:
            np.testing.assert_allclose(shard.values(), _expected(rule, np.zeros(SPEC.elements), rounds))


def test_hosts_average_beside_the_training_through_a_cut_and_the_loss_of_one() -> None:
    with fabrics(3, new_credentials(False), share=0) as made:
        shards = [new_shard(SPEC) for _ in made]
        for fabric, shard in zip(made, shards, strict=True):
            fabric.attach(1, shard, rule="mean", every=NEVER)  # or some of these adds may be a push of their own
        Adder(shards[0]).add(np.full(SPEC.elements, 8.0))
        barrier(made)
        for shard, delta in zip(shards, (3.0, 6.0, 9.0), strict=True):
            Adder(shard).add(np.full(SPEC.elements, delta))
        interrupt(made[1], 0)
        barrier(made)
        assert all(np.allclose(shard.values(), 14.0) for shard in shards)  # 8 and the mean of 3, 6, 9
        made[2].close()
        for fabric in made[:2]:
            fabric.regroup([0, 1])
        barrier(made[:2])
        for shard, delta in zip(shards, (2.0, 4.0), strict=False):
            Adder(shard).add(np.full(SPEC.elements, delta))
        barrier(made[:2])
        assert all(np.allclose(shard.values(), 17.0) for shard in shards[:2])


def test_local_sgd_moves_other_hosts_only_every_so_many_changes() -> None:
    spec = TableSpec("array", 1, 10)
    with fabrics(2, share=0) as made:
        shards = [new_shard(spec) for _ in made]
        for fabric, shard in zip(made, shards, strict=True):
            fabric.attach(1, shard, rule="local_sgd", every=Every(changes=4))
        barrier(made)
        adders = [Adder(shard) for shard in shards]
        for _ in range(4):
            for adder in adders:
                adder.add(np.ones(10))
        deadline = Deadline.after(SECONDS)
        while not all(np.allclose(shard.values(), 4) for shard in shards):  # the mean of 4 and 4
            assert not deadline.passed
            threading.Event().wait(0.005)


@pytest.mark.parametrize("text", ["", "sgd", "mean:1", "diloco:", "diloco:0,0.9", "diloco:0.7,1", "diloco:x,y"])
def test_other_rules_are_refused(text: str) -> None:
    with pytest.raises(StartupError, match="rule between hosts"):
        RuleBetween.of(text, "float32")


def test_whole_numbers_are_only_summed() -> None:
    with pytest.raises(DtypeMismatchError, match="int64"):
        RuleBetween.of("mean", "int64")
    assert RuleBetween.of("sum", "int64").name == "sum"
