"""Workers on several hosts share tables as workers of one do."""

from __future__ import annotations

import io
import re
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest
from core_support import in_threads, outcome, wait_for
from rehearsing import Rehearsal, rehearsal
from rich.console import Console

import multiverso as mv
from multiverso.cli.top import render
from multiverso.deadline import Deadline
from multiverso.errors import MultiversoError, StartupError, TableMismatchError, WorkerLostError
from multiverso.hosts.credentials import new_credentials
from multiverso.hosts.exchange import Exchange
from multiverso.hosts.fabric import Fabric
from multiverso.hosts.roster import Roster
from multiverso.hosts.transport import CONTROL, Hello, connect
from multiverso.hosts.wires import Wire
from multiverso.runtime import Node, Session
from multiverso.runtime.agreement import tell_all
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
        numbers = tell_all(session, str(first[0]))
        again = ArrayTableHandler(4, np.full(4, 2.0), name="shared", session=session)
        session.barrier()
        again.add(np.ones(4))
        session.barrier()
        assert numbers[other] == str(first[0])
        return first, again.number > first[0], again.get().tolist()

    with rehearsal(1, 1) as job:
        assert job.run(work) == [((1, 1.0), True, [4.0] * 4)] * 2


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
    "exchange", [Exchange.of("int8"), Exchange.of("topk:0.1", "5 adds"), Exchange.of(every=0.01)], ids=str
)
def test_sums_of_whole_numbers_are_exact_after_a_barrier_however_they_travel(exchange: Exchange) -> None:
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
        kinds = _kinds(job)
        results = job.run(work, exchange=exchange)
    assert {(wire.number, every) for wire, every in kinds[0].values()} == {
        (Wire.of(exchange.wire, "float32").number, exchange.every),
        (Wire.of(exchange.wire, "int64").number, exchange.every),
    }
    want = 3 + sum(own for own, _, _ in results)
    for _, values, counts in results:
        np.testing.assert_array_equal(values, want)
        assert counts == [3 * rounds] * 5


def _kinds(job: Rehearsal) -> list[dict[int, Any]]:
    """How the tables of each host travel, by number: filled when they are made."""
    return [node._abroad._carrier._kinds for node in job.nodes]  # type: ignore[union-attr]


@pytest.mark.parametrize("between", ["mean", "local_sgd", "diloco", "diloco:1,0.5"])
def test_a_rule_between_hosts_moves_everyone_to_one_value(between: str) -> None:
    def work(session: Session) -> Any:
        table = ArrayTableHandler(1000, np.full(1000, 8.0), dtype="float64", session=session)
        steps = ArrayTableHandler(1, dtype="int64", session=session)
        table.add(np.full(1000, 0.5 + session.worker_id))
        steps.add([1])
        session.barrier()
        refused = outcome(lambda: table.set(np.zeros(1000)))
        assert type(refused) is MultiversoError
        assert f"between={between!r}" in str(refused)
        return set(table.get().tolist()), steps.get().tolist()

    with rehearsal(1, 1) as job:
        values, steps = zip(*job.run(work, exchange=Exchange.of(every=3600, between=between)), strict=True)
    # the mean of what the hosts have changed is 1: lr g + lr mu m with m = g
    lr, momentum = {"diloco": (0.7, 0.9), "diloco:1,0.5": (1.0, 0.5)}.get(between, (1.0, 0.0))
    assert values[0] == values[1]
    assert len(values[0]) == 1
    assert values[0].pop() == pytest.approx(8 + lr * (1 + momentum))
    assert steps == ([2], [2])  # whole numbers are summed


def test_another_wire_on_another_host_is_refused() -> None:
    with rehearsal(1, 1) as job:

        def begin(worker_id: int) -> Any:
            exchange = Exchange.of(("native", "int8")[worker_id])
            return outcome(
                lambda: job.session(worker_id, exchange=exchange, start_timeout_seconds=20).shutdown()
            )

        results = in_threads([lambda: begin(0), lambda: begin(1)])
    assert any(isinstance(r, StartupError) and "wire='int8'" in str(r) for r in results)


@pytest.mark.parametrize(
    "options",
    [
        {"wire": "int9"},
        {"wire": 8},
        {"every": "often"},
        {"every": -1},
        {"every": "0 adds"},
        {"every": float("nan")},
        {"every": True},
        {"every": 10**400},
        {"between": "median"},
        {"between": "diloco:1"},
    ],
    ids=str,
)
def test_what_means_nothing_between_hosts_is_refused_on_one_host_too(options: dict[str, Any]) -> None:
    with pytest.raises(StartupError, match=f"{next(iter(options))}|wire format|rule between"):
        mv.init(**options)
    assert Exchange.from_message(Exchange.of("int8", "7 adds", "diloco").as_message()) == Exchange.of(
        "int8", "7 adds", "diloco"
    )


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


