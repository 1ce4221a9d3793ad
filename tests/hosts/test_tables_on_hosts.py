"""Tables of a job on several hosts: their making and ending, initial values, sums that are exact."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
from core_support import outcome, wait_for
from rehearsing import Rehearsal, rehearsal

from multiverso.errors import NotInThisJobError, TableMismatchError
from multiverso.hosts.codecs import Wire
from multiverso.hosts.options import ExchangeOptions
from multiverso.runtime import Session
from multiverso.runtime.collective.agreement import all_gather
from multiverso.spec.table import TableSpec
from multiverso.tables import ArrayTableHandler, MatrixTableHandler


@pytest.mark.parametrize("workers", [(2, 2), (1, 1, 1)], ids=str)
def test_adds_of_all_hosts_add_up_exactly_at_all_workers(workers: tuple[int, ...]) -> None:
    size, rounds = 70_000, 20

    def work(session: Session) -> Any:
        me = session.worker_id
        array = ArrayTableHandler(size, session=session)
        matrix = MatrixTableHandler(50, 7, dtype="int64", session=session)
        rng = np.random.default_rng(me)
        own = np.zeros(size, np.float32)
        for _ in range(rounds):
            delta = rng.integers(-9, 9, size).astype(np.float32)
            own += delta
            array.add(delta)
            matrix.add(np.full((2, 7), me + 1), row_ids=[me, 49])
        session.barrier()
        read = array.get(), matrix.get()
        session.barrier()
        return own, *read

    with rehearsal(*workers) as job:
        results = job.run(work)
        assert all(node.stay() for node in job.nodes)
    n = sum(workers)
    want = sum(own for own, _, _ in results)
    for _, array, matrix in results:
        np.testing.assert_array_equal(array, want)
        assert matrix[49].tolist() == [rounds * n * (n + 1) // 2] * 7
        assert matrix[:n, 0].tolist() == [rounds * (i + 1) for i in range(n)]


@pytest.mark.parametrize("workers", [(2, 1), (1, 1, 1)], ids=str)
def test_a_closed_tables_memory_is_the_next_ones_and_sums_stay_exact(workers: tuple[int, ...]) -> None:
    sizes = [300_000, 300_000, 70_000, 400_000, 400_000]  # one and several chunks at each home

    with rehearsal(*workers) as job:

        def work(session: Session) -> list[tuple[float, float]]:
            me, seen = session.worker_id, []
            kept = ArrayTableHandler(10, session=session)
            session.barrier()
            used = [node.status()["memory_bytes"] for node in job.nodes]
            for turn, size in enumerate(sizes):
                with ArrayTableHandler(size, np.full(size, turn), session=session) as table:
                    kept.add(np.ones(10))
                    for _ in range(5):
                        table.add(np.full(size, me + 1.0))
                    if turn % 2:  # otherwise it is closed while its adds are on their way
                        session.barrier()
                        values = table.get()
                        seen.append((float(values.min()), float(values.max())))
                session.barrier()
                wait_for(lambda: [node.status()["memory_bytes"] for node in job.nodes] == used)
                session.barrier()
            values = kept.get()
            return [*seen, (float(values.min()), float(values.max()))]

        n = sum(workers)
        sums = 5 * n * (n + 1) // 2
        want = [(turn + sums, turn + sums) for turn in (1, 3)] + [(len(sizes) * n,) * 2]
        assert job.run(work) == [want] * n
        assert all(node.stay() for node in job.nodes)


def test_a_name_is_free_when_all_hosts_have_closed_its_table_and_not_before() -> None:
    def work(session: Session) -> Any:
        me, other = session.worker_id, 1 - session.worker_id
        table = ArrayTableHandler(3, np.ones(3), name="shared", session=session)
        session.barrier()
        if me == 0:
            table.close()
        session.barrier()
        if me == 0:  # the other host has it still
            table = ArrayTableHandler(3, np.full(3, 9.0), name="shared", session=session)
        first = table.number, float(table.get()[0])
        session.barrier()
        table.close()
        table.close()
        session.barrier()
        numbers = all_gather(session, str(first[0]))
        again = ArrayTableHandler(4, np.full(4, 2.0), name="shared", session=session)
        session.barrier()
        again.add(np.ones(4))
        session.barrier()
        assert numbers[other] == str(first[0])
        return first, again.number > first[0], again.get().tolist()

    with rehearsal(1, 1) as job:
        assert job.run(work) == [((1, 1.0), True, [4.0] * 4)] * 2


@pytest.mark.parametrize("options", [{"sync": True}, {"staleness": 0}], ids=str)
def test_the_first_round_of_a_table_with_a_name_has_all_hosts(options: dict[str, Any]) -> None:
    def work(session: Session) -> Any:
        time.sleep(0.2 * session.worker_id)
        other = outcome(lambda: ArrayTableHandler(2, name=f"mine {session.worker_id}", session=session))
        table = ArrayTableHandler(2, np.full(2, session.worker_id + 5.0), name="weights", session=session)
        members = sorted(session.wait_graph().tables[table.number].members)
        table.add(np.ones(2))
        mine = table.get().tolist()
        return str(other), members, mine if session.consistency.in_rounds else None

    with rehearsal(1, 1) as job:
        for other, members, found in job.run(work, **options):
            assert "table number 1 differs between" in other
            assert members == [0, 1]
            assert found == ([7.0, 7.0] if "sync" in options else None)


def test_one_that_leaves_without_closing_and_a_host_that_never_had_it_keep_no_closed_table() -> None:
    with rehearsal(1, 1, 1) as job:

        def work(session: Session) -> None:
            if session.worker_id == 2:
                session.barrier()
                session.barrier()
                for node in job.nodes:
                    wait_for(lambda node=node: not node.status()["tables"])
                return
            table = ArrayTableHandler(5, name="theirs", session=session)
            session.barrier()
            if session.worker_id == 0:
                table.close()
            session.barrier()

        job.run(work)


@pytest.mark.parametrize(
    "exchange",
    [ExchangeOptions.of("int8"), ExchangeOptions.of("topk:0.1", "5 adds"), ExchangeOptions.of(every=0.01)],
    ids=str,
)
def test_sums_of_whole_numbers_are_exact_after_a_barrier_however_they_travel(exchange: ExchangeOptions) -> None:
    size, rounds = 70_000, 10

    def work(session: Session) -> Any:
        me = session.worker_id
        table = ArrayTableHandler(size, np.full(size, 3.0), session=session)
        counts = ArrayTableHandler(5, dtype="int64", session=session)
        rng = np.random.default_rng(me)
        own = np.zeros(size, np.float32)
        for _ in range(rounds):
            delta = rng.integers(-999, 999, size).astype(np.float32)
            own += delta
            table.add(delta)
            counts.add(np.ones(5, np.int64))
        session.barrier()
        return own, table.get(), counts.get().tolist()

    with rehearsal(2, 1) as job:
        held = _held(job)
        results = job.run(work, exchange=exchange)
    assert {(one.wire.number, one.every) for one in held[0].values()} == {
        (Wire.of(exchange.wire, "float32").number, exchange.every),
        (Wire.of(exchange.wire, "int64").number, exchange.every),
    }
    want = 3 + sum(own for own, _, _ in results)
    for _, values, counts in results:
        np.testing.assert_array_equal(values, want)
        assert counts == [3 * rounds] * 5


def _held(job: Rehearsal) -> list[dict[int, Any]]:
    """What each host holds of its tables, by number: filled when they are made."""
    return [node.hosts.fabric.tables.held for node in job.nodes]  # type: ignore[attr-defined]


@pytest.mark.parametrize("between", ["mean", "local_sgd", "diloco", "diloco:1,0.5"])
def test_a_rule_between_hosts_moves_everyone_to_one_value(between: str) -> None:
    def work(session: Session) -> Any:
        table = ArrayTableHandler(1000, np.full(1000, 8.0), dtype="float64", session=session)
        steps = ArrayTableHandler(1, dtype="int64", session=session)
        table.add(np.full(1000, 0.5 + session.worker_id))
        steps.add([1])
        session.barrier()
        refused = outcome(lambda: table.set(np.zeros(1000)))
        assert type(refused) is NotInThisJobError
        assert f"between={between!r}" in str(refused)
        return set(table.get().tolist()), steps.get().tolist()

    with rehearsal(1, 1) as job:
        values, steps = zip(*job.run(work, exchange=ExchangeOptions.of(every=3600, between=between)), strict=True)
    # the mean of what the hosts have changed is 1: lr g + lr mu m with m = g
    lr, momentum = {"diloco": (0.7, 0.9), "diloco:1,0.5": (1.0, 0.5)}.get(between, (1.0, 0.0))
    assert values[0] == values[1]
    assert len(values[0]) == 1
    assert values[0].pop() == pytest.approx(8 + lr * (1 + momentum))
    assert steps == ([2], [2])  # whole numbers are summed


def test_whose_initial_value_counts_is_the_same_as_on_one_host() -> None:
    def work(session: Session) -> Any:
        me = session.worker_id
        own = np.full(5, me + 1.0)
        tables = [
            ArrayTableHandler(5, own, session=session),
            ArrayTableHandler(5, own, session=session, master=me == 2),
            ArrayTableHandler(5, own, dtype="float64", initial="sum", session=session),
            ArrayTableHandler(5, own, initial="mean", session=session),
        ]
        return [table.get()[0] for table in tables]

    with rehearsal(2, 1, 1) as job:
        assert job.run(work) == [[1.0, 3.0, 10.0, 2.5]] * 4


def test_by_name_who_comes_next_writes_the_value_where_its_creator_was_interrupted() -> None:
    """All waited until that one asked again."""
    begun = threading.Event()

    def work(session: Session) -> Any:
        me = session.worker_id

        def fill(shard: Any, last: bool, number: int) -> None:
            begun.set()
            shard.values()[:] = 7
            if me == 0:
                wait_for(lambda: session.control.worker(1).wait is not None)
                raise InterruptedError

        assert me == 0 or begun.wait(30)
        error = outcome(lambda: session.open_table(TableSpec("array", 1, 3, name="w"), fill))
        session.barrier()
        if me == 0:
            assert isinstance(error, InterruptedError), error
            return None
        return error[1].values().tolist()

    with rehearsal(2, 1) as job:
        assert job.run(work) == [None, [7.0] * 3, [7.0] * 3]


def test_a_table_by_name_begins_with_its_creators_value_everywhere() -> None:
    def work(session: Session) -> Any:
        if session.worker_id == 1:  # on the second host
            ArrayTableHandler(3, np.arange(3.0), name="shared", session=session)
        session.barrier()
        table = ArrayTableHandler(3, np.full(3, 9.0), name="shared", session=session)
        value = table.get().tolist()
        session.barrier()
        table.add(np.ones(3))
        session.barrier()
        other = outcome(lambda: ArrayTableHandler(4, name="shared", session=session))
        return value, table.get().tolist(), type(other)

    with rehearsal(1, 1, 1) as job:
        for result in job.run(work):
            assert result == ([0, 1, 2], [3, 4, 5], TableMismatchError)


def test_tables_that_differ_between_hosts_are_refused_and_the_call_can_be_repeated() -> None:
    def work(session: Session) -> Any:
        size = 4 + session.worker_id
        error = outcome(lambda: ArrayTableHandler(size, session=session))
        return type(error), str(error), ArrayTableHandler(4, session=session).number

    with rehearsal(1, 1) as job:
        for kind, text, number in job.run(work):
            assert kind is TableMismatchError
            assert "host-0: array of 4" in text
            assert "host-1: array of 5" in text
            assert number == 1
