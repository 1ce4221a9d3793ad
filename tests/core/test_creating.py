"""How tables come to be: by order, by name, with whose initial value."""

from __future__ import annotations

import random
import re
import threading
import time
from typing import Any

import numpy as np
import pytest
from core_support import MODES, Worker, in_threads, outcome, together, wait_for

import multiverso as mv
from multiverso.errors import NodeLostError, OutOfMemoryError, StartupError, TableMismatchError, WaitTimeoutError
from multiverso.runtime import Node, Session
from multiverso.runtime.session.node_link import NodeLink
from multiverso.spec.table import TableSpec


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("initial", "expected"), [("master", [0.0, 1.0]), ("sum", [6.0, 10.0]), ("mean", [1.5, 2.5])])
def test_whose_initial_value_counts(mode: str, initial: str, expected: list[float]) -> None:
    def work(session: Session) -> Any:
        table = mv.ArrayTableHandler(2, [session.worker_id, session.worker_id + 1], session=session, initial=initial)
        return table.snapshot().tolist()  # visible when the constructor returns, to everybody

    assert together(work, 4, **MODES[mode]) == [expected] * 4


def test_the_sum_and_the_mean_of_integers() -> None:
    def work(session: Session) -> Any:
        total, mean = (
            mv.ArrayTableHandler(1, [session.worker_id + 1], session=session, initial=i, dtype="int64")
            for i in ("sum", "mean")
        )
        return total.get().tolist(), mean.get().tolist()

    assert together(work, 2) == [([3], [1])] * 2


def test_a_mean_of_integers_whose_sum_does_not_fit_is_refused() -> None:
    """It wrapped, and the mean with it."""

    def work(session: Session) -> Any:
        return outcome(lambda: mv.ArrayTableHandler(1, [2**31 - 1], session=session, initial="mean", dtype="int32"))

    _, error = together(work, 2)
    assert isinstance(error, OverflowError)
    assert "does not fit int32" in str(error)


def test_one_worker_has_the_value_and_the_others_have_none() -> None:
    def work(session: Session) -> Any:
        value = [1.5, 2.5] if session.worker_id == 1 else None
        return mv.ArrayTableHandler(2, value, session=session, initial="sum").get().tolist()

    assert together(work, 3) == [[1.5, 2.5]] * 3


def test_another_worker_may_be_the_master() -> None:
    def work(session: Session) -> Any:
        value = [session.worker_id] * 2
        table = mv.ArrayTableHandler(2, value, session=session, master=session.worker_id == 2)
        return table.get().tolist()

    assert together(work, 3) == [[2.0, 2.0]] * 3


def test_a_sum_has_one_order_in_every_run() -> None:
    """Floating-point sums depend on the order: that of the workers, whoever comes first."""
    values = [1e8, 1.0, -1e8, 0.5]
    expected = np.float32(0)
    for value in values:
        expected += np.float32(value)

    def work(session: Session) -> Any:
        value = values[session.worker_id]
        return [mv.ArrayTableHandler(1, [value], session=session, initial="sum").get()[0] for _ in range(20)]

    assert together(work, 4) == [[expected] * 20] * 4


def test_by_name_the_creator_decides_and_latecomers_see_live_values() -> None:
    created, added = threading.Event(), threading.Event()

    def work(session: Session) -> Any:
        if session.worker_id == 0:
            table = mv.ArrayTableHandler(2, [1, 1], name="w", session=session)
            created.set()
            table.add([1, 2])
            table.get()
            added.set()
            session.barrier()
            return table.snapshot().tolist(), table.number
        assert (created if session.worker_id == 1 else added).wait(30)
        table = mv.ArrayTableHandler(2, [50, 50], name="w", session=session)
        session.barrier()
        return table.snapshot().tolist(), table.number

    assert together(work, 3) == [([2.0, 3.0], 1)] * 3


@pytest.mark.parametrize("mode", ["sync", "bounded"])
def test_where_reads_wait_a_table_with_a_name_is_one_of_the_order(mode: str) -> None:
    def work(session: Session) -> Any:
        me = session.worker_id
        error = outcome(lambda: mv.ArrayTableHandler(2, name=f"w{me}", session=session))
        table = mv.ArrayTableHandler(2, [me + 1, me + 1], name="w", initial="sum", session=session)
        second = mv.ArrayTableHandler(1, session=session)
        twin = mv.ArrayTableHandler(2, name="w", initial="sum", session=session)  # it is there: this waits for nobody
        twin.close()
        twin = mv.ArrayTableHandler(2, name="w", initial="sum", session=session)
        third = mv.ArrayTableHandler(3, session=session)
        return str(error), [each.number for each in (table, second, third)], twin.snapshot().tolist()

    for error, numbers, values in together(work, 2, **MODES[mode]):
        assert "table number 1 differs between workers (worker 0: array of 2 float32 named 'w0'" in error
        assert (numbers, values) == ([1, 2, 3], [3.0, 3.0])


