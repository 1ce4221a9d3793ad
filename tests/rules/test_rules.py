"""Every rule against its formula in plain NumPy, and the laws that it promises."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import multiverso as mv
from multiverso.errors import DtypeMismatchError, MultiversoError, ShapeMismatchError, TableMismatchError
from multiverso.runtime import Node, Session
from multiverso.spec.table import TableSpec
from multiverso.updaters import Updater

from .conftest import together

pytestmark = pytest.mark.timeout(300)  # the first use of a dtype compiles its kernels
SIZES = (1, 7, 4096, 40_000, 300_000)  # one element, one part, several parts, stripes and chunks of a round
MODES: dict[str, dict[str, Any]] = {"async": {}, "bounded": {"staleness": 2}, "sync": {"sync": True}}
Array = np.ndarray[Any, Any]


def changes(worker: int, step: int, size: int, dtype: str = "float32") -> Array:
    return np.random.default_rng([worker, step]).normal(size=size).astype(dtype)


def train(
    rule: mv.rules.Rule, size: int, steps: int, dtype: str = "float32"
) -> Callable[[Session], tuple[list[Array], list[Array]]]:
    """Returns work for a session: after each exchange, its parameters and the centre."""

    def work(session: Session) -> tuple[list[Array], list[Array]]:
        local = changes(99, session.worker_id, size, dtype)  # another value in each worker
        shared = mv.rules.share(local, rule, session=session)
        locals_, centres = [local.copy()], [shared.table.snapshot()]
        for step in range(steps):
            local += changes(session.worker_id, step, size, dtype)
            shared.exchange(local)
            locals_.append(local.copy())
            centres.append(shared.table.snapshot())
        return locals_, centres

    return work


# -- the formulas, for workers in step: lists of parameters and a centre in, the same out --------------------


def asgd_round(x: list[Array], c: Array, memory: dict[str, Any]) -> tuple[list[Array], Array]:
    last = memory.setdefault("last", c.copy())
    for mine in x:
        c = c + (mine - last)
    memory["last"] = c
    return [c.copy() for _ in x], c


def easgd_round(x: list[Array], c: Array, memory: dict[str, Any]) -> tuple[list[Array], Array]:
    differences = [c.dtype.type(0.25) * (mine - c) for mine in x]
    for difference in differences:
        c = c + difference
    return [mine - difference for mine, difference in zip(x, differences, strict=True)], c


def averaging_round(x: list[Array], c: Array, memory: dict[str, Any]) -> tuple[list[Array], Array]:
    total = x[0] - c
    for mine in x[1:]:
        total = total + (mine - c)
    c = c + total / c.dtype.type(len(x))
    return [c.copy() for _ in x], c


def local_sgd_round(x: list[Array], c: Array, memory: dict[str, Any]) -> tuple[list[Array], Array]:
    rate, momentum = c.dtype.type(0.7), c.dtype.type(0.9)
    total = x[0] - c
    for mine in x[1:]:
        total = total + (mine - c)
    mean = total / c.dtype.type(len(x))
    memory["v"] = momentum * memory.get("v", np.zeros_like(c)) + mean
    c = c + rate * (mean + momentum * memory["v"])
    return [c.copy() for _ in x], c


FORMULAS = {
    "asgd": (mv.rules.asgd(), asgd_round),
    "downpour of 1": (mv.rules.downpour(), asgd_round),
    "dcasgd": (mv.rules.dcasgd(0.1), asgd_round),  # in rounds, and alone, nobody has moved the centre meanwhile
    "adaptive dcasgd": (mv.rules.dcasgd_adaptive(0.1), asgd_round),
    "easgd": (mv.rules.easgd(0.25), easgd_round),
    "model averaging": (mv.rules.model_averaging(), averaging_round),
    "local sgd": (mv.rules.local_sgd(0.7, 0.9), local_sgd_round),
}


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("size", SIZES)
def test_rounds_of_three_workers_are_the_formula_bit_for_bit(name: str, size: int) -> None:
    rule, formula = FORMULAS[name]
    steps, workers = 3, 3
    results = together(workers, train(rule, size, steps), sync=True)
    x = [result[0][0] for result in results]
    c, memory = results[0][1][0], dict[str, Any]()
    assert all(np.array_equal(mine, c) for mine in x), "all begin with the master's value"
    for step in range(steps):
        x, c = formula([x[w] + changes(w, step, size) for w in range(workers)], c, memory)
        for worker in range(workers):
            np.testing.assert_array_equal(results[worker][0][step + 1], x[worker])
            np.testing.assert_array_equal(results[worker][1][step + 1], c)


@pytest.mark.parametrize("adaptive", [False, True])
def test_delayed_changes_are_compensated_by_how_far_the_centre_has_moved(adaptive: bool) -> None:
    """Two workers take turns, so that each push meets a centre that the other has moved since the read."""
    rate, strength, decay, steps, size = 0.1, 0.5, 0.9, 4, 7
    make = mv.rules.dcasgd_adaptive if adaptive else mv.rules.dcasgd
    rule = make(rate, strength, decay) if adaptive else make(rate, strength)

    def work(session: Session) -> list[Array]:
        local = np.zeros(size)
        shared = mv.rules.share(local, rule, session=session)
        seen = []
        for step in range(steps):
            local += changes(session.worker_id, step, size, "float64")
            for turn in range(2):
                if session.worker_id == turn:
                    shared.exchange(local)
                session.barrier()
                seen.append(shared.table.snapshot())
                session.barrier()
        return seen

    first, second = together(2, work)
    centre, read, squares = np.zeros(size), np.zeros((2, size)), np.zeros((2, size))
    for number in range(2 * steps):
        step, worker = divmod(number, 2)
        change = changes(worker, step, size, "float64")
        gradient = -change / rate
        squares[worker] = decay * squares[worker] + (1 - decay) * gradient**2
        weight = strength / np.sqrt(squares[worker] + 1e-7) if adaptive else strength
        moved = centre - read[worker]
        assert number == 0 or np.abs(moved).max() > 0
        centre = centre - rate * (gradient + weight * gradient**2 * moved)
        read[worker] = centre
        np.testing.assert_allclose(first[number], centre, rtol=1e-12)
        np.testing.assert_array_equal(first[number], second[number])


@pytest.mark.parametrize("mode", ["async", "bounded"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", ["asgd", "downpour of 1", "easgd"])
def test_one_worker_alone_is_the_formula_bit_for_bit(name: str, dtype: str, mode: str) -> None:
    rule, formula = FORMULAS[name]
    size = 40_000
    ((locals_, centres),) = together(1, train(rule, size, 3, dtype), **MODES[mode])
    x, c, memory = [locals_[0]], centres[0], dict[str, Any]()
    for step in range(3):
        x, c = formula([x[0] + changes(0, step, size, dtype)], c, memory)
        np.testing.assert_array_equal(locals_[step + 1], x[0])
        np.testing.assert_array_equal(centres[step + 1], c)


# -- laws ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_elastic_exchanges_move_things_but_lose_none(mode: str) -> None:
    """Centre plus workers is what was there at first plus all that was added, to rounding."""
    workers, size, steps = 4, 40_000, 5

    def work(session: Session) -> tuple[Array, Array]:
        local = np.zeros(size)
        shared = mv.rules.share(local, mv.rules.easgd(0.2), session=session)
        for step in range(steps):
            local += changes(session.worker_id, step, size, "float64")
            shared.exchange(local)
        session.barrier()
        return local, shared.table.snapshot()

    results = together(workers, work, **MODES[mode])
    everything = sum(result[0] for result in results) + results[0][1]
    added = sum(changes(worker, step, size, "float64") for worker in range(workers) for step in range(steps))
    np.testing.assert_allclose(everything, added, atol=1e-12)


@settings(max_examples=25)
@given(
    centre=st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=50),
    alpha=st.floats(0.001, 1.0),
    seed=st.integers(0, 2**32 - 1),
)
def test_one_elastic_exchange_keeps_the_sum_of_both(centre: list[float], alpha: float, seed: int) -> None:
    with _SESSION() as session:
        values = np.array(centre, "float32")
        shared = mv.rules.share(values, mv.rules.easgd(alpha), session=session)
        local = (values * np.random.default_rng(seed).normal(size=values.size)).astype("float32")
        before = local.astype("float64") + values
        shared.exchange(local)
        size = np.abs(local) + np.abs(values) + np.abs(before)
        np.testing.assert_array_less(np.abs(local.astype("float64") + shared.table.get() - before), 4e-7 * size + 1e-37)


class _SESSION:
    """A job of one worker in this process."""

    def __enter__(self) -> Session:
        self._node = Node(workers=1)
        self._session = Session(self._node.address)
        return self._session

    def __exit__(self, *error: object) -> None:
        self._session.shutdown()
        self._node.close()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("push, fetch", [(1, 1), (1, 3), (3, 1), (2, 3), (3, 2)])
def test_downpour_and_asgd_lose_no_change(mode: str, push: int, fetch: int) -> None:
    workers, size, steps = 3, 40_000, 12

    def work(session: Session) -> tuple[Array, Array]:
        local = np.zeros(size, "float32")
        shared = mv.rules.share(local, mv.rules.downpour(push=push, fetch=fetch), session=session)
        simple = np.zeros(size, "float32")
        asgd = mv.rules.share(simple, session=session)
        for step in range(steps):
            local += session.worker_id + step + 1  # whole numbers: exact
            simple += session.worker_id + step + 1
            shared.exchange(local)
            asgd.exchange(simple)
        session.barrier()
        return shared.table.snapshot(), asgd.table.snapshot()

    expected = sum(worker + step + 1 for worker in range(workers) for step in range(steps))
    for centres in together(workers, work, **MODES[mode]):
        for centre in centres:
            np.testing.assert_array_equal(centre, np.float32(expected))


@pytest.mark.parametrize("rule", ["asgd", "easgd"])
def test_a_worker_moves_a_table_by_one_rule_at_a_time(rule: Any) -> None:
    """Two had one state between them: changes were lost."""
    with Node(1) as node, Session(node.address) as session:
        first = mv.rules.share(np.zeros(2, "float32"), rule, name="m", session=session)
        second = mv.rules.share(local := np.zeros(2, "float32"), rule, name="m", session=session)
        with pytest.raises(MultiversoError, match="is shared anew in this worker since"):
            first.exchange(np.ones(2, "float32"))
        local += 1
        second.exchange(local)


def test_downpour_keeps_its_intervals() -> None:
    with _SESSION() as session:
        local = np.zeros(2, "float32")
        shared = mv.rules.share(local, mv.rules.downpour(push=2, fetch=3), session=session)
        seen = []
        for _ in range(6):
            local += 1
            shared.exchange(local)
            seen.append((local[0], shared.table.snapshot()[0]))
        # call 3 fetches 2 (one change is not pushed yet, and not lost: call 4 pushes it with its own)
        assert seen == [(1, 0), (2, 2), (2, 2), (3, 4), (4, 4), (6, 6)]


def test_a_mean_is_over_those_who_are_there() -> None:
    """After worker 2 has left, the mean of the others is a mean of two."""
    size = 300_000

    def work(session: Session) -> list[float]:
        local = np.zeros(size, "float32")
        shared = mv.rules.share(local, mv.rules.model_averaging(), session=session)
        means = []
        for step in range(2 if session.worker_id == 2 else 4):
            local[:] = (session.worker_id + 1) * 2 * (step + 1)
            shared.exchange(local)
            assert np.all(local == local[0])
            means.append(float(local[0]))
        return means

    first, second, gone = together(3, work, sync=True)
    assert gone == [4, 8]
    assert first == second == [4, 8, 9, 12]


def test_rounds_in_which_nobody_pushes_change_nothing() -> None:
    def work(session: Session) -> Array:
        local = np.arange(10, dtype="float32")
        shared = mv.rules.share(local, mv.rules.downpour(push=5, fetch=1), session=session)
        for _ in range(3):
            shared.exchange(local)
        return local

    for local in together(2, work, sync=True):
        np.testing.assert_array_equal(local, np.arange(10))


# -- around the rules ----------------------------------------------------------------------------------------


def clipped_push(centre, local, state, stride, hyper, delta, count):  # type: ignore[no-untyped-def]
    for i in range(count):
        delta[i] = min(max(local[i] - state[i], -hyper[0]), hyper[0])


def clipped_pull(centre, local, state, stride, hyper, count):  # type: ignore[no-untyped-def]
    for i in range(count):
        local[i] = state[i] = centre[i]


@pytest.mark.parametrize("mode", MODES)
def test_a_rule_of_ones_own(mode: str) -> None:
    rule = mv.rules.Rule("clipped", clipped_push, clipped_pull, per_worker=("centre",), hyper=(1.0,))

    def work(session: Session) -> Array:
        local = np.zeros(5, "float32")
        shared = mv.rules.share(local, rule, session=session)
        local += [0.5, 1, 2, -3, 0]
        shared.exchange(local)
        session.barrier()
        return shared.table.snapshot()

    for centre in together(2, work, **MODES[mode]):
        np.testing.assert_array_equal(centre, [1, 2, 2, -2, 0])


PROMPT = """
def push(centre, local, state, stride, hyper, delta, count):
    for i in range(count):
        delta[i] = 1
