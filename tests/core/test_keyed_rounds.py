"""Keyed tables in synchronous jobs: the same bits in every worker and run, whoever is killed in a round."""

from __future__ import annotations

import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from core_support import Worker, bits, in_threads, outcome, together, wait_for
from keyed_support import Bench

import multiverso as mv
from multiverso.errors import DeadlockError, InterruptedRoundError, NotInThisJobError, WaitTimeoutError, WorkerLostError
from multiverso.kernels.keyed import rounds as kernels
from multiverso.layout import words as at
from multiverso.layout.keyed import at as keyed
from multiverso.layout.worker_index import WorkerIndex
from multiverso.memory.words import load64, store32, store64
from multiverso.runtime import Node, Session
from multiverso.shards import shard as shards
from multiverso.spec.table import TableSpec
from multiverso.updaters import Updater

UPDATERS = ["add", "sgd", "momentum", "adagrad", "rowwise_adagrad", "mean"]
DIM = 3
KEYS = np.random.default_rng(0).integers(-(2**63), 2**63, 60)


def asked(worker: int, number: int, dtype: str = "float32") -> list[tuple[Any, Any]]:
    """What a worker adds in a round: nothing, or several times, with some keys twice."""
    chance = np.random.default_rng([worker, number])
    adds = []
    for _ in range(chance.integers(0, 3)):
        keys = chance.choice(KEYS[: 10 + 5 * number], chance.integers(0, 12))
        scale = 10.0 ** chance.integers(-6, 7, (keys.size, DIM))
        adds.append((keys, (chance.standard_normal((keys.size, DIM)) * scale).astype(dtype)))
    return adds


def in_rounds(workers: int, rounds: int, dtype: str, **options: Any) -> list[Any]:
    def work(session: Session) -> Any:
        delays = random.Random()
        table = mv.KeyedTable(DIM, session=session, dtype=dtype, initial=2.0, **options)
        seen = []
        for number in range(rounds):
            for keys, delta in asked(session.worker_id, number, dtype):
                table.add(delta, keys)
                time.sleep(delays.random() * 0.002)
            seen.append(bits(table.get(KEYS)))
            assert len(table) == sum(keys.size for keys, _ in table.items())
        assert not any(table.check()[what] for what in ("twins", "misplaced", "shared", "lost", "held"))
        return seen

    return together(work, workers, sync=True)


def one_after_another(workers: int, rounds: int, dtype: str, updater: str) -> list[bytes]:
    """The same of dictionaries, but for the steps: one worker's asynchronous table makes them, with the sums."""

    def work(session: Session) -> Any:
        table = mv.KeyedTable(DIM, session=session, dtype=dtype, initial=2.0, updater=updater)
        seen = []
        for number in range(rounds):
            logs: list[dict[int, Any]] = []
            for worker in range(workers):
                adds = asked(worker, number, dtype)
                log: dict[int, Any] = {}
                for keys, delta in adds:
                    for key, row in zip(keys.tolist(), delta, strict=True):
                        log[key] = log[key] + row if key in log else row
                logs += [log] if adds else []
            for key in {key: 0 for log in logs for key in log}:
                rows = [log[key] for log in logs if key in log]
                if updater == "add":
                    for row in rows:
                        table.add(row[None], [key])
                else:
                    total = rows[0]
                    for row in rows[1:]:
                        total = total + row
                    mean = np.dtype(dtype).type(len(logs)) if updater == "mean" else 1
                    table.add((total / mean).astype(dtype)[None], [key])
            seen.append(bits(table.get(KEYS)))
        return seen

    seen: list[bytes] = together(work, 1)[0]
    return seen


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
@pytest.mark.parametrize("updater", UPDATERS)
def test_each_key_gets_one_step_a_round_with_the_sum_in_worker_order(updater: str, workers: int) -> None:
    expected = one_after_another(workers, 6, "float32", updater)
    assert in_rounds(workers, 6, "float32", updater=updater) == [expected] * workers
    assert in_rounds(workers, 6, "float32", updater=updater) == [expected] * workers, "in another run"


def test_integers() -> None:
    assert in_rounds(2, 4, "int64") == [one_after_another(2, 4, "int64", "add")] * 2


