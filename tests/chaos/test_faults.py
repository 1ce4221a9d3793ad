"""Scripted faults with real processes: what the survivors see, and that they go on or end as they were told."""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from typing import Any

import numpy as np
import pytest
import victims
from core_support import in_threads, outcome

import multiverso as mv
from multiverso.errors import NodeLostError, WaitTimeoutError, WorkerLostError
from multiverso.runtime import Node, Session

SECONDS = 60.0
context = multiprocessing.get_context("forkserver")


@pytest.fixture(scope="module", autouse=True)
def loaded() -> None:
    """Victims are forked from a process that has everything loaded."""
    context.set_forkserver_preload(["victims"])
    with pytest.MonkeyPatch.context() as patch:
        # the server's own search path does not have this folder
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        forkserver.ensure_running()
    process = context.Process(target=os.getpid)
    process.start()
    process.join(SECONDS)
    assert process.exitcode == 0


class Victim:
    def __init__(self, target: Any, *args: Any, **options: Any) -> None:
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=target, args=(*args, theirs), kwargs=options)
        self.process.start()
        theirs.close()

    def hear(self) -> Any:
        assert self.pipe.poll(SECONDS), "it said nothing"
        return self.pipe.recv()

    def go(self) -> None:
        self.pipe.send("go")

    def gone(self) -> int:
        self.process.join(SECONDS)
        assert self.process.exitcode is not None, "it lives"
        return self.process.exitcode

    def close(self) -> None:
        self.process.kill()
        self.process.join(SECONDS)
        self.process.close()
        self.pipe.close()


@contextmanager
def victim(target: Any, *args: Any, **options: Any) -> Iterator[Victim]:
    made = Victim(target, *args, **options)
    try:
        yield made
    finally:
        made.close()


def survive(
    end: str, do: Any, *, survivors: int = 2, on_lost: str = "continue", make: bool = True, **options: Any
) -> list[Any]:
    """A job of some survivors (threads here) and a victim, the last worker; returns what ``do`` returns in each."""
    with Node(survivors + 1, on_lost=on_lost) as node:
        with victim(victims.run, node.address, survivors, end, make=make, **options) as doomed:

            def work(i: int) -> Any:
                with Session(node.address, i, timeout_seconds=60, **options) as session:
                    table = mv.ArrayTableHandler(victims.SIZE, 1.0, session=session) if make else None
                    if i == 0:
                        assert doomed.hear() == "there"
                        doomed.go()
                    return outcome(lambda: do(session, table))

            results = in_threads([lambda i=i: work(i) for i in range(survivors)], SECONDS)
            assert doomed.gone() in (-signal.SIGKILL, 0, 3)
        assert node.wait(SECONDS)
        assert node.lost_workers() == [survivors]
    return results


def lost(results: list[Any], worker_id: int = 2) -> None:
    assert results
    for error in results:
        assert isinstance(error, WorkerLostError), error
        assert error.worker_ids == (worker_id,)


def a_round(session: Session, table: Any) -> Any:
    table.add(np.full(victims.SIZE, 1.0))
    first = table.get()
    table.add(np.full(victims.SIZE, 1.0))
    second = table.get()
    assert (first == first[0]).all()
    assert (second == second[0]).all()
    return first[0], second[0]


# -- asynchronous tables -----------------------------------------------------------------------------------------


def test_killed_in_an_add_with_a_lock() -> None:
    """The others go on at once; what the dead one had added stays, and theirs is whole."""

    def add(session: Session, table: Any) -> Any:
        for _ in range(50):
            table.add(np.ones(victims.SIZE))
        while 2 in session.live_workers():
            threading.Event().wait(0.001)
        session.barrier()
        return table.get()

    for values in survive("holding_a_lock", add):
        stripe = 32768
        assert (values[: 2 * stripe + 10] == 102).all()
        assert (values[2 * stripe + 10 :] == 101).all()


def held(table: Any) -> bool:
    """Whether a worker holds one of the table's stripes."""
    return bool((table._shard.stripe_words() & 0xFFFFF).any())


