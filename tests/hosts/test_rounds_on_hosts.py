"""Synchronous workers on several hosts get the bits that they would get on one, whatever happens to the connections."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from core_support import in_threads, let_die, outcome, wait_for
from fabric_support import interrupt
from rehearsing import rehearsal

from multiverso.errors import SnapshotError, StartupError, WorkerLostError
from multiverso.hosts.codecs import Wire
from multiverso.hosts.options import ExchangeOptions
from multiverso.layout import words as at
from multiverso.params import SharedParams
from multiverso.rules import local_sgd
from multiverso.runtime import Node, Session
from multiverso.runtime.node import numbers
from multiverso.runtime.session import replacing
from multiverso.tables import ArrayTableHandler, MatrixTableHandler
from multiverso.tables.held import check_all
from multiverso.tables.save_all import load_all, save_all
from multiverso.updaters import Updater, adam, chain, momentum, schedule

SYNC: dict[str, Any] = {"sync": True}
ROUNDS = 4


def drift(values: Any, delta: Any, state: Any, stride: int, hyper: Any, count: int) -> None:
    for i in range(count):
        state[i] = hyper[0] * state[i] + delta[i]
        values[i] += state[i] * state[stride + i]
        state[stride + i] *= hyper[1]


def training(session: Session) -> list[Any]:
    """Every kind of round, with numbers whose sums depend on their order; returns all that was read."""
    me, rng = session.worker_id, np.random.default_rng(session.worker_id)
    first = np.random.default_rng(100).standard_normal(300_000).astype(np.float32)
    array = ArrayTableHandler(first.size, first, session=session)  # three chunks
    updated = ArrayTableHandler(
        140_000, updater=Updater("drift", drift, states=2, hyper=(0.9, 0.5), mean=True), session=session
    )
    matrix = MatrixTableHandler(40, 9, updater="momentum", session=session)
    small = ArrayTableHandler(3, [me + 0.1] * 3, initial="sum", session=session)
    counted = ArrayTableHandler(7, updater=adam(count_per="table"), session=session)
    local, last = np.zeros(first.size, np.float32), np.zeros(first.size, np.float32)
    read: list[Any] = []
    for number in range(ROUNDS):
        if number != me:  # who adds nothing is in the round all the same
            array.add(rng.standard_normal(first.size).astype(np.float32))
            array.add(np.full(first.size, 1e-3 * me))
        read.append(array.get())
        local += rng.standard_normal(first.size).astype(np.float32)
        array.exchange(local, last)
        read.append(local.copy())
        updated.add(rng.standard_normal(updated.size))
        read.append(updated.get())
        ids = rng.choice(40, 5, replace=False)
        matrix.add(rng.standard_normal((5, 9)), row_ids=ids)
        read.append(matrix.get(row_ids=ids))
        if number % 3 != me:
            counted.add(rng.standard_normal(7))  # its one step for each round, whoever adds
        read.append(counted.get())
        small.add(rng.standard_normal(3))
    read += [small.get(), matrix.get(), array.version, array.snapshot()]
    session.barrier()
    return read


def on_one_host(workers: int, function: Any, **options: Any) -> list[Any]:
    def work(worker_id: int) -> Any:
        with Session(node.address, worker_id, timeout_seconds=30, **options) as session:
            return function(session)

    with Node(workers) as node:
        return in_threads([lambda i=i: work(i) for i in range(workers)])  # type: ignore[misc]


def assert_same(one: Any, other: Any) -> None:
    for mine, theirs in zip(one, other, strict=True):
        np.testing.assert_array_equal(mine, theirs, strict=True)


def test_rounds_on_several_hosts_have_the_bits_of_one_host() -> None:
    alone = on_one_host(4, training, **SYNC)
    with rehearsal(2, 1, 1) as job:
        cutting = threading.Event()

        def cut() -> None:
            for _ in range(100):  # not for ever: on a slow machine nothing might come through between two
                if cutting.wait(0.02):
                    return
                for node, peer in ((job.nodes[1], 0), (job.nodes[2], 1)):
                    interrupt(node.hosts.fabric, peer)  # type: ignore[attr-defined]

        cutter = threading.Thread(target=cut)
        cutter.start()
        try:
            together = job.run(training, **SYNC)
        finally:
            cutting.set()
            cutter.join()
    for mine, theirs in zip(alone, together, strict=True):
        assert_same(mine, theirs)


def test_a_worker_in_a_dead_ones_place_joins_the_next_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the dead one had added and not read is gone. A host without a worker gets all from another."""
    monkeypatch.setattr(numbers, "has_ended", lambda pid: True)
    monkeypatch.setattr(replacing, "_LONGEST_SECONDS", 0.1)  # the others stand still meanwhile
    size = 300_000

    def open_tables(session: Session) -> list[Any]:
        plain = ArrayTableHandler(size, session=session)
        return [plain, MatrixTableHandler(7, 3, updater="adagrad", session=session)]

    def rounds(tables: list[Any], number: int) -> list[Any]:
        seen = []
        for _ in range(number):
            for table in tables:
                table.add(np.ones(table.shape))
                seen.append(table.get().copy())
        return seen

    def all_read(tables: list[Any], number: int) -> list[Any]:
        first, *others = in_threads([lambda t=t: rounds(t, number) for t in tables])  # type: ignore[misc]
        for other in others:
            assert_same(first, other)
        return [float(np.unique(values)[0]) for values in first if values.ndim == 1]

    with rehearsal(2, 1, on_lost="continue", replaces=True) as job:
        sessions = in_threads([lambda i=i: job.session(i, **SYNC) for i in range(3)])  # type: ignore[misc]
        tables = in_threads([lambda s=s: open_tables(s) for s in sessions])  # type: ignore[misc]
        gone: list[Session] = []
        for dead in ({1}, {0}, {2}, {0, 1}):
            before = all_read(tables, 2)[-1]
            for worker in dead:
                tables[worker][0].add(np.full(size, 100.0))
                gone.append(sessions[worker])
                let_die(sessions[worker])
            for session in sessions:
                for worker in dead:
                    wait_for(lambda s=session, d=worker: s.control.liveness(d) == at.LOST)  # type: ignore[misc]
            left = [tables[worker] for worker in {0, 1, 2} - dead]
            step = len(left)
            assert all_read(left, 3) == [before + step, before + 2 * step, before + 3 * step]
            for worker in dead:
                sessions[worker] = again = job.session(worker, **SYNC)
                assert again.incarnation > 0
                tables[worker] = open_tables(again)
            assert all_read(tables, 2)[-1] == before + 3 * step + 6
        in_threads([session.barrier for session in sessions])
        in_threads([session.shutdown for session in (*sessions, *gone)])