def test_a_barrier_waits_for_other_hosts_and_names_who_is_missing() -> None:
    with rehearsal(1, 1) as job:
        waits = {}

        def wait(session: Session) -> None:
            if session.worker_id == 0:
                session.barrier()
                return
            wait_for(lambda: _wait_of(session, 0) is not None)
            waits.update(
                {0: _wait_of(session, 0), "lines": session.wait_graph().describe(time.monotonic_ns())}
            )
            session.barrier()

        job.run(wait)
    assert "which needs worker 1" in waits["lines"][0]
    assert waits["lines"][0].startswith("worker 0 (pid ")
    assert "on host-0)" in waits["lines"][0]


def _wait_of(session: Session, worker_id: int) -> Any:
    worker = session.wait_graph().workers.get(worker_id)
    return worker.wait if worker is not None else None


def test_one_that_leaves_is_not_waited_for_and_its_adds_are_there() -> None:
    def work(session: Session) -> Any:
        table = ArrayTableHandler(1000, session=session)
        table.add(np.ones(1000))
        if session.worker_id == 2:
            return None
        session.barrier()
        total = table.get()
        session.barrier()
        return total.min(), total.max(), session.workers_num

    with rehearsal(2, 1) as job:
        assert job.run(work)[:2] == [(3.0, 3.0, 3)] * 2


def test_a_worker_that_dies_is_named_with_its_host_on_the_others() -> None:
    with rehearsal(1, 1) as job:

        def stay(_: int) -> Any:
            with job.session(0) as session:
                session.barrier()
                return outcome(session.barrier)

        def die(_: int) -> None:
            session = job.session(1)
            session.barrier()
            session._takes_part = False  # as one that ends without shutdown()
            session.shutdown()

        error, _ = in_threads([lambda: stay(0), lambda: die(1)])
    assert isinstance(error, WorkerLostError)
    assert error.worker_ids == (1,)
    assert "on host-1)" in str(error)


def test_the_others_go_on_without_a_lost_worker_where_they_are_to() -> None:
    with rehearsal(1, 2, on_lost="continue") as job:

        def work(worker_id: int) -> Any:
            session = job.session(worker_id)
            with session:
                table = ArrayTableHandler(10, session=session)
                table.add(np.ones(10))
                session.barrier()
                if worker_id == 2:
                    session._takes_part = False
                    return None
                session.barrier()
                return table.get().tolist()

        results = in_threads([lambda i=i: work(i) for i in range(3)])  # type: ignore[misc]
    assert results[:2] == [[3.0] * 10] * 2


def test_a_lost_host_is_an_error_on_the_others() -> None:
    with rehearsal(1, 1) as job:
        passed = threading.Event()

        def stay() -> Any:
            with job.session(0) as session:
                session.barrier()
                passed.set()
                return outcome(session.barrier)

        def go() -> Any:
            with job.session(1) as session:
                session.barrier()
                assert passed.wait(30)
                job.nodes[1].close()

        error, _ = in_threads([stay, go])
    assert isinstance(error, WorkerLostError)
    assert error.worker_ids == (1,)


def test_the_others_go_on_without_a_lost_host_where_they_are_to() -> None:
    size = 300_000  # some chunks at each home
    with rehearsal(1, 1, 1, on_lost="continue") as job:
        gone, all_passed = threading.Event(), threading.Barrier(3)

        def work(worker_id: int) -> Any:
            with job.session(worker_id) as session:
                table = ArrayTableHandler(size, session=session)
                table.add(np.ones(size))
                session.barrier()
                all_passed.wait(30)  # a host that is lost before has not given the others what it is home of
                if worker_id == 1:
                    job.nodes[1].close()
                    gone.set()
                    return None
                assert gone.wait(30)
                table.add(np.full(size, 10.0))
                session.barrier()
                new = ArrayTableHandler(5, np.full(5, 2.0), session=session)
                seen = session.live_workers(), *(set(values.tolist()) for values in (table.get(), new.get()))
                session.barrier()
                return seen

        results = in_threads([lambda i=i: work(i) for i in range(3)])  # type: ignore[misc]
    assert results == [([0, 2], {23.0}, {2.0}), None, ([0, 2], {23.0}, {2.0})]


def test_who_waits_for_a_host_that_is_lost_just_now_goes_on_once_there_are_new_homes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    size = 300_000  # some chunks at each home
    fabrics: dict[int, Fabric] = {}
    waits, failed = threading.Event(), threading.Event()

    class Watched(Fabric):
        def listen(self) -> tuple[str, int]:
            fabrics[self.host] = self
            return super().listen()

        def settle(self, deadline: Deadline, tables: Iterable[int] | None = None) -> None:
            waits.set()
            try:
                super().settle(deadline, tables)
            except MultiversoError:
                failed.set()
                raise

        def regroup(self, live: Sequence[int]) -> None:
            self.lost(1)  # as it begins itself: who waits finds out before there are new homes
            assert failed.wait(30)
            super().regroup(live)

    monkeypatch.setattr("multiverso.launch.rehearsing.Fabric", Watched)
    with rehearsal(1, 1, on_lost="continue") as job:
        made = threading.Barrier(2)

        def work(worker_id: int) -> Any:
            with job.session(worker_id) as session:
                table = ArrayTableHandler(size, session=session)
                session.barrier()
                made.wait(30)
                if worker_id == 1:
                    fabrics[1].close()
                    waits.clear()
                    made.wait(30)
                    assert waits.wait(30)
                    job.nodes[1].close()
                    return None
                made.wait(30)
                table.add(np.ones(size))
                session.barrier()
                return session.live_workers(), set(table.get().tolist())

        assert in_threads([lambda i=i: work(i) for i in range(2)])[0] == ([0], {1.0})  # type: ignore[misc]


