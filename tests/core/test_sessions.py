"""A session's life: before, during, after, again; in forked children; alone and several at once."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from core_support import SECONDS, Worker, in_threads, outcome, shared_memory_of, together

import multiverso as mv
from multiverso.errors import ClosedError, NodeLostError, StartupError, WaitTimeoutError
from multiverso.hosts.options import ExchangeOptions
from multiverso.runtime import Node, Session, observe

MODULE_CALLS: dict[str, Any] = {
    "barrier": mv.barrier,
    "workers_num": mv.workers_num,
    "num_workers": mv.num_workers,
    "worker_id": mv.worker_id,
    "server_id": mv.server_id,
    "is_master_worker": mv.is_master_worker,
    "live_workers": mv.live_workers,
    "shard": lambda: mv.shard(10),
    "stats": mv.stats,
    "save": lambda: mv.save("/nonexistent"),
    "load": lambda: mv.load("/nonexistent"),
    "current": mv.current,
    "array": lambda: mv.ArrayTableHandler(3),
    "matrix": lambda: mv.MatrixTableHandler(3, 2),
}
TABLE_CALLS: dict[str, Any] = {
    "add": lambda t: t.add([1, 1, 1]),
    "get": lambda t: t.get(),
    "get into": lambda t: t.get(out=np.zeros(3, "f4")),
    "exchange": lambda t: t.exchange(np.zeros(3, "f4"), np.ones(3, "f4")),
    "add_async": lambda t: t.add_async([1, 1, 1]),
    "get_async": lambda t: t.get_async(),
    "exchange_async": lambda t: t.exchange_async(np.zeros(3, "f4"), np.ones(3, "f4")),
    "view": lambda t: t.view(),
    "snapshot": lambda t: t.snapshot(),
    "version": lambda t: t.version,
    "save": lambda t: t.save("/nonexistent/file"),
    "load": lambda t: t.load("/nonexistent/file"),
}


@pytest.fixture
def initialised() -> Any:
    mv.init(timeout_seconds=30)
    yield
    mv.shutdown()


def in_a_fresh_process(text: str) -> str:
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_before_init_every_call_says_what_to_do() -> None:
    text = f"""
import sys
sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parents[1] / "support")]!r}
import test_sessions as tests
from multiverso.errors import NotInitializedError
for name, call in tests.MODULE_CALLS.items():
    try:
        call()
    except NotInitializedError as error:
        assert "call multiverso.init() first" in str(error), error
    else:
        raise AssertionError(name)