@pytest.mark.parametrize("wire", ["native", "int8"])
def test_the_others_finish_a_round_without_a_lost_host_with_the_same_bits(wire: str) -> None:
    size, last = 300_000, 30
    with rehearsal(1, 1, 1, on_lost="continue") as job:
        under_way = threading.Event()

        def work(worker_id: int) -> Any:
            with job.session(worker_id, **SYNC, exchange=ExchangeOptions.of(wire=wire)) as session:
                table = ArrayTableHandler(size, session=session)
                rng, read = np.random.default_rng(worker_id), []
                for number in range(last):
                    if worker_id == 1 and number == 5:
                        under_way.set()
                        job.nodes[1].close()
                        return None
                    table.add(rng.standard_normal(size).astype(np.float32))
                    read.append(table.get())
                live = session.live_workers()
                session.barrier()
                return read, live

        first, gone, third = in_threads([lambda i=i: work(i) for i in range(3)])  # type: ignore[misc]
    assert gone is None
    assert under_way.is_set()
    assert first[1] == third[1] == [0, 2]
    assert_same(first[0], third[0])
    alone = [np.random.default_rng(worker_id) for worker_id in (0, 1, 2)]
    total = np.zeros(size, np.float32)
    for number in range(last):
        for worker_id, rng in enumerate(alone):
            part = rng.standard_normal(size).astype(np.float32)
            if worker_id != 1 or number < 5:
                total = total + part
        if wire == "native":
            np.testing.assert_array_equal(first[0][number], total)
        else:  # each host, the lost one too, has left out less than a step of 1/16 or two
            np.testing.assert_allclose(first[0][number], total, atol=0.4)