@pytest.mark.parametrize("updater", ["add", "adagrad"])
def test_its_rows_are_those_of_a_matrix(updater: str) -> None:
    def work(session: Session) -> Any:
        keyed_table = mv.KeyedTable(DIM, updater=updater, session=session)
        matrix = mv.MatrixTableHandler(20, DIM, updater=updater, session=session)
        chance = np.random.default_rng(session.worker_id)
        for _ in range(5):
            for _ in range(2):
                ids = chance.integers(0, 20, 30)
                delta = chance.standard_normal((30, DIM))
                keyed_table.add(delta, ids)
                matrix.add(delta, ids)
            assert bits(keyed_table.get(range(20))) == bits(matrix.get())

    together(work, 3, sync=True)


def test_many_keys_in_a_round_and_few_in_the_next() -> None:
    """The logs grow, within a round too, and begin anew; segments split while several enter keys."""

    def work(session: Session) -> Any:
        me, table = session.worker_id, mv.KeyedTable(1, session=session)
        for start in range(0, 30_000, 10_000):
            table.add(np.ones(10_000), np.arange(start, start + 10_000) + 10_000 * me)
        sums = [table.get(np.arange(50_000)).sum()]
        table.add([5.0], [3])
        sums.append(table.get(np.arange(50_000)).sum())
        return sums, len(table), table.check()["miscounted"]

    assert together(work, 3, sync=True) == [([90_000, 90_015], 50_000, 0)] * 3


def test_only_the_table_that_its_user_has_made_is_shown() -> None:
    """The small one beside it, whose rounds it goes through, counted every read a second time."""
    with Node(2) as node:

        def work(session: Session) -> Any:
            tables = [mv.KeyedTable(2, session=session, name=name) for name in ("words", None)]
            array = mv.ArrayTableHandler(3, session=session, name="array")
            if session.worker_id == 1:
                wait_for(lambda: node.status()["workers"][0]["waiting_for"] == "round 1 of keyed table words")
            for _ in range(3):
                for table in tables:
                    table.add([[1.0, 1.0]], [7])
                    table.get([7])
                array.get()
            session.barrier()
            seen = node.status()["tables"], list(session.statistics()["tables"])
            session.barrier()
            return seen

        (shown, known), _ = together(work, 2, sync=True, node=node)
    assert known == ["array"]
    assert [(table["name"], table["kind"]) for table in shown] == [
        ("array", "array"),
        ("words", "keyed"),
        (None, "keyed"),
    ]
    for table in shown:
        assert table["rounds"] == 3
        assert [line["gets"] for line in table["workers"].values()] == [3, 3]
    assert shown[1]["workers"][0]["wait_seconds"] > 0


# -- who comes and goes ------------------------------------------------------------------------------------------


def test_what_one_leaves_behind_counts_and_one_that_comes_late_has_the_same_rows() -> None:
    with Node(None) as node:
        ready = threading.Event()

        def early() -> Any:
            with Session(node.address, 0, sync=True, timeout_seconds=30) as session:
                table = mv.KeyedTable(1, session=session, name="t")
                table.add([1.0], [7])
                assert table.get([7]).tolist() == [[1.0]]
                table.add([10.0], [7])
                ready.set()
                # left with an add that nobody has read

        def late() -> Any:
            assert ready.wait(30)
            with Session(node.address, 1, sync=True, timeout_seconds=30) as session:
                table = mv.KeyedTable(1, session=session, name="t")
                table.add([100.0], [8])
                while table.get([7]).tolist() != [[11.0]]:
                    pass
                return table.get([7, 8]).tolist()

        assert in_threads([early, late])[1] == [[11.0], [100.0]]


KILLED = """
def work(session):
    table = mv.KeyedTable(1, session=session)
    say("there")
    number = 0
    while True:
        table.add(np.ones(300), np.arange(300) % 250)
        table.get([0])
        number += 1
        say(number)

with Session(node, worker_id, sync=True, timeout_seconds=60, start_timeout_seconds=60) as session:
    work(session)
"""