def test_stopped_with_a_lock() -> None:
    with Node(2) as node, victim(victims.run, node.address, 1, "stopped_with_a_lock") as stopped:  # noqa: SIM117
        with Session(node.address, 0) as session:
            table = mv.ArrayTableHandler(victims.SIZE, 1.0, session=session)
            assert stopped.hear() == "there"
            stopped.go()
            while not held(table) or "T" not in _state(stopped.process.pid):  # others may stop it before
                threading.Event().wait(0.001)
            with pytest.raises(WaitTimeoutError, match=f"process {stopped.process.pid} holds the lock"):
                table.get(timeout_seconds=0.1)
            assert session.live_workers() == [0, 1]
            os.kill(stopped.process.pid, signal.SIGCONT)
            assert (table.get(timeout_seconds=SECONDS) == 1).all()
            assert stopped.hear() == "over"
            stopped.go()
            assert stopped.gone() == 0


def test_killed_with_a_lock_when_the_node_is_gone_too() -> None:
    """The node would say whose words may be taken over; who meets one finds it out alone."""
    with victim(victims.node, 2) as node:
        address = node.hear()
        with victim(victims.run, address, 1, "stopped_with_a_lock") as stopped, Session(address, 0) as session:
            table = mv.ArrayTableHandler(victims.SIZE, 1.0, session=session)
            assert stopped.hear() == "there"
            stopped.go()
            while not held(table) or "T" not in _state(stopped.process.pid):  # others may stop it before
                threading.Event().wait(0.001)
            os.kill(node.process.pid, signal.SIGKILL)
            while not session.node_lost:
                threading.Event().wait(0.001)
            with pytest.raises(WaitTimeoutError, match=f"process {stopped.process.pid} holds the lock"):
                table.get(timeout_seconds=0.1)
            os.kill(stopped.process.pid, signal.SIGKILL)
            assert (table.get(timeout_seconds=SECONDS) == 1).all()


def _state(pid: int | None) -> str:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]


# -- synchronous rounds ------------------------------------------------------------------------------------------

ROUNDS = {  # whether what the victim added is in the first round
    "before_its_slot_is_ready": 0,
    "staged": 10,
    "before_folding": 10,
    "while_folding": 10,
    "while_gathering": 10,
}


@pytest.mark.parametrize("end", ROUNDS)
def test_killed_in_a_round_the_others_go_on_with_the_same_values(end: str) -> None:
    expected = (1 + 2 + ROUNDS[end], 1 + 4 + ROUNDS[end])
    assert survive(end, a_round, sync=True) == [expected] * 2


def test_killed_while_it_waits_in_a_round() -> None:
    def late(session: Session, table: Any) -> Any:
        while 2 in session.live_workers():
            threading.Event().wait(0.001)
        return a_round(session, table)

    assert survive("in_a_round", late, sync=True) == [(13, 15)] * 2


@pytest.mark.parametrize("end", ["staged", "while_folding", "while_gathering"])
def test_killed_in_a_round_the_others_stop(end: str) -> None:
    lost(survive(end, a_round, sync=True, on_lost="stop"))


def test_the_only_other_one_is_killed_in_a_round() -> None:
    assert survive("while_folding", a_round, survivors=1, sync=True) == [(12, 13)]


# -- other waits -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_lost", ["stop", "continue"])
@pytest.mark.parametrize("end", ["killed", "exits", "exits_from_the_main_thread", "forks"])
def test_lost_while_others_are_in_a_barrier(end: str, on_lost: str) -> None:
    results = survive(end, lambda session, table: session.barrier(), on_lost=on_lost)
    if on_lost == "stop":
        lost(results)
    else:
        assert results == [None, None]


@pytest.mark.parametrize("on_lost", ["stop", "continue"])
def test_killed_in_a_barrier_while_others_are_late(on_lost: str) -> None:
    def late(session: Session, table: Any) -> Any:
        while 2 in session.live_workers():
            threading.Event().wait(0.001)
        return session.barrier()

    assert survive("in_the_barrier", late, on_lost=on_lost) == [None, None]  # it had arrived


@pytest.mark.parametrize("on_lost", ["stop", "continue"])
def test_killed_in_a_clock(on_lost: str) -> None:
    def late(session: Session, table: Any) -> Any:
        while 2 in session.live_workers():
            threading.Event().wait(0.001)
        for _ in range(20):
            table.get()
            session.barrier()

    results = survive("in_a_clock", late, on_lost=on_lost, staleness=1)
    if on_lost == "stop":
        lost(results)
    else:
        assert results == [None, None]