def test_a_lost_worker_ends_the_rounds_of_all_hosts_and_one_who_leaves_does_not() -> None:
    out_of_the_barrier = threading.Event()
    with rehearsal(2, 1, 1) as job:

        def work(worker_id: int) -> Any:
            with job.session(worker_id, **SYNC) as session:
                table = ArrayTableHandler(3, session=session)
                table.add([1.0, 2.0, 3.0])
                table.get()
                table.add([worker_id, 0.0, 0.0])
                if worker_id < 2:
                    return None  # the whole first host leaves, where rounds begin; what it has added counts
                table.get()
                read = table.get().tolist()
                session.barrier()
                if worker_id == 2:
                    assert out_of_the_barrier.wait(60)
                    job.nodes[1].close()
                    return read
                out_of_the_barrier.set()
                return read, outcome(table.get)

        results = in_threads([lambda i=i: work(i) for i in range(4)])  # type: ignore[misc]
    assert results[2] == [10.0, 8.0, 12.0]
    read, error = results[3]
    assert read == results[2]
    assert isinstance(error, WorkerLostError)
    assert error.worker_ids == (2,)
    assert "host-1" in str(error)


@pytest.mark.parametrize("staleness", [0, 2])
def test_no_read_is_staler_than_its_bound_on_any_host(staleness: int) -> None:
    ticks = 40

    def work(session: Session) -> int:
        me, slack = session.worker_id, 0
        table = MatrixTableHandler(4, 40_000, session=session)
        for mine in range(ticks):
            table.add(np.ones((1, 40_000)), row_ids=[me])
            counts = table.get()[:, ::1000]  # every worker adds a one to its row before each of its ticks
            assert counts.min() >= mine - staleness, counts[:, 0]
            assert (counts[me] == mine + 1).all()
            slack = max(slack, int(mine - counts.min()))
            if me == mine % 4:
                threading.Event().wait(0.003)
        session.barrier()
        assert (table.snapshot() == ticks).all()
        return slack

    with rehearsal(2, 1, 1) as job:
        assert max(job.run(work, staleness=staleness)) <= staleness


@pytest.mark.parametrize("options", [{}, {"sync": True}, {"staleness": 1}], ids=str)
def test_what_was_saved_is_loaded_on_all_hosts(options: dict[str, Any], tmp_path: Path) -> None:
    def work(session: Session) -> Any:
        plain = ArrayTableHandler(70_000, session=session)
        moved = ArrayTableHandler(5, updater="momentum", session=session)

        def go_on() -> list[Any]:
            for table in (plain, moved):
                table.add(np.full(table.size, 1.0 + session.worker_id))
            read = [plain.get(), moved.get()]
            session.barrier()
            after = [plain.snapshot(), moved.snapshot(), *read] if options.get("sync") else [plain.snapshot()]
            session.barrier()  # nobody adds before all have read
            return after

        go_on()
        if session.worker_id == 1:
            save_all(session, tmp_path)
        session.barrier()
        before = [plain.snapshot(), moved.snapshot(), [state.copy() for state in moved._shard.states()]]
        session.barrier()
        first, other = go_on(), go_on()
        load_all(session, tmp_path)
        session.barrier()
        after = [plain.snapshot(), [state.copy() for state in moved._shard.states()]]
        np.testing.assert_array_equal(before[0], after[0])
        if options.get("sync"):
            np.testing.assert_array_equal(before[2], after[1])
        session.barrier()
        assert_same(go_on(), first)
        error = outcome(lambda: check_all(session, "it", [np.ones(session.worker_id)]))
        assert isinstance(error, SnapshotError), error
        session.barrier()
        return other

    with rehearsal(2, 1) as job:
        assert len(job.run(work, **options)) == 3