@pytest.mark.parametrize("mode", ["sync", "bounded"])
def test_where_reads_wait_a_name_that_is_opened_again_is_another_table(mode: str) -> None:
    """A quick worker got the one that the others had not closed yet, and went through its rounds alone."""

    def work(session: Session) -> Any:
        found = []
        for fold in range(8):
            with mv.ArrayTableHandler(1, [100 * fold], name="model", session=session) as table:
                for _ in range(2):
                    table.add([1])
                    table.get()
                found.append((table.number, float(table.get()[0]) if session.consistency.in_rounds else None))
                time.sleep(0.02 * ((session.worker_id + fold) % 2))
        return found

    want = [(fold + 1, 100.0 * fold + 4 if mode == "sync" else None) for fold in range(8)]
    assert together(work, 2, **MODES[mode]) == [want] * 2


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("mode", ["sync", "bounded"])
def test_names_that_are_opened_and_closed_at_random_hold_what_a_dictionary_does(mode: str, seed: int) -> None:
    """All workers run the same program, each at its own pace."""

    def work(session: Session) -> None:
        plan, pace = random.Random(seed), random.Random(10 * seed + session.worker_id)
        tables: dict[str, list[Any]] = {}
        model: dict[str, tuple[str, float]] = {}  # whose initial value counted, and the sum
        for _ in range(40):
            time.sleep(0.005 * pace.random() * (pace.random() < 0.4))
            name, step, value = plan.choice("abc"), plan.choice("oocrrtn"), plan.randrange(1000)
            initial: Any = plan.choice(["master", "sum"])
            if step == "o" and name not in tables:
                tables[name] = [mv.ArrayTableHandler(2, value, name=name, initial=initial, session=session)]
                model[name] = initial, value * (3 if initial == "sum" else 1)
            elif step == "t" and name in tables:
                initial = model[name][0]
                tables[name].append(mv.ArrayTableHandler(2, name=name, initial=initial, session=session))
            elif step == "c":
                for table in tables.pop(name, []):
                    table.close()
            elif step == "r" and name in tables:
                table = tables[name][-1]
                table.add(1)
                got, model[name] = table.get(), (model[name][0], model[name][1] + 3)
                assert not session.consistency.in_rounds or got[0] == model[name][1]
            elif step == "n":
                mv.ArrayTableHandler(1, session=session).close()
        session.barrier()
        for name, handlers in tables.items():
            assert handlers[0].snapshot().tolist() == [model[name][1]] * 2

    together(work, 3, **MODES[mode])


def test_by_name_who_comes_next_writes_the_value_where_the_first_ones_were_interrupted() -> None:
    """After two of them it was concluded without any: zeros."""
    begun = threading.Event()

    def work(session: Session) -> Any:
        me = session.worker_id

        def fill(shard: Any, last: bool, number: int) -> None:
            begun.set()
            if me == 0:
                wait_for(lambda: all(session.control.worker(i).wait is not None for i in (1, 2)))
            if me < 2:
                raise InterruptedError
            shard.values()[:] = 7

        assert me == 0 or begun.wait(30)
        error = outcome(lambda: session.open_table(TableSpec("array", 1, 3, name="w"), fill))
        if me < 2:
            assert isinstance(error, InterruptedError), error
            return None
        _, shard = error
        return shard.values().tolist()

    assert together(work, 3)[2] == [7.0] * 3