@pytest.mark.parametrize("on_lost", ["stop", "continue"])
@pytest.mark.parametrize("end", ["in_a_creation", "killed"])
def test_killed_in_a_creation_and_before_it(end: str, on_lost: str) -> None:
    def create(session: Session, table: Any) -> Any:
        if end == "in_a_creation":
            while 2 in session.live_workers():
                threading.Event().wait(0.001)
        other = mv.ArrayTableHandler(3, [1, 2, 3], session=session)
        return other.get().tolist(), other.number

    results = survive(end, create, on_lost=on_lost)
    if on_lost == "stop":
        lost(results)
    else:
        assert results == [([1, 2, 3], 2)] * 2


@pytest.mark.parametrize("initial", ["sum", "mean"])
def test_killed_in_its_turn_the_values_are_those_of_the_living(initial: str) -> None:
    def create(session: Session, table: Any) -> Any:
        value = float(10 + session.worker_id)
        table = mv.ArrayTableHandler(victims.SIZE, value, session=session, initial=initial)
        return set(table.get().tolist())

    end = f"in_its_turn_of_a_{initial}"
    assert survive(end, create, make=False) == [{21.0 if initial == "sum" else 10.5}] * 2


@pytest.mark.parametrize("end", ["attach", "ready"])
@pytest.mark.parametrize("on_lost", ["stop", "continue"])
@pytest.mark.parametrize("late", [False, True])
def test_killed_while_attaching(end: str, on_lost: str, late: bool) -> None:
    with Node(2, on_lost=on_lost) as node:
        with victim(victims.while_attaching, node.address, 1, end) as doomed:

            def work() -> Any:
                with Session(node.address, 0, start_timeout_seconds=60) as session:
                    session.barrier()
                    return session.live_workers()

            thread_result: list[Any] = []
            thread = threading.Thread(target=lambda: thread_result.append(outcome(work)))
            if not late:
                thread.start()
            assert doomed.hear() == "there"
            assert doomed.gone() == -signal.SIGKILL
            if late:
                thread.start()
            if end == "attach":
                node.absent(1)  # nobody but its launcher knows that it will not come
            thread.join(SECONDS)
        if on_lost == "stop":
            lost(thread_result, 1)
        else:
            assert thread_result == [[0]]


# -- the node ----------------------------------------------------------------------------------------------------

WAITS: dict[str, tuple[Any, dict[str, Any]]] = {
    "barrier": (lambda s, t: s.barrier(), {}),
    "round": (lambda s, t: t.get(), {"sync": True}),
    "exchange": (lambda s, t: t.exchange(np.ones(5, "f4"), np.zeros(5, "f4")), {"sync": True}),
    "clock": (lambda s, t: (t.get(), t.get()), {"staleness": 0}),
    "creation": (lambda s, t: mv.ArrayTableHandler(3, session=s), {}),
}


@pytest.mark.parametrize("wait", WAITS)
def test_the_node_is_killed(wait: str) -> None:
    call, options = WAITS[wait]
    with victim(victims.node, 2) as node:
        address = node.hear()

        def work(i: int) -> Any:
            with Session(address, i, timeout_seconds=60, **options) as session:
                table = mv.ArrayTableHandler(5, [1, 2, 3, 4, 5], session=session)
                session.barrier()
                if i == 1:
                    assert begins.wait(SECONDS)
                    while session.control.worker(0).wait is None:
                        threading.Event().wait(0.001)
                    os.kill(node.process.pid, signal.SIGKILL)
                    over.wait(SECONDS)
                    return None
                begins.set()
                error = outcome(lambda: call(session, table))
                over.set()
                if "sync" not in options:
                    table.add([1, 1, 1, 1, 1])
                return error, table.snapshot().tolist()

        begins, over = threading.Event(), threading.Event()
        (error, values), _ = in_threads([lambda: work(0), lambda: work(1)], SECONDS)
    assert isinstance(error, NodeLostError)
    assert values == ([1, 2, 3, 4, 5] if "sync" in options else [2, 3, 4, 5, 6])


# -- many --------------------------------------------------------------------------------------------------------