@pytest.mark.parametrize("rounds", [1, 4])
def test_killed_at_any_moment_the_others_have_its_rounds_wholly_or_not_at_all(rounds: int) -> None:
    """The victim's keys are those of the others, too: 50 of them it adds to twice."""
    with Node(3, on_lost="continue") as node, Worker(node, 2, KILLED) as victim:

        def work(me: int) -> Any:
            with Session(node.address, me, sync=True, timeout_seconds=60) as session:
                table = mv.KeyedTable(1, session=session)
                seen: list[Any] = []
                while len(seen) < 3 or 2 in session.live_workers() or len(seen) < after[0] + 3:
                    table.add(np.full(250, 1000.0), np.arange(250))
                    rows = table.get(np.arange(250))[:, 0]
                    seen.append(bits(rows))
                    mine = rows % 1000
                    assert (rows - mine == 2000 * len(seen)).all()
                    assert (mine[50:] == mine[50]).all()
                    assert (mine[:50] == 2 * mine[50]).all()
                    if me == 0 and len(seen) == rounds:
                        victim.process.send_signal(signal.SIGKILL)
                        after[0] = len(seen)
                return seen, table.check()

        after = [0]

        def meet() -> None:
            assert victim.hear() == ["there"]
            while outcome(victim.process.stdout.readline):  # type: ignore[union-attr]
                pass

        one, other, _ = in_threads([lambda: work(0), lambda: work(1), meet])
        shared = min(len(one[0]), len(other[0]))
        assert one[0][:shared] == other[0][:shared]
        assert not any(one[1][what] for what in ("twins", "misplaced", "shared", "lost"))


@pytest.mark.parametrize("options", [{"on_lost": "stop"}, {"on_lost": "continue"}])
def test_the_others_of_a_lost_one_stop_or_go_on(options: dict[str, str]) -> None:
    text = KILLED.replace("table.get([0])", "os.kill(os.getpid(), signal.SIGKILL)")

    with (
        Node(2, **options) as node,
        Worker(node, 1, text),
        Session(node.address, 0, sync=True, timeout_seconds=60) as session,
    ):
        table = mv.KeyedTable(1, session=session)
        table.add([1.0], [0])
        said = outcome(lambda: table.get([0]).tolist())
        if options["on_lost"] == "continue":
            assert said == [[1.0]]  # what it had added was in no round
        else:
            assert isinstance(said, WorkerLostError)
            assert said.worker_ids == (1,)


# -- deaths at every write, uncompiled ---------------------------------------------------------------------------


class Folding:
    """Three workers' logs of one round, and whoever folds them; uncompiled, a worker may die at any write."""

    KEYS = (list(range(8)), [3, 9, -4], [9, 3, 77])
    DELTAS = (1, 10, 100)

    def __init__(self, updater: Updater | None) -> None:
        def add_into(values: Any, delta: Any) -> None:  # number by number
            for i in range(values.size):
                self.bench.write()
                values[i] += delta[i]

        self.bench = bench = Bench(dim=2, updater=updater, integer=updater is None, broken={"add_into": add_into})
        for worker in range(3):
            bench.begin(worker)
        bench.add(0, [3, 5], 1000)
        spec = TableSpec("array", 1, kernels.PARTS, "int64")
        self.table = np.zeros(1 << 20, np.uint8)
        self.base = self.table.ctypes.data
        shards.initialise(self.base, spec, 1, WorkerIndex(3), at.SYNCHRONOUS)
        self.logs = np.zeros(4 << 16, np.uint8)
        for word, value in (
            (kernels.STRIDE, 1 << 16),
            (kernels.KEYS, 1 << 14),
            (kernels.DELTAS, 1 << 15),
            (kernels.CAPACITY, 100),
        ):
            store64(self.logs.ctypes.data + word, value)
        self.like = np.empty(0, bench.dtype)
        progress, call = np.zeros(at.ROUND_MEMBERS + 1, np.int64), np.zeros(2, np.int64)
        for worker, keys in enumerate(self.KEYS):
            progress[at.ROUND_STAGED] = 0
            delta = np.full(2 * len(keys), self.DELTAS[worker], bench.dtype)
            places = (bench.base, self.logs.ctypes.data, worker, progress)
            assert bench.kernels["stage"](*places, bench.array(keys), delta, call.ctypes.data) == 0
            line = self.base + load64(self.base + at.LINES) + at.LINE_STRIDE * worker
            store32(line + at.SOURCES + 4, 1)  # WHOLE, in round 1
            store64(line + at.PROPOSALS + 8, 0b111)
        self.update = int(updater is not None)

    def fold(self, me: int, part: int, members: int = 0b111) -> None:
        """Worker `me` folds a third of the hashes, or all: as its own, or in another's place."""
        how = kernels._Fold(self.bench.control, self.bench.base, self.logs.ctypes.data, self.update, me)
        lo, hi = (part * 352, min(1024, part * 352 + 352)) if members else (0, 1024)
        code = self.bench.kernels["fold_keys"](self.base, how, 1, 0, members, lo, hi, self.like)
        assert code == 0

    def rows(self) -> Any:
        keys = sorted({key for keys in self.KEYS for key in keys})
        size = load64(self.bench.base + keyed.ROW_BYTES)
        rows = self.bench.places["ROWS"] + size * self.bench.find(2, keys)
        return [self.bench.memory[row : row + size].tobytes() for row in rows.tolist()]

    def check(self) -> None:
        self.bench.begin(0)
        self.bench.begin(1)
        self.bench.check_rows()
        self.bench.check_counts()
        assert self.bench.held() == 0