import multiverso
multiverso.shutdown()  # does nothing
"""
    in_a_fresh_process(text)


def test_after_shutdown_every_call_says_so() -> None:
    mv.init()
    table = mv.ArrayTableHandler(3, [1, 2, 3])
    mv.shutdown()
    mv.shutdown()
    for call in MODULE_CALLS.values():
        with pytest.raises(ClosedError, match=r"shutdown\(\) was called; call init\(\) again"):
            call()
    for call in TABLE_CALLS.values():
        with pytest.raises(ClosedError):
            call(table)


def test_a_job_of_one_worker() -> None:
    mv.init()
    assert (mv.workers_num(), mv.num_workers(), mv.worker_id(), mv.server_id()) == (1, 1, 0, 0)
    assert mv.is_master_worker()
    assert mv.live_workers() == [0]
    mv.barrier()
    table = mv.ArrayTableHandler(3, init_value=[1, 2, 3])
    table.add([1, 1, 1], sync=True)
    np.testing.assert_array_equal(table.get(sync=False), [2, 3, 4])
    with pytest.raises(StartupError, match=r"call shutdown\(\) first"):
        mv.init()
    mv.shutdown()


@pytest.mark.parametrize("options", [{}, {"sync": True}, {"staleness": 0}])
def test_init_after_shutdown_begins_anew(options: dict[str, Any]) -> None:
    for turn in range(3):
        mv.init(**options)
        table = mv.ArrayTableHandler(3)
        assert table.number == 1
        table.add([turn, 1, 1])
        np.testing.assert_array_equal(table.get(), [turn, 1, 1])
        mv.shutdown()
    del table
    gc.collect()
    assert not shared_memory_of(os.getpid())


@pytest.mark.parametrize("options", [{}, {"sync": True}, {"staleness": 0}])
def test_shutdown_frees_the_memory_at_once(options: dict[str, Any]) -> None:
    """Nothing waits for the garbage collector: the next job may need the room."""
    gc.collect()
    gc.disable()
    try:
        mv.init(**options)
        tables = [mv.ArrayTableHandler(3), mv.ArrayTableHandler(3, name="named"), mv.MatrixTableHandler(2, 2)]
        twin = mv.ArrayTableHandler(3, name="named")
        tables[0].add([1, 1, 1])
        tables[0].get_async().wait()
        mv.barrier()
        mv.shutdown()
        del tables, twin
        assert not shared_memory_of(os.getpid())
    finally:
        gc.enable()


def test_views_outlive_shutdown_frozen() -> None:
    mv.init()
    tables = [mv.ArrayTableHandler(1000, n) for n in (1, 2)]
    views = [table.view() for table in tables]
    tables[0].add(np.ones(1000))
    mv.shutdown()
    mv.init()
    mv.ArrayTableHandler(1000, 99)
    assert [view[0] for view in views] == [2, 2]
    assert (views[0] == 2).all()
    assert not views[0].flags.writeable
    mv.shutdown()
    del tables, views


def test_a_view_is_frozen_while_others_go_on() -> None:
    left, added = threading.Event(), threading.Event()

    def work(session: Session) -> Any:
        table = mv.ArrayTableHandler(100_000, 1, session=session)
        if session.worker_id == 0:
            view = table.view()
            session.shutdown()
            left.set()
            assert added.wait(30)
            return view.max()
        assert left.wait(30)
        table.add(np.ones(100_000))
        added.set()
        return table.get().max()

    assert together(work, 2) == [1, 2]


def test_several_sessions_of_several_jobs_in_one_process() -> None:
    with Node(1) as a, Node(1) as b, Session(a.address) as one, Session(b.address, sync=True) as two:
        tables = [mv.ArrayTableHandler(2, session=session) for session in (one, two)]
        tables[0].add([1, 1])
        tables[1].add([2, 2])
        assert [table.get().tolist() for table in tables] == [[1, 1], [2, 2]]
        assert repr(one) == "<Session of worker 0 of 1>"
        assert repr(two) == "<Session of worker 0 of 1>"
    assert repr(one) == "<Session of worker 0 of 1, closed>"


def test_places_in_a_job() -> None:
    with Node(2) as node:

        def third() -> Any:
            with Session(node.address, 0), pytest.raises(StartupError) as refused:
                Session(node.address, 0)
            return str(refused.value)

        def second() -> Any:
            with Session(node.address, 1) as session:
                return session.workers_num

        said, number = in_threads([third, second])
        assert "worker 0 is already there: two processes have the same worker_id" in said
        assert number == 2
    with Node(1) as node:
        with Session(node.address), pytest.raises(StartupError, match="the job's 1 places are taken"):
            Session(node.address)
        with pytest.raises(StartupError, match=r"worker_id 7 is not in 0 \.\. 0"):
            Session(node.address, 7)
        with pytest.raises(StartupError, match="expects 3 workers, but the job has 1"):
            Session(node.address, workers_num=3)
    with pytest.raises(StartupError, match="no node listens at"):
        Session(node.address)


@pytest.mark.parametrize("workers", [0, -1, 65])
def test_a_node_has_1_to_64_workers(workers: int) -> None:
    with pytest.raises(StartupError, match="1 to 64 workers"):
        Node(workers)


def test_wrong_options_of_a_node_and_of_init() -> None:
    with pytest.raises(StartupError, match="'stop' or 'continue'"):
        Node(1, on_lost="wait")
    with pytest.raises(StartupError, match="'stop' or 'continue'"):
        mv.init(on_lost="wait")
    for bad in (0, -1, True, "soon", [1]):
        with pytest.raises(StartupError, match=r"^timeout_seconds: a timeout is .* seconds, above 0"):
            mv.init(timeout_seconds=bad)  # type: ignore[arg-type]
    with pytest.raises(StartupError, match=r"^start_timeout_seconds: a timeout is"):
        mv.init(start_timeout_seconds=0)
    with pytest.raises(StartupError, match="exclude each other"):
        mv.init(sync=True, staleness=2)
    with pytest.raises(StartupError, match="leave every= and between="):  # as on several hosts
        mv.init(sync=True, wire="int8", every=1)


def test_what_travels_between_hosts_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in (("WIRE", "int8"), ("EVERY", "0.5"), ("BETWEEN", "mean")):
        monkeypatch.setenv(f"MULTIVERSO_{name}", text)
    with mv.init() as session:
        assert session.exchange == ExchangeOptions.of("int8", 0.5, "mean")
    with mv.init(wire="bfloat16", every="100 adds", between="sum") as session:  # arguments beat it
        assert session.exchange == ExchangeOptions.of("bfloat16", "100 adds", "sum")
    monkeypatch.setenv("MULTIVERSO_WIRE", "int7")
    with pytest.raises(StartupError, match="int7"):
        mv.init()


def test_a_session_that_ends_with_its_block_is_released_with_its_memory() -> None:
    with mv.init() as session:
        ended = weakref.ref(session)
    del session
    gc.collect()
    assert ended() is None
    with pytest.raises(ClosedError, match="the session is over"):
        mv.barrier()


def test_timeouts_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MULTIVERSO_TIMEOUT_SECONDS", "7.5")
    mv.init()
    assert mv.current().timeout_seconds == 7.5
    mv.shutdown()
    for bad in ("soon", "0", "-1", "nan"):
        monkeypatch.setenv("MULTIVERSO_TIMEOUT_SECONDS", bad)
        with pytest.raises(StartupError, match=f"^MULTIVERSO_TIMEOUT_SECONDS is '{bad}'"):
            mv.init()


def test_not_all_workers_come() -> None:
    with Node(3) as node:
        results = in_threads(
            [lambda i=i: outcome(lambda: Session(node.address, i, start_timeout_seconds=1)) for i in (0, 2)]
        )
    for error in results:
        assert isinstance(error, WaitTimeoutError | mv.errors.WorkerLostError)
    assert any(isinstance(error, WaitTimeoutError) for error in results)


def test_the_node_goes() -> None:
    node = Node(2)
    in_wait, told = threading.Event(), threading.Event()

    def work(i: int) -> Any:
        with Session(node.address, i) as session:
            table = mv.ArrayTableHandler(3, [1, 2, 3], session=session)
            session.barrier()
            if i == 0:
                in_wait.set()
            else:
                assert in_wait.wait(30)
                node.close()
                assert told.wait(30)  # who leaves is no longer waited for
                return None
            error = outcome(session.barrier)
            told.set()
            created = outcome(lambda: mv.ArrayTableHandler(3, session=session))
            return error, created, table.snapshot().tolist()

    (error, created, values), _ = in_threads([lambda i=i: work(i) for i in range(2)])
    assert isinstance(error, NodeLostError)
    assert "table.snapshot()" in str(error)
    assert isinstance(created, NodeLostError)
    assert values == [1, 2, 3]
    node.close()


def test_an_unreadable_message_does_not_end_the_job(alone: Session) -> None:
    from multiverso.runtime.session.node_link import NodeLink
    from multiverso.wire import messages

    address = alone.address
    import time

    for request in (
        {"do": "attach"},
        {"do": "attach", "protocol": 3},
        {"do": "attach", "protocol": 3, "consistency": {}, "worker_id": "x"},
        {"do": "create"},
        {"do": "ready"},
        {"do": "nonsense"},
        {},
    ):
        link = NodeLink()
        link.connect(address, time.monotonic() + 10)
        with pytest.raises(StartupError):
            link.ask(request, time.monotonic() + 10, "an answer")
        link.close()
    client = messages.connect(address, 10)
    client.send(b"this is no JSON")
    assert client.recv(100) == b""
    client.close()
    mv.ArrayTableHandler(3, session=alone).add([1, 2, 3])
    assert observe(address)["workers"][0]["state"] == "alive"


FORK = """
with Session(node, worker_id, start_timeout_seconds=60) as s:
    t = mv.ArrayTableHandler(3, [1, 2, 3], session=s)
    view = t.view()
    r, w = os.pipe()
    child = os.fork()
    if child == 0:
        said = []
        for call in (t.get, s.barrier, lambda: t.add([1, 1, 1]), lambda: mv.ArrayTableHandler(2, session=s)):
            try:
                call()
                said.append("went through")
            except mv.errors.ClosedError as error:
                said.append(str(error))
        s.shutdown()
        os.write(w, json.dumps(said).encode())
        os._exit(0)
    os.waitpid(child, 0)
    t.add([1, 1, 1])
    s.barrier()
    say(json.loads(os.read(r, 65536)), t.get().tolist(), os.getpid())