"""


def test_a_rule_typed_into_a_prompt_is_compiled_too() -> None:
    namespace: dict[str, Any] = {}
    exec(
        "def push(centre, local, state, stride, hyper, delta, count):\n  for i in range(count):\n    delta[i] = 1",
        namespace,
    )
    with _SESSION() as session:
        local = np.zeros(3, "float32")
        shared = mv.rules.share(local, mv.rules.Rule("one", namespace["push"]), session=session)
        shared.exchange(local)
        np.testing.assert_array_equal(shared.table.get(), [1, 1, 1])
        np.testing.assert_array_equal(local, [0, 0, 0])


@pytest.mark.parametrize("mode", ["async", "bounded"])
@pytest.mark.parametrize("rule", [mv.rules.model_averaging(), mv.rules.diloco()], ids=str)
def test_a_rule_is_refused_where_it_is_not_defined(rule: mv.rules.Rule, mode: str) -> None:
    def work(session: Session) -> dict[Any, Any]:
        with pytest.raises(ValueError, match=rf"{rule.name} is not defined for {mode} mode; use init\(sync=True\)"):
            mv.rules.share(np.zeros(3, "float32"), rule, session=session)
        return session.tables()

    assert together(1, work, **MODES[mode]) == [{}]


def test_workers_must_agree_on_the_rule() -> None:
    def work(session: Session) -> str:
        alpha = 0.2 if session.worker_id else 0.1
        with pytest.raises(TableMismatchError) as caught:
            mv.rules.share(np.zeros(3, "float32"), mv.rules.easgd(alpha), session=session)
        session.barrier()
        return str(caught.value)

    for message in together(2, work):
        assert "rule easgd(0.1)" in message
        assert "rule easgd(0.2)" in message


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: mv.rules.easgd(0), "above 0 and at most 1"),
        (lambda: mv.rules.easgd(1.5), "above 0 and at most 1"),
        (lambda: mv.rules.downpour(push=0), "push_every is a whole number, 1 or more"),
        (lambda: mv.rules.downpour(fetch=1.5), "pull_every is a whole number, 1 or more"),  # type: ignore[arg-type]
        (lambda: mv.rules.local_sgd(0), "a learning rate is above 0"),
        (lambda: mv.rules.local_sgd(0.7, 1), "a momentum is from 0"),
        (lambda: mv.rules.Rule("r", clipped_push, modes=("never",)), "modes of rule r must be some of"),
        (lambda: mv.rules.Rule("r", clipped_push, per_worker=("ones",)), "local state of rule r begins as"),
        (lambda: mv.rules.Rule("r", clipped_push, hyper=(0.0,) * 9), "at most 8 hyperparameters"),
    ],
)
def test_senseless_rules_are_refused(make: Callable[[], mv.rules.Rule], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


def test_what_cannot_be_written_to_is_refused_before_anything_is_made() -> None:
    with _SESSION() as session:
        frozen = np.zeros(3, "float32")
        frozen.flags.writeable = False
        for local in (np.zeros(3, "int32"), np.zeros(3, "float16"), frozen, [0.0, 1.0]):
            with pytest.raises(DtypeMismatchError, match="written to"):
                mv.rules.share(local, session=session)
        with pytest.raises(ShapeMismatchError, match="C-contiguous"):
            mv.rules.share(np.zeros(6, "float32")[::2], session=session)
        with pytest.raises(TypeError, match="takes a rule such as"):
            mv.rules.share(np.zeros(3, "float32"), 0.2, session=session)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="no rule is named 'elastic'"):
            mv.rules.share(np.zeros(3, "float32"), "elastic", session=session)  # type: ignore[arg-type]
        assert session.tables() == {}


def test_an_updater_with_more_hyperparameters_than_a_table_has_a_place_for_is_refused() -> None:
    """A rule's updater with 14 to 16 once wrote over the words behind them in the table's header."""
    with pytest.raises(ValueError, match="at most 8 hyperparameters; mine has 9"):
        Updater("mine", mv.updaters.add().apply, hyper=(0.0,) * 9)
    with pytest.raises(ValueError, match="at most 8 hyperparameters; mine has 9"):
        TableSpec("array", 1, 3, updater="mine", hyper=(0.0,) * 9)
    with pytest.raises(ValueError, match="at most 8 hyperparameters"):
        TableSpec.from_message({**TableSpec("array", 1, 3).as_message(), "hyper": [0.0] * 9})


@pytest.mark.parametrize("rule", [mv.rules.asgd(), mv.rules.easgd(0.5)], ids=str)
def test_an_exchange_of_what_does_not_fit_changes_nothing(rule: mv.rules.Rule) -> None:
    with _SESSION() as session:
        shared = mv.rules.share(np.ones(3, "float32"), rule, session=session)
        with pytest.raises(ShapeMismatchError):
            shared.exchange(np.zeros(4, "float32"))
        with pytest.raises(DtypeMismatchError):
            shared.exchange(np.zeros(3, "float64"))
        np.testing.assert_array_equal(shared.table.get(), [1, 1, 1])


@pytest.mark.parametrize("rule", [mv.rules.asgd(), mv.rules.easgd(0.5), mv.rules.downpour(push=2)], ids=str)
def test_it_goes_on_from_what_was_saved(rule: mv.rules.Rule, tmp_path: Path) -> None:
    with _SESSION() as session:
        local = np.zeros(3, "float32")
        shared = mv.rules.share(local, rule, session=session)
        local += 2
        shared.exchange(local)
        shared.exchange(local)
        saved = shared.table.get()
        shared.table.save(tmp_path / "centre")
        local += 100
        shared.exchange(local)
        shared.table.load(tmp_path / "centre")
        shared.restart(local)
        np.testing.assert_array_equal(local, saved)
        shared.exchange(local)
        np.testing.assert_array_equal(shared.table.get(), saved)


@pytest.mark.parametrize("rule", [mv.rules.asgd(), mv.rules.easgd(0.5), mv.rules.downpour()], ids=str)
def test_in_the_background_it_does_the_same(rule: mv.rules.Rule) -> None:
    with _SESSION() as session:
        a, b = np.zeros(40_000, "float32"), np.zeros(40_000, "float32")
        one, two = (mv.rules.share(x, rule, session=session) for x in (a, b))
        for step in range(3):
            a += step
            b += step
            one.exchange(a)
            two.exchange_async(b).wait(30)
        np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(one.table.get(), two.table.get())


def test_a_latecomer_takes_the_live_values_by_name() -> None:
    with _SESSION() as session:
        first = np.zeros(3, "float32")
        one = mv.rules.share(first, mv.rules.easgd(1.0), name="model", session=session)
        first += 4
        one.exchange(first)
        second = np.zeros(3, "float32")
        mv.rules.share(second, mv.rules.easgd(1.0), name="model", session=session)
        np.testing.assert_array_equal(second, [4, 4, 4])


def test_what_a_rule_is_called() -> None:
    assert [str(rule) for rule, _ in FORMULAS.values()] == [
        "asgd",
        "downpour",
        "dcasgd(0.4)",
        "dcasgd adaptive(20, 0.95, 0.05, 0.1, 1e-07)",
        "easgd(0.25)",
        "model averaging",
        "local sgd(0.7, 0.9)",
    ]
    assert str(mv.rules.downpour(fetch=3)) == "downpour push=1 pull=3"
    assert mv.rules.diloco().shared == 1
    assert len(mv.rules.downpour().per_worker) == 2


# -- the updaters that rules use -----------------------------------------------------------------------------


def test_nesterov_alone_is_its_formula() -> None:
    with _SESSION() as session:
        table = mv.ArrayTableHandler(40_000, updater=mv.updaters.nesterov(0.5, 0.9), session=session)
        values, velocity = np.zeros((2, 40_000), "float32")
        for step in range(3):
            delta = changes(0, step, 40_000)
            table.add(delta)
            velocity = np.float32(0.9) * velocity + delta
            values = values + np.float32(0.5) * (delta + np.float32(0.9) * velocity)
            np.testing.assert_array_equal(table.get(), values)


@pytest.mark.parametrize("dtype", ["float32", "int64"])
@pytest.mark.parametrize("mode, expected", [("sync", 4), ("async", 12)])
def test_the_updater_mean_averages_rounds_and_adds_otherwise(mode: str, expected: int, dtype: str) -> None:
    def work(session: Session) -> Array:
        table = mv.ArrayTableHandler(100, updater="mean", dtype=dtype, session=session)
        table.add(np.full(100, 2 * (session.worker_id + 1)))
        session.barrier()
        values: Array = table.get()
        return values

    for values in together(3, work, **MODES[mode]):
        np.testing.assert_array_equal(values, expected)