def test_what_one_worker_sets_between_two_barriers_is_everybodys() -> None:
    def work(session: Session) -> Any:
        table = ArrayTableHandler(300_000, session=session)
        moved = ArrayTableHandler(4, updater="momentum", session=session)
        rate = schedule(lambda step: 1 / (step + 1))
        slower = ArrayTableHandler(4, updater=chain(rate, momentum(1.0, 0.0)), session=session)
        for number in range(3):
            table.add(np.ones(table.size))
            table.get()
            slower.add(np.ones(4))
            slower.get()
            moved.add(np.ones(4))
            moved.get()
            session.barrier()
            if session.worker_id == number:
                table.set(np.arange(table.size) + number)
                moved.set(np.full(4, 7.0 + number))
            session.barrier()
        table.add(np.ones(table.size))
        read = table.snapshot(), moved.snapshot().tolist(), table.get(), slower.snapshot()
        session.barrier()
        return read

    with rehearsal(1, 2) as job:
        for set_, moved, added, slower in job.run(work, sync=True):
            np.testing.assert_allclose(slower, -3 * (1 + 1 / 2 + 1 / 3))  # on each host
            np.testing.assert_array_equal(set_, np.arange(300_000) + 2)
            np.testing.assert_array_equal(added, np.arange(300_000) + 5)
            assert moved == [9.0] * 4


def test_a_table_travels_its_own_way() -> None:
    def work(session: Session) -> Any:
        tables = [
            ArrayTableHandler(9, session=session),
            ArrayTableHandler(9, session=session, wire="int8", every=0.25),
            MatrixTableHandler(3, 3, session=session, every="7 adds"),
        ]
        for table in tables:
            table.add(np.full(9, 1 + session.worker_id))
        session.barrier()
        return [table.get().reshape(-1).tolist() for table in tables]

    with rehearsal(1, 1) as job:
        held = job.nodes[0].hosts.fabric.tables.held  # type: ignore[attr-defined]
        results = job.run(work, exchange=ExchangeOptions.of(wire="bfloat16", every=0.5))
    assert results == [[[3.0] * 9] * 3] * 2
    assert [(one.wire.number, one.every.seconds, one.every.changes) for one in held.values()] == [
        (Wire.of("bfloat16", "float32").number, 0.5, 0),
        (Wire.of("int8", "float32").number, 0.25, 0),
        (Wire.of("bfloat16", "float32").number, 0.0, 7),
    ]


@pytest.mark.parametrize(
    ("wire", "options"),
    [
        *((wire, SYNC) for wire in ("bfloat16", "int8", "topk:0.2", "topk:0.9")),
        ("topk:0.2", {"sync": True, "quorum": 1, "grace_seconds": 1000}),
    ],
    ids=["bfloat16", "int8", "topk:0.2", "topk:0.9", "topk:0.2, quorum"],
)
def test_coded_sums_have_the_same_bits_on_all_hosts_and_in_all_runs(wire: str, options: dict[str, Any]) -> None:
    """What a format leaves out goes with later rounds: in the end all is there that was added."""
    size, rounds = 140_000, 3  # three chunks

    def delta(worker: int, number: int) -> Any:
        return np.random.default_rng([worker, number]).standard_normal(size).astype(np.float32)

    def work(session: Session) -> list[Any]:
        me, read = session.worker_id, []
        array = ArrayTableHandler(size, delta(9, 9), session=session)
        updated = ArrayTableHandler(3000, updater="momentum", session=session)
        counted = ArrayTableHandler(7, dtype="int64", session=session)
        own = ArrayTableHandler(7, dtype="float64", wire="native", session=session)
        for number in range(rounds + 30):
            array.add(delta(me, number) if number < rounds else 0)
            updated.add(delta(me, number)[:3000])
            counted.add(1 << 40)
            own.add(1 / 3)
            read += [array.get(), updated.get(), counted.get(), own.get()]
        session.barrier()
        return [values.tobytes() for values in read]

    def together() -> tuple[list[Any], int]:
        with rehearsal(2, 1, 1) as job:
            found = job.run(work, **options, exchange=ExchangeOptions.of(wire=wire))
            fabric = job.nodes[1].hosts.fabric  # type: ignore[attr-defined]
            return found, sum(to["bytes_sent"] for to in fabric.statistics().values())

    found, sent = together()
    assert all(read == found[0] for read in found)
    again, _ = together()
    assert again == found
    exact = delta(9, 9) + sum(delta(worker, number) for worker in range(4) for number in range(rounds))
    first, last = (np.frombuffer(found[0][4 * number], np.float32) for number in (0, rounds + 29))
    assert np.abs(first - delta(9, 9) - sum(delta(worker, 0) for worker in range(4))).max() > 1e-3
    np.testing.assert_allclose(last, exact, atol=1e-4)
    assert set(np.frombuffer(found[0][-2], np.int64)) == {4 * (rounds + 30) << 40}
    np.testing.assert_allclose(np.frombuffer(found[0][-1], np.float64), 4 / 3 * (rounds + 30), rtol=1e-14)
    # the middle of a chain sends each sum up and each total down
    assert sent < {"bfloat16": 0.55, "int8": 0.3, "topk:0.2": 0.45, "topk:0.9": 1.9}[wire] * 2 * 4 * (size + 3000) * (
        rounds + 30
    )