def _halving() -> Updater:
    def apply(values, delta, state, stride, hyper, count):  # type: ignore[no-untyped-def]
        for i in range(count):
            state[i] = 0.5 * state[i] + delta[i]
            values[i] -= state[i]

    return Updater("test-halving", apply, states=1)


@pytest.mark.parametrize("updater", [None, _halving()])
def test_a_round_is_folded_once_whoever_dies_at_whatever_write(updater: Updater | None) -> None:
    """Worker 1 dies in its own part, worker 0 when it does that again, and worker 2 does the rest."""
    work = Folding(updater)
    image = work.bench.memory.copy()
    for worker in range(3):
        work.fold(worker, worker)
    expected, writes = work.rows(), 0
    if updater is None:
        by_key = dict(zip(sorted({k for keys in work.KEYS for k in keys}), expected, strict=True))
        values = {key: int.from_bytes(row[:8], "little") for key, row in by_key.items()}
        assert values == {-4: 10, 0: 1, 1: 1, 2: 1, 3: 1111, 4: 1, 5: 1001, 6: 1, 7: 1, 9: 110, 77: 100}
    chance = random.Random(5)
    while True:
        work.bench.memory[:] = image
        for worker in range(3):
            work.bench.set_alive(worker, True)
        work.fold(0, 0)
        if not work.bench.dies_after(writes, lambda: work.fold(1, 1)):
            break
        work.bench.set_alive(1, False)
        if work.bench.dies_after(chance.randrange(writes + 40), lambda: work.fold(0, 1)):
            work.bench.set_alive(0, False)
        work.fold(2, 2)
        work.fold(2, 1)
        assert work.rows() == expected, f"a death at write {writes}"
        work.check()
        writes += 1
    assert writes > 30


def test_a_round_that_all_have_left_is_finished_if_it_had_begun() -> None:
    work = Folding(None)
    image = work.bench.memory.copy()
    work.fold(2, 0, members=0)
    assert (work.bench.find(2, [9, 77]) < 0).all(), "nobody had decided it"
    store64(work.base + at.DECISIONS + 8, (1 << 16) | 1)
    work.fold(2, 0, members=0)
    expected = work.rows()
    work.bench.memory[:] = image
    assert work.bench.dies_after(40, lambda: work.fold(1, 1))
    work.bench.set_alive(1, False)
    work.fold(2, 0, members=0)
    assert work.rows() == expected


# -- waits, and calls that raise ---------------------------------------------------------------------------------


def test_a_deadline_ends_a_read_which_goes_on_when_it_is_repeated() -> None:
    with Node(2) as node:
        late = threading.Event()

        def one() -> Any:
            with Session(node.address, 0, sync=True, timeout_seconds=60) as session:
                table = mv.KeyedTable(1, session=session)
                table.add([1.0], [1])
                with pytest.raises(WaitTimeoutError, match=r"round 1 of the keyed table of 1 float32"):
                    table.get([1], timeout_seconds=0.05)
                with pytest.raises(InterruptedRoundError, match="call get again"):
                    table.add([5.0], [1])
                for ask in (lambda: len(table), lambda: table.contains([1]), table.close):
                    with pytest.raises(InterruptedRoundError):
                        ask()
                late.set()
                return table.get([1, 2]).tolist(), table.get([1]).tolist(), len(table)

        def other() -> Any:
            with Session(node.address, 1, sync=True, timeout_seconds=60) as session:
                table = mv.KeyedTable(1, session=session)
                assert late.wait(30)
                table.add([2.0], [2])
                return table.get([1, 2]).tolist(), table.get([1]).tolist(), len(table)

        assert in_threads([one, other]) == [([[1.0], [2.0]], [[1.0]], 2)] * 2