def test_what_works_on_one_host_only_is_refused_in_a_sentence() -> None:
    def work(session: Session) -> list[str]:
        table = ArrayTableHandler(4, np.arange(4.0), session=session)
        calls: list[Any] = [
            lambda: mv.KeyedTable(4, session=session),
            lambda: session.shared_memory("mine", 64),
            lambda: ArrayTableHandler(5, dtype="int32", initial="mean", session=session),
        ]
        errors = [outcome(call) for call in calls]
        assert all(type(error) is MultiversoError for error in errors), errors
        assert table.get().tolist() == [0, 1, 2, 3]
        return [str(error) for error in errors]

    with rehearsal(1, 1) as job:
        for texts in job.run(work):
            assert all("works on one host only yet" in text for text in texts)


def test_nothing_stays_of_a_node_that_the_first_host_turns_away() -> None:
    mine, other = new_credentials(encrypted=False), new_credentials(encrypted=False)
    with Fabric(0, 2, other) as first:
        roster = Roster(1, ("a", "b"), (1, 1), first.listen(), mine.to_text(), rehearsal=True)
        before = set(threading.enumerate())
        with pytest.raises(StartupError, match="another job"):
            Node(2, abroad=(roster, Fabric(1, 2, mine), None))
        wait_for(lambda: set(threading.enumerate()) <= before)


def test_a_worker_of_another_host_is_turned_away() -> None:
    with rehearsal(1, 1) as job, pytest.raises(StartupError, match="belongs to host-1, not to host-0"):
        Session(job.nodes[0].address, 1)


def test_other_arguments_of_init_on_another_host_are_refused() -> None:
    with rehearsal(1, 1) as job:

        def begin(worker_id: int) -> Any:
            on_lost = ("stop", "continue")[worker_id]
            return outcome(
                lambda: job.session(worker_id, on_lost=on_lost, start_timeout_seconds=20).shutdown()
            )

        results = in_threads([lambda: begin(0), lambda: begin(1)])
    assert any(isinstance(r, StartupError) and "call init with the same arguments" in str(r) for r in results)


@pytest.mark.parametrize("encrypted", [False, True])
def test_a_stranger_at_the_coordinators_port_is_turned_away_and_changes_nothing(encrypted: bool) -> None:
    if encrypted:
        pytest.importorskip("OpenSSL", reason="what encrypts between hosts is not installed")

    def work(session: Session) -> list[float]:
        table = ArrayTableHandler(3, session=session)
        if session.worker_id == 0:
            for host in (1, 2):
                stranger = Hello(host, 2 + host // 2, 7, role=CONTROL)
                with pytest.raises((OSError, StartupError)):
                    connect(job.roster.coordinator, new_credentials(encrypted), stranger, Deadline.after(10))
        table.add(np.ones(3))
        session.barrier()
        values: list[float] = table.get().tolist()
        return values

    with rehearsal(1, 1, encrypted=encrypted) as job:
        assert job.run(work) == [[2.0] * 3] * 2


def test_every_node_knows_what_the_workers_of_all_hosts_have_done() -> None:
    with rehearsal(1, 1) as job:

        def work(session: Session) -> None:
            table = ArrayTableHandler(4, session=session, name="weights")
            for _ in range(session.worker_id + 3):
                table.add(np.ones(4))
            for node in job.nodes:
                wait_for(lambda node=node: _adds(node.status()) == {0: 3, 1: 4})
            session.barrier()
            for node, other in zip(job.nodes, ("host-1", "host-0"), strict=True):
                (link,) = node.status()["links"]
                assert (link["host"], link["state"]) == (other, "connected")
                assert min(link["bytes_sent"], link["bytes_received"]) > 16
                shown = Console(width=160, file=io.StringIO())
                shown.print(render([node.status()], {}))
                assert isinstance(shown.file, io.StringIO)
                assert re.search(rf"{other} +connected .* 0 times", shown.file.getvalue())
            session.barrier()

        job.run(work)


def _adds(status: dict[str, Any]) -> dict[int, int]:
    hosts = {worker["id"]: worker["host"] for worker in status["workers"]}
    assert hosts == {0: "host-0", 1: "host-1"}
    return {worker: line["adds"] for worker, line in status["tables"][0]["workers"].items()}


def test_workers_tell_each_other_across_hosts() -> None:
    def work(session: Session) -> Any:
        return [tell_all(session, f"{session.worker_id} says {i}") for i in range(3)]

    with rehearsal(2, 1) as job:
        results = job.run(work)
    assert results == [[{w: f"{w} says {i}" for w in range(3)} for i in range(3)]] * 3