def test_eight_workers_and_seven_killed_at_once() -> None:
    with Node(8, on_lost="continue") as node:
        doomed = [Victim(victims.run, node.address, i, "adds_until_killed") for i in range(1, 8)]
        try:
            with Session(node.address, 0, timeout_seconds=60) as session:
                table = mv.ArrayTableHandler(victims.SIZE, 1.0, session=session)
                for one in doomed:
                    assert one.hear() == "there"
                for one in doomed:
                    one.go()
                while table.version < 50:
                    table.add(np.ones(victims.SIZE))
                for one in doomed:
                    os.kill(one.process.pid, signal.SIGKILL)
                session.barrier()
                before, version = table.get(), table.version
                for _ in range(10):
                    table.add(np.ones(victims.SIZE))
                np.testing.assert_array_equal(table.get(), before + 10)
                assert before.min() >= 1 + version  # every add that returned
                assert before.max() <= 1 + version + 7  # and of each dead one at most the one it was in
            for one in doomed:
                assert one.gone() == -signal.SIGKILL
        finally:
            for one in doomed:
                one.close()
        assert node.wait(SECONDS)
        assert sorted(node.lost_workers()) == list(range(1, 8))


@pytest.mark.parametrize("end", ["before_folding", "while_folding"])
def test_who_joins_while_all_others_die_in_a_round_finds_whole_values(end: str) -> None:
    """The round in flight is finished by nobody: it is as if it had not been."""
    with Node(None, on_lost="continue") as node, victim(victims.alone_in_a_round, node.address, end) as doomed:
        assert doomed.hear() == "decided"
        with Session(node.address, sync=True, timeout_seconds=60) as session:
            table = mv.ArrayTableHandler(victims.SIZE, 5.0, name="t", session=session)
            table.add(np.ones(victims.SIZE))
            doomed.go()
            assert doomed.gone() == -signal.SIGKILL
            assert session.worker_id == 1
            assert (table.get() == 2).all()
            table.add(np.ones(victims.SIZE))
            assert (table.get() == 3).all()
            assert table.version == 3


MPI = """
import os, sys
import numpy as np
import multiverso as mv
for turn in range(3):
    mv.init(start_timeout_seconds=60)
    t = mv.ArrayTableHandler(10)
    t.add(np.full(10, turn + 1))
    mv.barrier()
    print(mv.worker_id(), t.get()[0], flush=True)
    mv.shutdown()
mv.init(start_timeout_seconds=60)
mv.barrier()
print("ready", flush=True)
sys.stdin.readline()
try:
    mv.ArrayTableHandler(10)
except mv.errors.NodeLostError:
    print("lost", flush=True)
mv.shutdown()
mv.init(start_timeout_seconds=60)
mv.barrier()
print(mv.live_workers(), flush=True)
mv.barrier()
mv.shutdown()
"""


def test_the_first_workers_child_is_the_node() -> None:
    """As under mpirun: init after shutdown finds the same node, and makes a new one when it was killed."""
    namespace = uuid.uuid4().hex
    environ = {
        **os.environ,
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "PMIX_NAMESPACE": namespace,
    }
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", MPI],
            env={**environ, "OMPI_COMM_WORLD_RANK": str(i), "OMPI_COMM_WORLD_LOCAL_RANK": str(i)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    try:
        said: list[list[str]] = [[], []]
        for i, worker in enumerate(workers):
            assert worker.stdout is not None
            said[i] += [worker.stdout.readline().strip() for _ in range(4)]
        (node,) = _nodes_of(namespace)
        ended = os.pidfd_open(node)
        os.kill(node, signal.SIGKILL)
        assert select.select([ended], [], [], SECONDS)[0]
        os.close(ended)
        for worker in workers:
            assert worker.stdin is not None
            worker.stdin.write("\n")
            worker.stdin.flush()
        for i, worker in enumerate(workers):
            rest, _ = worker.communicate(timeout=SECONDS)
            said[i] += rest.split("\n")[:-1]
            assert worker.returncode == 0
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()
    for i, lines in enumerate(said):
        assert lines == [f"{i} 2.0", f"{i} 4.0", f"{i} 6.0", "ready", "lost", "[0, 1]"]
    for node in _nodes_of(namespace):  # it lingers for a moment, so that another init finds it
        try:
            ended = os.pidfd_open(node)
        except ProcessLookupError:
            continue
        assert select.select([ended], [], [], SECONDS)[0]
        os.close(ended)


def _nodes_of(namespace: str) -> list[int]:
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/environ", "rb") as file:
                ours = namespace.encode() in file.read()
            with open(f"/proc/{entry}/cmdline", "rb") as file:
                node = b"node_process" in file.read()
        except OSError:
            continue
        if ours and node:
            found.append(int(entry))
    return found