def test_unequal_rounds_are_a_deadlock_that_names_the_table() -> None:
    def work(session: Session) -> Any:
        table = mv.KeyedTable(1, session=session, name="words")
        session.barrier()  # a worker may make a table that has a name when the others are rounds ahead
        table.get([1])
        if session.worker_id == 0:
            return outcome(lambda: table.get([1]))
        return outcome(session.barrier)

    told = [str(said) for said in together(work, 2, sync=True) if isinstance(said, DeadlockError)]
    assert told, "whoever is told first leaves, and the other may go on"
    assert "round 2 of keyed table words, which needs worker 1" in told[0]


def test_a_table_is_not_closed_with_adds_that_no_round_has_taken_up() -> None:
    def work(session: Session) -> Any:
        table = mv.KeyedTable(1, session=session)
        table.add([1.0], [1])
        with pytest.raises(InterruptedRoundError, match="which no round has taken up"):
            table.close()
        rows = table.get([1]).tolist()
        table.close()
        table.close()
        again = mv.KeyedTable(1, session=session)
        return rows, again.get([1]).tolist()

    assert together(work, 2, sync=True) == [([[2.0]], [[0.0]])] * 2


def test_one_name_twice_is_one_part_in_the_rounds_and_a_name_is_used_again() -> None:
    def work(session: Session) -> Any:
        seen = []
        for _ in range(2):
            one = mv.KeyedTable(1, session=session, name="t")
            two = mv.KeyedTable(1, session=session, name="t")
            session.barrier()
            one.add([1.0], [1])
            two.add([1.0], [1])
            seen.append(two.get([1]).tolist())
            one.close()
            seen.append(two.get([1]).tolist())
            session.barrier()
            two.close()
            session.barrier()
        return seen

    assert together(work, 2, sync=True) == [[[[4.0]]] * 4] * 2


@pytest.mark.parametrize("options", [{"admission": 2}, {"eviction": mv.Eviction(idle_ticks=3)}])
def test_what_a_synchronous_job_does_not_have_is_refused(options: dict[str, Any]) -> None:
    with Node(1) as node, Session(node.address, sync=True) as session:
        with pytest.raises(NotInThisJobError, match="admits each key at once"):
            mv.KeyedTable(2, session=session, **options)
        table = mv.KeyedTable(2, session=session)
        with pytest.raises(NotInThisJobError, match="not removed"):
            table.remove([1])


# -- files -------------------------------------------------------------------------------------------------------


def test_a_saved_table_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    """Rows, state and keys; saved between two rounds, loaded into a table that had others."""

    def work(session: Session, loaded: bool) -> Any:
        table = mv.KeyedTable(DIM, session=session, updater="momentum", name="t")
        session.barrier()  # a worker may make a table that has a name when the others are rounds ahead
        if loaded:
            table.add(np.ones((3, DIM)), [1, 2, 3])
            table.get([1])
            if session.worker_id == 0:
                table.load(tmp_path / "t.safetensors")
            session.barrier()
        else:
            for number in range(3):
                for keys, delta in asked(session.worker_id, number):
                    table.add(delta, keys)
                table.get([])
        if session.worker_id == 0 and not loaded:
            table.save(tmp_path / "t.safetensors")
            table.save_increment(tmp_path / "increments")
        size = len(table)
        for keys, delta in asked(session.worker_id, 5):
            table.add(delta, keys)
        return size, bits(table.get(KEYS))

    first = together(lambda session: work(session, False), 2, sync=True)
    assert together(lambda session: work(session, True), 2, sync=True) == first


def test_what_a_replacement_adds_is_in_a_round_of_the_others_again() -> None:
    text = KILLED.replace("session=session", 'session=session, name="t"')
    with (
        Node(2, on_lost="continue", replaces=True) as node,
        Worker(node, 1, text) as first,
        Session(node.address, 0, sync=True, timeout_seconds=60) as session,
    ):
        table = mv.KeyedTable(1, session=session, name="t")
        while table.get([200]) < 3:
            table.add([1.0], [-1])
        first.process.kill()
        while 1 in session.live_workers():
            table.get([-1])
        before = table.get([200])
        with Worker(node, 1, text):
            while table.get([200]) < before + 3:
                table.add([1.0], [-1])
        assert (table.get([200, 249]) == table.get([201])).all()
        assert (table.get([0, 49]) == 2 * table.get([201])).all()
        assert not table.check()["lost"]