def test_what_is_closed_while_another_worker_is_interrupted_in_its_call_for_it_is_freed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who had it last was a worker whose call had come to nothing: nobody looked whether it was needed any more."""
    asked, closed = threading.Event(), threading.Event()
    with Node(2) as node:

        def work(worker_id: int) -> None:
            with Session(node.address, worker_id) as session:
                table = mv.ArrayTableHandler(3, name="w", session=session) if worker_id == 0 else None
                session.barrier()
                if table is not None:
                    assert asked.wait(30)
                    table.close()
                    closed.set()
                else:

                    def interrupted(*_: object) -> Any:
                        asked.set()
                        assert closed.wait(30)
                        raise InterruptedError

                    with monkeypatch.context() as patch, pytest.raises(InterruptedError):
                        patch.setattr(session._holdings, "map", interrupted)
                        mv.ArrayTableHandler(3, name="w", session=session)
                session.barrier()
                wait_for(lambda: not node.status()["tables"])
                session.barrier()

        in_threads([lambda: work(0), lambda: work(1)])


def test_all_at_once_by_name_get_one_table() -> None:
    def work(session: Session) -> Any:
        table = mv.MatrixTableHandler(2, 2, name="m", session=session)
        table.add(np.ones((2, 2)))
        session.barrier()
        return table.get().tolist()

    assert together(work, 4) == [[[4.0, 4.0], [4.0, 4.0]]] * 4


@pytest.mark.parametrize("mode", MODES)
def test_a_worker_may_open_a_named_table_twice(mode: str) -> None:
    def work(session: Session) -> Any:
        one = mv.ArrayTableHandler(2, name="w", session=session)
        one.add([1, 1])
        two = mv.ArrayTableHandler(2, [9, 9], name="w", session=session)
        two.add([1, 1])
        if not session.consistency.in_rounds:
            session.barrier()
        first = one.get().tolist()
        return first, two.get().tolist(), one.number == two.number

    expected = [4.0, 4.0]
    assert together(work, 2, **MODES[mode]) == [(expected, expected, True)] * 2


def test_tables_by_name_and_by_order_do_not_disturb_each_other() -> None:
    def work(session: Session) -> Any:
        if session.worker_id == 1:
            mv.ArrayTableHandler(5, name="only mine", session=session)
        tables = [mv.ArrayTableHandler(n, session=session) for n in (1, 2, 3)]
        for table in tables:
            table.add(np.ones(table.size))
        session.barrier()
        return [table.get().sum() for table in tables]

    assert together(work, 2) == [[2, 4, 6]] * 2


MISMATCHES: dict[str, Any] = {
    "size": lambda s: mv.ArrayTableHandler(3 + s.worker_id, session=s),
    "kind": lambda s: mv.MatrixTableHandler(1, 3, session=s) if s.worker_id else mv.ArrayTableHandler(3, session=s),
    "dtype": lambda s: mv.ArrayTableHandler(3, session=s, dtype=("float32", "int64")[s.worker_id]),
    "updater": lambda s: mv.ArrayTableHandler(3, session=s, updater=("add", "sgd")[s.worker_id]),
    "initial": lambda s: mv.ArrayTableHandler(3, session=s, initial=("sum", "mean")[s.worker_id]),
    "transposed": lambda s: mv.MatrixTableHandler(2 + s.worker_id, 3 - s.worker_id, session=s),
}


@pytest.mark.parametrize("case", MISMATCHES)
def test_different_tables_are_refused_everywhere_and_the_call_can_be_repeated(case: str) -> None:
    def work(session: Session) -> Any:
        kept = mv.ArrayTableHandler(2, [1, 2], session=session)
        error = outcome(lambda: MISMATCHES[case](session))
        table = mv.ArrayTableHandler(3, [4, 5, 6], session=session)
        return error, table.number, table.get().tolist(), kept.get().tolist()

    results = together(work, 2)
    for error, number, values, kept in results:
        assert isinstance(error, TableMismatchError)
        assert "table number 2 differs between workers (worker 0: " in str(error)
        assert "worker 1: " in str(error)
        assert "the call can be repeated" in str(error)
        assert (number, values, kept) == (2, [4.0, 5.0, 6.0], [1.0, 2.0])


def test_another_table_of_the_same_name_is_refused() -> None:
    with Node(None) as node, Session(node.address) as one, Session(node.address) as two:
        mv.ArrayTableHandler(3, name="w", session=one)
        with pytest.raises(TableMismatchError, match=r"table 'w' is array of 3 .* asked for array of 4"):
            mv.ArrayTableHandler(4, name="w", session=two)
        assert mv.ArrayTableHandler(3, name="w", session=two).get().tolist() == [0, 0, 0]


def test_a_creation_that_was_given_up_can_be_repeated() -> None:
    """Also when the others came in the very moment: the segment is sent again."""

    def work(session: Session) -> Any:
        if session.worker_id == 1:
            with pytest.raises(WaitTimeoutError, match="gave up"):
                session.open_table(spec, lambda *_: None, timeout_seconds=0.05)
        session.barrier()
        table = mv.ArrayTableHandler(3, session=session)
        table.add([1, 1, 1])
        session.barrier()
        return table.number, table.get().tolist()

    spec = TableSpec("array", 1, 3)
    assert together(work, 2) == [(1, [2.0, 2.0, 2.0])] * 2


def test_a_creation_that_was_interrupted_without_a_word_can_be_repeated(
    alone: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exception came again, while the session told its node of the first."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    spec = TableSpec("array", 1, 3, name="w")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(NodeLink, "give_up", lambda self, why=None: None)
        alone.open_table(spec, interrupted)
    table = mv.ArrayTableHandler(3, [1, 2, 3], name="w", session=alone)
    assert table.get().tolist() == [1, 2, 3]


def test_a_latecomer_of_an_elastic_job_finds_the_tables_by_their_order() -> None:
    with Node(None) as node, Session(node.address) as first:
        tables = [mv.ArrayTableHandler(n, [n] * n, session=first) for n in (1, 2)]
        with Session(node.address) as late:
            found = [mv.ArrayTableHandler(n, session=late) for n in (1, 2)]
            assert [t.get().tolist() for t in found] == [[1.0], [2.0, 2.0]]
            found[1].add([1, 1])
        assert tables[1].get().tolist() == [3.0, 3.0]


def test_a_table_that_does_not_fit_is_refused_with_the_figures() -> None:
    def work(session: Session) -> Any:
        error = outcome(lambda: mv.ArrayTableHandler(10**13, session=session))
        return error, mv.ArrayTableHandler(2, session=session).number

    for error, number in together(work, 2):
        assert isinstance(error, OutOfMemoryError)
        assert isinstance(error, MemoryError)
        assert re.search(r"a table of 40,0\d\d,\d\d\d MB does not fit: [\d,]+ MB of memory are available", str(error))
        assert number == 1


def test_many_small_tables_and_a_few_large_ones(alone: Session) -> None:
    """They share segments: a descriptor each would be too many."""
    import os

    before = len(os.listdir("/proc/self/fd"))
    tables = [mv.ArrayTableHandler(1 + n % 300, n, session=alone) for n in range(400)]
    tables += [mv.ArrayTableHandler(3_000_000, n, session=alone) for n in range(2)]
    assert all((t.get() == t.number - 1).all() for t in tables[:400])
    assert all((t.get() == n).all() for n, t in enumerate(tables[400:]))
    assert len(os.listdir("/proc/self/fd")) <= before + 30


def test_options_must_be_equal_in_all_workers() -> None:
    with Node(2) as node:

        def first() -> None:
            with pytest.raises(NodeLostError):  # it waits for the other until the node ends
                Session(node.address, 0, sync=True, start_timeout_seconds=60)

        def second() -> None:
            wait_for(node.live_workers)
            with pytest.raises(StartupError, match="call init with the same arguments everywhere"):
                Session(node.address, 1, staleness=3, start_timeout_seconds=60)
            node.close()

        in_threads([first, second])


def test_a_job_of_processes_shares_memory_and_nothing_is_copied() -> None:
    text = """