"""


def test_a_forked_child_refuses_and_disturbs_nobody() -> None:
    with Node(1) as node, Worker(node, 0, FORK) as worker:
        said, values, pid = worker.hear()
        assert worker.end() == 0
        assert node.wait(30)
        assert node.lost_workers() == []
    assert values == [2, 3, 4]
    assert len(said) == 4
    for sentence in said:
        assert f"belongs to process {pid}, and this is a forked child" in sentence


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_child_that_is_forked_while_a_session_starts_lets_go_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def fork(session: Session, *_: Any) -> None:  # there is a connection, and no number yet
        child = os.fork()
        if child == 0:
            let_go = [each.closed and each._link.connection.fileno() < 0 for each in (session, whole)]
            os._exit(0 if all(let_go) and "not begun" in repr(session) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        raise KeyboardInterrupt

    with Node(1) as node, Session(node.address, 0) as whole:
        monkeypatch.setattr(Session, "_attach", fork)
        with pytest.raises(KeyboardInterrupt):
            Session(node.address)
        whole.barrier()


def test_importing_loads_no_framework_and_no_numba_and_starts_nothing() -> None:
    text = """
import os, sys, threading
import ctypes  # Debian's libffi keeps a descriptor of its own file
os.environ.clear()
before = set(os.listdir("/proc/self/fd"))
import multiverso.cli.main
assert not {"numpy", "multiverso.api", "multiverso.launch.local"} & set(sys.modules)  # to say its version
import multiverso.launch.local, multiverso.runtime.node_process
assert not [m for m in sys.modules if m.startswith(("multiverso.tables", "multiverso.hosts.fabric"))]
from multiverso import *
heavy = {"numba", "llvmlite", "torch", "keras", "jax", "theano", "pytensor", "mpi4py", "rich"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
assert threading.active_count() == 1
assert set(os.listdir("/proc/self/fd")) == before
"""
    in_a_fresh_process(text)


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
@pytest.mark.parametrize("n", [0, 1, 2, 7, 100])
@pytest.mark.parametrize("equal", [True, False])
def test_shards(workers: int, n: int, equal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stand:
        def __init__(self, worker_id: int) -> None:
            self.worker_id, self.workers_num = worker_id, workers

    def parts(epoch: int, seed: int = 0) -> list[Any]:
        result = []
        for i in range(workers):
            monkeypatch.setattr("multiverso.api.current", lambda i=i: Stand(i))
            result.append(mv.shard(n, epoch=epoch, seed=seed, equal=equal))
        return result

    first = parts(0)
    everything = np.concatenate(first)
    lengths = [len(part) for part in first]
    assert all(part.dtype == np.int64 for part in first)
    assert len(set(everything.tolist())) == len(everything)
    assert set(everything.tolist()) <= set(range(n))
    assert max(lengths) - min(lengths) <= (0 if equal else 1)
    assert len(everything) == (n - n % workers if equal else n)
    assert [part.tolist() for part in parts(0)] == [part.tolist() for part in first]
    if n == 100:
        assert [part.tolist() for part in parts(1)] != [part.tolist() for part in first]
        assert [part.tolist() for part in parts(0, seed=1)] != [part.tolist() for part in first]


@pytest.mark.usefixtures("initialised")
def test_shards_refuse_what_is_no_number_of_samples() -> None:
    for n in (-1, 2.5, "3", None):
        with pytest.raises((ValueError, TypeError), match="number of samples"):
            mv.shard(n)  # type: ignore[arg-type]


def test_stats_count_what_was_done() -> None:
    def work(session: Session) -> Any:
        one = mv.ArrayTableHandler(10, session=session)
        two = mv.MatrixTableHandler(5, 2, name="two", session=session)
        session.barrier()
        for _ in range(3):
            one.add(np.ones(10))
        session.barrier()
        one.get()
        one.exchange(np.zeros(10, "f4"), np.zeros(10, "f4"))
        two.add([[1, 1]], row_ids=[3])
        two.get([1, 2])
        session.barrier()
        return session.statistics(), one.version

    for i, (stats, version) in enumerate(together(work, 2)):
        assert (stats["worker_id"], stats["workers_num"]) == (i, 2)
        assert stats["waited_seconds"] >= 0
        one, two = stats["tables"][1], stats["tables"]["two"]
        assert (one["adds"], one["gets"], one["exchanges"]) == (3, 1, 1)
        assert one["bytes"] == 40 * 3 + 40 + 80
        assert one["staleness_max"] >= 3
        assert (two["adds"], two["gets"], two["bytes"]) == (1, 1, 8 + 16)
        assert version == 8


def test_the_nodes_status_is_json() -> None:
    import json

    with Node(None) as node:
        with Session(node.address) as session:
            mv.ArrayTableHandler(3, session=session).add([1, 1, 1])
            status = json.loads(json.dumps(observe(node.address)))
            assert status["workers"][0]["pid"] == os.getpid()
            assert status["tables"][0]["shape"] == [3]
            assert status["tables"][0]["workers"]["0"]["adds"] == 1
            assert node.live_workers() == [0]
            assert not node.wait(0.01)
        assert node.wait(30)
        assert [worker["state"] for worker in node.status()["workers"]] == ["left"]
        assert node.lost_workers() == []


def test_who_was_lost_first_is_known_before_the_nodes_thread_hears_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What worker 2's end brings about must not be taken for its cause, however busy the node is."""
    text = "session = Session(node, worker_id, start_timeout_seconds=60)\nsay('ready')\nsignal.pause()\n"
    with Node(3) as node, Worker(node, 0, text) as a, Worker(node, 1, text) as b, Worker(node, 2, text) as c:
        assert [worker.hear() for worker in (a, b, c)] == [["ready"]] * 3
        monkeypatch.setattr(node._mailbox, "taken", lambda: iter(()))
        expected = []
        for worker_id, victim in ((2, c), (0, a)):
            victim.process.kill()
            expected.append(worker_id)
            while len(node.lost_workers()) < len(expected):
                threading.Event().wait(0.001)
            assert node.lost_workers() == expected


def test_errors_of_pending_operations_are_not_lost() -> None:
    def work(session: Session) -> Any:
        table = mv.ArrayTableHandler(3, session=session)
        pending = table.get_async()
        if session.worker_id == 1:
            return pending.wait(30).tolist()
        session.barrier(timeout_seconds=30)
        return pending.wait(30).tolist()

    assert together(work, 2, sync=True) == [[0, 0, 0]] * 2


def test_pending_operations_are_done_in_order_and_before_later_calls(alone: Session) -> None:
    table = mv.ArrayTableHandler(1000, session=alone)
    out = np.empty(1000, "f4")
    for turn in range(40):
        delta = np.ones(1000, "f4")
        pending = [table.add_async(delta)]
        delta[:] = 99  # it was copied
        pending.append(table.get_async(out))
        pending.append(table.add_async(np.ones(1000)))
        assert (table.get() == 2 * turn + 2).all()
        assert (pending[1].wait(30) == 2 * turn + 1).all()
        assert all(p.done() for p in pending)


def test_exchange_in_the_background(alone: Session) -> None:
    table = mv.ArrayTableHandler(3, [1, 1, 1], session=alone)
    local, last = np.array([3, 3, 3], "f4"), np.array([1, 1, 1], "f4")
    table.exchange_async(local, last).wait(30)
    assert local.tolist() == last.tolist() == table.get().tolist() == [3, 3, 3]


def test_tables_may_be_used_from_several_threads() -> None:
    def work(session: Session) -> Any:
        table = mv.ArrayTableHandler(70_000, session=session, dtype="int64")
        one = np.ones(70_000, "i8")
        rows = mv.MatrixTableHandler(100, 100, session=session)

        def many() -> None:
            for i in range(50):
                table.add(one)
                rows.add(np.ones((1, 100)), row_ids=[i])
                table.get()

        in_threads([many] * 3)
        session.barrier()
        return bool((table.get() == 300).all()), rows.get()[:50].min(), rows.get().max()

    assert together(work, 2) == [(True, 6, 6)] * 2


def test_a_number_is_had_again_at_once() -> None:
    """The end of the last connection may be read after the first words of the next: that one was refused then."""
    with Node() as node, Session(node.address, 0):
        for _ in range(100):
            with Session(node.address, 1) as again:
                assert again.worker_id == 1