def test_what_a_format_cannot_hold_travels_as_it_is_and_leaves_the_rest_alone() -> None:
    def work(session: Session) -> list[Any]:
        table, read = ArrayTableHandler(1000, np.arange(1000), session=session), []
        for number in range(3):
            delta = np.full(1000, 2.0, np.float32)
            if number == 1 and session.worker_id == 2:
                delta[7] = np.inf
            table.add(delta)
            read.append(table.get())
        session.barrier()
        return read

    with rehearsal(1, 1, 1) as job:
        found = job.run(work, **SYNC, exchange=ExchangeOptions.of(wire="int8"))
    for read in found:
        for number, values in enumerate(read, 1):
            expected = np.arange(1000, dtype=np.float32) + 6 * number
            expected[7] = np.inf if number > 1 else expected[7]
            np.testing.assert_array_equal(values, expected)


def test_rounds_have_no_rule_between_hosts_and_no_pace_of_their_own() -> None:
    with rehearsal(1, 1) as job, pytest.raises(StartupError, match="leave every= and between="):
        job.session(0, sync=True, exchange=ExchangeOptions.of(wire="int8", every=2))
    with rehearsal(1, 1) as job:
        sessions = in_threads([lambda i=i: job.session(i, **SYNC) for i in range(2)])  # type: ignore[misc]
        for session in sessions:
            with pytest.raises(StartupError, match="a table has every='2': leave that out"):
                ArrayTableHandler(3, wire="int8", every=2, session=session)
        in_threads([session.shutdown for session in sessions])


@pytest.mark.parametrize("longer", [(2,), (1, 2)])
def test_unequal_rounds_are_told_on_each_host_whose_nodes_have_no_standard_error(
    longer: tuple[int, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    """The first host's node says it where it is heard; its last worker may have left before those of other hosts."""

    def work(session: Session) -> None:
        table = ArrayTableHandler(3, session=session)
        for _ in range(3 + (session.worker_id in longer)):
            table.get()

    with rehearsal(2, 2) as job:
        job.run(work, **SYNC, node_is_silent=True)
    lines = [line for line in capfd.readouterr().err.splitlines() if "different numbers of rounds" in line]
    hosts = len({job.roster.host_of(worker) for worker in longer})
    assert len(lines) == hosts, lines
    assert all(line.startswith("multiverso: table 1: ") and " after 4)" in line for line in lines)


@pytest.mark.parametrize("fragments", [1, 3])
def test_fragments_that_take_turns_have_the_bits_of_one_host(fragments: int) -> None:
    def work(session: Session) -> list[bytes]:
        rule, seen = local_sgd(), []
        shared = SharedParams([np.zeros(200, "f4")], every=3, fragments=fragments, rule=rule, session=session)
        for step in range(10):
            shared.arrays[0] += np.random.default_rng([session.worker_id, step]).standard_normal(200).astype("f4")
            shared.step()
            seen.append(shared.arrays[0].tobytes())
        shared.finish(shared.exchange)
        return [*seen, shared.arrays[0].tobytes()]

    with rehearsal(2, 1) as job:
        assert job.run(work, **SYNC) == on_one_host(3, work, **SYNC)