with Session(node, worker_id, start_timeout_seconds=60) as s:
    t = mv.ArrayTableHandler(1000, np.arange(1000) if worker_id == 0 else None, session=s)
    t.add(np.ones(1000))
    s.barrier()
    say(t.get()[[0, -1]].tolist(), s.live_workers())
    s.barrier()
"""
    with Node(2) as node, Worker(node, 0, text) as a, Worker(node, 1, text) as b:
        assert a.hear() == b.hear() == [[2.0, 1001.0], [0, 1]]
        assert (a.end(), b.end()) == (0, 0)
        assert node.wait(30)


@pytest.mark.parametrize("mode", MODES)
def test_a_large_updater_state_begins_with_its_own_value(mode: str) -> None:
    """The node maps no more of a table than its header, but writes what states are at first."""
    from multiverso.spec.states import State
    from multiverso.updaters import Updater

    def apply(values, delta, state, stride, hyper, count):  # type: ignore[no-untyped-def]
        for i in range(count):
            values[i] += delta[i] * state[i]

    updater = Updater("times", apply, states=(State("factor", 2.5),))

    def work(session: Session) -> Any:
        mv.ArrayTableHandler(300_000, session=session, updater=updater)
        [shard] = session.tables().values()
        state = shard.states()[0]
        return float(state.min()), float(state.max())

    assert together(work, 2, **MODES[mode]) == [(2.5, 2.5)] * 2


def test_threads_that_open_one_table_at_once_share_its_calls() -> None:
    """A worker has one undo slot in a keyed table: two objects with own calls would give one row to two keys."""
    with Node(1) as node, Session(node.address) as session:
        for name in map(str, range(5)):
            gate = threading.Barrier(4)

            def open_it(kind: Any, size: int, name: str = name, gate: threading.Barrier = gate) -> Any:
                gate.wait(30)
                return kind(size, name=f"{kind.__name__} {name}", session=session)

            kinds = [mv.ArrayTableHandler, mv.ArrayTableHandler, mv.KeyedTable, mv.KeyedTable]
            tables = in_threads([lambda kind=kind: open_it(kind, 3) for kind in kinds])
            assert tables[0]._operations is tables[1]._operations
            assert tables[2]._calls is tables[3]._calls
