"""A lost host is replaced: its node takes the values, its workers join, and what is left of the old one is refused."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from core_support import in_threads, let_die, wait_for
from rehearsing import Rehearsal, rehearsal

import multiverso as mv
from multiverso.errors import (
    MultiversoError,
    NodeLostError,
    NotInThisJobError,
    StartupError,
    WaitTimeoutError,
    WorkerLostError,
)
from multiverso.hosts.control.connections import credentials_of, say_absent
from multiverso.hosts.control.coordinator import Coordinator
from multiverso.hosts.control.messages import (
    Create,
    Done,
    Gone,
    Hello,
    Joined,
    Line,
    Make,
    Options,
    Published,
    Step,
    Welcome,
    Workers,
)
from multiverso.hosts.fabric import Fabric
from multiverso.hosts.options import ExchangeOptions
from multiverso.hosts.roster import Roster
from multiverso.hosts.transport.credentials import new_credentials
from multiverso.hosts.transport.handshake import VALUES
from multiverso.hosts.transport.listener import open_port
from multiverso.layout import words as at
from multiverso.runtime import Node, Session
from multiverso.runtime.collective.reducer import Reducer
from multiverso.runtime.node import numbers
from multiverso.runtime.several_hosts.exchanged_tables import ExchangedTables
from multiverso.runtime.several_hosts.other_hosts import OtherHosts
from multiverso.runtime.several_hosts.this_host import ThisHost
from multiverso.updaters import adam

SIZE = 300_000  # two chunks: homes on different hosts
JOB: dict[str, dict[str, Any]] = {"async": {}, "bounded": {"staleness": 2}}


@contextmanager
def anew(job: Rehearsal, host: int, times_replaced: int = 1) -> Iterator[Node]:
    """A node in a lost host's place."""
    roster = replace(job.roster.on(host), times_replaced=times_replaced)
    other_hosts = OtherHosts(roster, Fabric(host, roster.hosts, credentials_of(roster)))
    with Node(roster.workers_num, on_lost="continue", other_hosts=other_hosts, replaces=True) as node:
        job.nodes[host] = node
        yield node


def lose(job: Rehearsal, host: int, sessions: dict[int, Session]) -> None:
    """Ends a host's node, as its death would, and waits until the others know."""
    for worker in job.roster.workers_of(host):
        session = sessions.pop(worker)
        let_die(session)
        session.shutdown()
    job.nodes[host].close()
    for worker in job.roster.workers_of(host):
        for other in sessions.values():
            wait_for(lambda o=other, w=worker: o.control.liveness(w) == at.LOST)


def all_do(sessions: dict[int, Session], function: Any) -> list[Any]:
    return in_threads([lambda s=s: function(s) for s in sessions.values()])


@pytest.mark.parametrize("mode", JOB)
def test_hosts_that_are_lost_one_after_another_come_again(mode: str) -> None:
    """After each loss the homes are others, and hosts that came again are among them when the next one is lost."""
    with rehearsal(1, 1, 1, on_lost="continue") as job:
        sessions = dict(enumerate(in_threads([lambda i=i: job.session(i, **JOB[mode]) for i in range(3)])))
        tables: dict[int, Any] = {}
        expected = 5.0
        counted = ("connections", "bytes_sent", "bytes_received")

        def open_table(session: Session) -> None:
            value = np.full(SIZE, 99.0 if session.incarnation else 5.0)
            tables[session.worker_id] = mv.ArrayTableHandler(SIZE, init_value=value, session=session)

        def train(session: Session) -> None:
            table = tables[session.worker_id]
            table.add(np.ones(SIZE))
            table.get()
            session.barrier()

        all_do(sessions, open_table)
        all_do(sessions, train)
        expected += 3
        with ExitStack() as stack:
            for host in (1, 2):
                before = job.nodes[0].status()["links"][host - 1]
                lose(job, host, sessions)
                all_do(sessions, train)
                expected += 2
                stack.enter_context(anew(job, host))
                sessions[host] = again = job.session(host, **JOB[mode])
                assert again.incarnation == 1
                with pytest.raises(MultiversoError, match=r"nothing more can be reduced: .* has taken its place"):
                    Reducer(again, 3).all_reduce(np.ones(2))
                open_table(again)
                assert np.unique(tables[host].get()).tolist() == [expected], "as it was when it came"
                if mode == "bounded":
                    assert (
                        again.statistics()["tables"][1]["clock"] <= 1 + sessions[0].statistics()["tables"][1]["clock"]
                    )
                while again.barriers < sessions[0].barriers:
                    again.barrier()  # what the others have passed returns at once
                all_do(sessions, train)
                expected += 3
                assert [np.unique(t.get()).tolist() for t in tables.values()] == [[expected]] * 3
                link = job.nodes[0].status()["links"][host - 1]
                assert link["state"] == "connected"
                assert all(link[what] > before[what] for what in counted), "what there was before stays counted"
            late = all_do(sessions, lambda session: mv.ArrayTableHandler(3, session=session))
            in_threads([lambda t=t: t.add(np.ones(3)) for t in late])
            all_do(sessions, lambda session: session.barrier())
            assert [table.get().tolist() for table in late] == [[3.0] * 3] * 3, "and tables are made with them"
            all_do(sessions, lambda session: session.shutdown())


def test_a_host_that_came_again_has_no_keyed_table_whose_rows_it_lost() -> None:
    with rehearsal(1, 1, on_lost="continue") as job:
        sessions = dict(enumerate(in_threads([lambda i=i: job.session(i) for i in range(2)])))
        table, _ = all_do(sessions, lambda session: mv.KeyedTable(2, name="rows", session=session))
        keys = np.arange(100)
        table.add(np.ones((100, 2)), keys)
        all_do(sessions, lambda session: session.barrier())
        lose(job, 1, sessions)
        with anew(job, 1):
            sessions[1] = job.session(1)
            for name in ("rows", "others"):
                with pytest.raises(NotInThisJobError, match=r"started again in place of one that was lost, .* rows"):
                    mv.KeyedTable(2, name=name, session=sessions[1])
            with pytest.raises(WorkerLostError, match="rows of the keyed table"):
                table.get(keys)
            assert mv.ArrayTableHandler(2, name="array", session=sessions[1]).size == 2  # arrays are copied
            all_do(sessions, lambda session: session.shutdown())


def test_what_all_load_together_waits_for_who_is_there_again_unless_the_others_have_passed_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numbers, "has_ended", lambda pid: True)

    def open_table(session: Session) -> Any:
        return mv.MatrixTableHandler(4, 2, updater="momentum", session=session)

    with rehearsal(2, 1, on_lost="continue", replaces=True) as job:
        sessions = dict(enumerate(in_threads([lambda i=i: job.session(i) for i in range(3)])))
        tables = dict(enumerate(all_do(sessions, open_table)))
        tables[0].add(np.ones((4, 2)))
        all_do(sessions, lambda session: session.barrier())
        saved = tables[0].get().tolist()
        tables[0].save(tmp_path / "saved")
        dead = sessions.pop(1)
        let_die(dead)
        wait_for(lambda: sessions[2].control.liveness(1) == at.LOST)
        all_do(sessions, lambda session: tables[session.worker_id].load(tmp_path / "saved"))
        tables[0].add(np.ones((4, 2)))
        all_do(sessions, lambda session: session.barrier())
        now = tables[2].get().tolist()
        assert now != saved
        sessions[1] = again = job.session(1)
        tables[1] = open_table(again)
        again.barrier()
        tables[1].load(tmp_path / "saved")
        assert (again.barriers, tables[1].get().tolist()) == (2, now), "the others have gone on since"
        again.barrier()
        assert again.barriers == sessions[0].barriers
        all_do(sessions, lambda session: tables[session.worker_id].load(tmp_path / "saved"))
        all_do(sessions, lambda session: session.barrier())
        assert [table.get().tolist() for table in tables.values()] == [saved] * 3
        all_do({**sessions, -1: dead}, lambda session: session.shutdown())


def test_what_is_left_of_the_lost_host_is_refused() -> None:
    """A node that was cut off and comes back finds its place taken, by the data's ports as by the coordinator's."""
    with rehearsal(1, 1, on_lost="continue") as job:
        sessions = dict(enumerate(in_threads([lambda i=i: job.session(i) for i in range(2)])))
        tables = all_do(sessions, lambda session: mv.ArrayTableHandler(4, session=session))
        tables[0].add(np.ones(4))
        all_do(sessions, lambda session: session.barrier())
        old, old_session = job.nodes[1], sessions[1]
        straggler = old.hosts.fabric  # type: ignore[attr-defined]
        with anew(job, 1):
            again = job.session(1)  # while the old node is there, and not lost yet
            table = mv.ArrayTableHandler(4, session=again)
            wait_for(lambda: old_session.node_lost)
            tables[1].add(np.full(4, 100.0))  # in a copy that nobody takes anything from any more
            table.add(np.ones(4))
            again.barrier()
            in_threads([sessions[0].barrier, again.barrier])
            assert tables[0].get().tolist() == table.get().tolist() == [2.0] * 4
            assert straggler.peers._incarnation in job.nodes[0].hosts.fabric.peers._fenced  # type: ignore[attr-defined]
            old_session.shutdown()
            for session in (sessions[0], again):
                session.shutdown()


def test_a_host_that_cannot_be_taken_in_again_is_told_why() -> None:
    options: dict[str, Any] = {"exchange": ExchangeOptions.of(wire=None, every=None, between="mean")}
    with rehearsal(1, 1, on_lost="continue") as job:
        sessions = dict(enumerate(in_threads([lambda i=i: job.session(i, **options) for i in range(2)])))
        all_do(sessions, lambda session: mv.ArrayTableHandler(4, session=session))
        lose(job, 1, sessions)
        said: list[str] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("multiverso.runtime.several_hosts.other_hosts.log", said.append)
            with anew(job, 1), pytest.raises((StartupError, NodeLostError)):
                job.session(1, **options)
        assert any("between='sum'" in line for line in said), said
        sessions[0].shutdown()


def test_workers_of_a_host_that_came_again_join_the_next_round_and_have_everybodys_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rounds go on without it meanwhile; then it has the others' values, their updaters' states and set rates."""
    monkeypatch.setattr("multiverso.runtime.session.replacing._LONGEST_SECONDS", 0.1)  # the others are idle
    size = 300_000  # three chunks

    def open_tables(session: Session) -> list[Any]:
        first = np.full(size, 7.0 if session.incarnation else 0.1, np.float32)
        plain = mv.ArrayTableHandler(size, first, session=session)
        counted = mv.ArrayTableHandler(5, updater=adam(count_per="table"), session=session)
        return [plain, counted, mv.MatrixTableHandler(90_000, 3, updater="momentum", session=session)]

    def go(tables: list[Any], number: int, seed: int) -> list[Any]:
        rng, seen = np.random.default_rng(seed), []
        for _ in range(number):
            for table in tables:
                table.add(rng.standard_normal(table.shape).astype(np.float32))
                seen.append(table.get().copy())
        return seen

    def all_read(tables: dict[int, Any], number: int) -> list[Any]:
        first, *others = in_threads([lambda t=t, w=w: go(t, number, w) for w, t in tables.items()])
        for other in others:
            for mine, theirs in zip(first, other, strict=True):
                np.testing.assert_array_equal(mine, theirs, strict=True)
        return first

    with rehearsal(1, 2, 1, on_lost="continue", replaces=True) as job, ExitStack() as stack:
        sessions = dict(enumerate(in_threads([lambda i=i: job.session(i, sync=True) for i in range(4)])))
        tables = dict(enumerate(all_do(sessions, open_tables)))
        all_read(tables, 2)
        for lost in ([1], [2], [1, 2]):  # one in the middle, the last one, both
            workers = [worker for host in lost for worker in job.roster.workers_of(host)]
            for host in lost:
                lose(job, host, sessions)
            left = {worker: tables[worker] for worker in sessions}
            tables[0][0].set(np.full(size, 3.0))
            all_do(sessions, lambda session: session.barrier())
            all_read(left, 2)
            for host in lost:
                stack.enter_context(anew(job, host))
            all_read(left, 3)  # a mere relay so far
            begun = in_threads([lambda w=w: job.session(w, sync=True) for w in workers])
            for worker, again in zip(workers, begun, strict=True):
                sessions[worker] = again
                assert again.incarnation > 0
                values = [table.snapshot() for table in left[0]]
                tables[worker] = open_tables(again)
                for table, value in zip(tables[worker], values, strict=True):
                    np.testing.assert_array_equal(table.snapshot(), value)

            def catch_up(session: Session) -> None:
                while session.barriers < sessions[0].barriers:
                    session.barrier()

            in_threads([lambda s=s: catch_up(s) for s in begun])
            all_read(tables, 3)
            all_do(sessions, lambda session: session.barrier())
            tables[workers[-1]][0].set(np.arange(size))  # theirs counts as anybody's
            all_do(sessions, lambda session: session.barrier())
            assert all(table[0].snapshot()[-1] == size - 1 for table in tables.values())
        late = all_do(sessions, lambda session: mv.ArrayTableHandler(3, session=session))
        all_read({worker: [table] for worker, table in enumerate(late)}, 2)
        all_do(sessions, lambda session: session.shutdown())


def test_a_host_that_came_again_connects_to_others_while_it_waits_for_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two at once: it connected to the other one behind a wait for what had to come through that one."""
    take, begun = Fabric.take, threading.Event()

    def take_late(fabric: Fabric, *arguments: Any) -> None:
        if fabric.host == 2:
            begun.set()
            wait_for(lambda: fabric._chain[1].connected)
        take(fabric, *arguments)

    with rehearsal(1, 1, 1, on_lost="continue", replaces=True) as job, ExitStack() as stack:
        options: dict[str, Any] = {"sync": True, "timeout_seconds": 10}
        sessions = dict(enumerate(in_threads([lambda i=i: job.session(i, **options) for i in range(3)])))
        table, *_ = all_do(sessions, lambda session: mv.ArrayTableHandler(3, session=session))
        for host in (1, 2):
            lose(job, host, sessions)
        monkeypatch.setattr(Fabric, "take", take_late)
        stack.enter_context(anew(job, 2))
        wait_for(begun.is_set)
        stack.enter_context(anew(job, 1))
        chain: Any = job.nodes[0].hosts
        wait_for(lambda: chain.fabric.rounds.live == [0, 1, 2])
        table.add([1.0] * 3)
        assert table.get().tolist() == [1.0] * 3
        sessions[0].shutdown()


def test_who_comes_again_is_told_where_the_only_one_that_could_make_the_values_waits_for_it() -> None:
    """Its read has raised in the middle of a round, and it is at a barrier: both waited to the deadline."""

    def open_table(session: Session) -> Any:
        return mv.ArrayTableHandler(5, updater="momentum", session=session)

    with rehearsal(1, 1, on_lost="continue", replaces=True) as job:
        sessions = dict(enumerate(in_threads([lambda i=i: job.session(i, sync=True) for i in range(2)])))
        table, _ = all_do(sessions, open_table)
        table.add(np.ones(5))
        with pytest.raises(WaitTimeoutError):
            table.get(timeout_seconds=0.2)
        first = sessions[0]
        lose(job, 1, sessions)

        there = threading.Event()

        def come() -> None:
            refused = pytest.raises(MultiversoError, match="reads have raised in the middle of a round")
            with anew(job, 1), job.session(1, sync=True) as again, refused:
                there.set()
                wait_for(lambda: first.control.worker(0).wait is not None)
                open_table(again)

        def wait() -> None:
            assert there.wait(30)
            first.barrier()

        in_threads([come, wait])
        first.shutdown()


def test_rounds_go_on_though_the_thread_that_moves_waits_for_values_that_they_bring() -> None:
    """Who asked for a table may have died, so that the others are through a barrier before it has the values."""
    done: list[Any] = []
    orders: list[Any] = []
    rounds = SimpleNamespace(release=done.append, refill=lambda number, then: then(True))
    roster = Roster(0, ("a", "b"), (1, 1), ("127.0.0.1", 1))
    none: Any = None
    fabric: Any = SimpleNamespace(rounds=rounds)
    here = ThisHost(roster, none, none, fabric, orders.append, none, threading.Event())  # nothing is moved in it
    ExchangedTables(here, none, none).refill(7, done.append)
    here._tasks.get()()
    orders.pop()()
    assert done == [True, 7], "those who asked are in the rounds, and these go on, though nothing can be moved"


def test_a_host_that_came_again_counts_barriers_from_where_its_workers_had_saved(tmp_path: Path) -> None:
    with rehearsal(1, 1, on_lost="continue") as job:
        sessions = dict(enumerate(in_threads([lambda i=i: job.session(i) for i in range(2)])))
        first, second = all_do(sessions, lambda session: mv.checkpoint(tmp_path, session=session))
        all_do(sessions, lambda session: session.barrier())
        first.save({"step": 1})
        wait_for(lambda: second.step({"step": 2}))
        in_threads([first.close, second.close])
        lose(job, 1, sessions)
        with anew(job, 1):
            sessions[1] = again = job.session(1)
            checkpoint = mv.checkpoint(tmp_path, session=again)
            assert checkpoint.restore() == {"step": 2}
            assert again.barriers == sessions[0].barriers
            all_do(sessions, lambda session: session.barrier())
            checkpoint.close()
            all_do(sessions, lambda session: session.shutdown())


def test_a_host_that_was_lost_before_it_had_come_begins_with_the_others() -> None:
    """Its launcher was killed, or ssh failed, before the first host knew of it: there is no place to take."""
    with ExitStack() as stack:
        listener = open_port(("127.0.0.1", 0))
        credentials = new_credentials(encrypted=False).to_text()
        roster = Roster(0, ("a", "b"), (1, 1), listener.getsockname(), credentials, rehearsal=True)
        nodes = []
        for here in (roster, replace(roster.on(1), times_replaced=1)):
            fabric = Fabric(here.host, 2, credentials_of(roster))
            other_hosts = OtherHosts(here, fabric, listener if here.leads else None)
            nodes.append(stack.enter_context(Node(2, on_lost="continue", other_hosts=other_hosts, replaces=True)))
        job = Rehearsal(roster, nodes)
        assert job.run(lambda session: session.incarnation) == [0, 0]


def test_a_host_that_ends_before_it_has_come_is_not_waited_for() -> None:
    """Its launcher says so, as its node cannot; of one that has come nothing is believed that way."""
    with ExitStack() as stack:
        listener = open_port(("127.0.0.1", 0))
        credentials = new_credentials(encrypted=False).to_text()
        names = ("a", "b", "c")
        roster = Roster(0, names, (1, 1, 1), listener.getsockname(), credentials, rehearsal=True)
        nodes = []
        for here in (roster, roster.on(2)):
            fabric = Fabric(here.host, 3, credentials_of(roster))
            other_hosts = OtherHosts(here, fabric, listener if here.leads else None)
            nodes.append(stack.enter_context(Node(3, on_lost="continue", other_hosts=other_hosts)))
        job = Rehearsal(roster, [nodes[0], nodes[0], nodes[1]])

        def work(worker: int) -> list[float]:
            with job.session(worker) as session:
                table = mv.ArrayTableHandler(3, session=session)
                table.add(np.ones(3))
                session.barrier()
                say_absent(roster, 2 - worker, "it has not begun")  # of one that is there
                session.barrier()
                return table.get().tolist()

        def say() -> None:
            say_absent(roster, 1, "it has not begun")

        assert in_threads([lambda: work(0), lambda: work(2), say])[:2] == [[2.0] * 3] * 2


def test_a_host_that_died_before_it_was_connected_to_is_dialled_where_it_came_again() -> None:
    """What connects to its last address, where nobody is any more, is there already, and goes on with the next one."""
    credentials = new_credentials(encrypted=False)
    with ExitStack() as stack:
        fabrics = [Fabric(host, 2, credentials) for host in range(2)]
        for fabric in fabrics:
            stack.callback(fabric.close)
        address = fabrics[0].listen()
        gone = open_port(("127.0.0.1", 0))
        nobody = gone.getsockname()
        gone.close()
        fabrics[1].connect(0, nobody)
        fabrics[1].connect(0, address)
        for fabric in fabrics:
            fabric.peers.open(VALUES)
        wait_for(lambda: fabrics[1].statistics()[0]["state"] == "connected")


ROSTER = Roster(0, ("a", "b", "c"), (1, 1, 1), ("127.0.0.1", 1))


def test_a_host_is_let_in_once_no_table_is_half_made() -> None:
    """Otherwise it would lack the one that is in the making: those that begin meanwhile wait for it."""
    coordinator = Coordinator(ROSTER)
    options = {
        "consistency": {"mode": "async", "staleness": 0},
        "on_lost": "continue",
        "exchange": ExchangeOptions().as_message(),
    }
    spec = {"initial": "master"}

    def ask(host: int, order: int) -> list[Any]:
        return coordinator.receive(host, Create(("order", order), spec, "async", [host], []))

    def done(host: int, order: int, step: Step) -> list[Any]:
        return coordinator.receive(host, Done(("order", order), step))

    assert "no worker of the job has begun" in coordinator.why_not()
    for host in range(3):
        coordinator.receive(host, Hello(("127.0.0.1", host)))
        coordinator.receive(host, Options(options))
        line = Line(host, 1000 + host, at.ALIVE, at.ACTIVE)
        coordinator.receive(host, Workers([line]))
    assert coordinator.why_not() == ""
    for host in range(3):
        orders = ask(host, 1)
    assert {type(order) for _, order in orders} == {Make}
    published = Published("policy", ("127.0.0.1", 7))
    assert coordinator.receive(1, published) == [(host, published) for host in range(3)]
    second = Published("policy", ("127.0.0.1", 8))
    assert coordinator.receive(0, second) == [(0, published)], "the first of a name counts"
    published = Published("policy", ("127.0.0.1", 8), published.address)
    assert coordinator.receive(0, published) == [(host, published) for host in range(3)], "until it is gone"
    coordinator.lose(2, "it went")
    assert coordinator.receive(2, Gone()) == [], "of a lost host nothing counts"
    assert coordinator.receive(2, Hello(("127.0.0.1", 9))) == []
    steps: tuple[Step, ...] = ("make", "join", "push")
    for step in steps:
        assert done(0, 1, step) == []
        if step == "make":
            assert ask(0, 2) == ask(1, 2) == [], "a table that begins now waits, too"
        orders = done(1, 1, step)
        assert (Welcome in {type(order) for _, order in orders}) == (step == "push")
    told = [(host, type(order)) for host, order in orders]
    assert told[-3:] == [(0, Make), (1, Make), (2, Make)], "and now goes on, with the new host"
    welcome = next(order for _, order in orders if isinstance(order, Welcome))
    assert [table.number for table in welcome.tables] == [1]
    assert welcome.published == [published]
    assert (welcome.survivors, welcome.lost, welcome.ordered) == ([[0, 1]], [], 1)
    assert (0, Joined) in told
    assert (1, Joined) in told
    coordinator.lose(2, "it went again")
    assert coordinator.receive(2, Hello(("127.0.0.1", 9))) == []
    assert ask(0, 3) == ask(1, 3) == []
    went_on = [(host, type(order)) for host, order in coordinator.lose(2, "it went before it was let in")]
    assert went_on == [(0, Make), (1, Make)], "what waited for it does not any more"


def run_killed(folder: Path, workers: int, job: str) -> subprocess.CompletedProcess[str]:
    (folder / "job.py").write_text(job)
    run = [sys.executable, "-m", "multiverso", "run", "--hosts", "2", "-n", str(workers)]
    done = subprocess.run(
        [*run, "--on-failure", "continue", "--replace", "1", "--log-dir", "logs", "job.py"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


def test_a_killed_host_of_a_synchronous_job_is_started_again_and_ends_with_everybodys_bits(tmp_path: Path) -> None:
    done = run_killed(tmp_path, 3, KILLED_IN_ROUNDS)
    lines = [line.split(" ", 1)[1] for line in done.stdout.splitlines()]
    lives, ends = zip(*(line.split(": ") for line in lines), strict=True)
    assert sorted(lives) == ["life 0", "life 0", "life 1"], done.stdout
    assert len(set(ends)) == 1, done.stdout
    rounds, with_both, made = map(int, ends[0].split()[:3])
    assert (rounds, with_both) == (made, 20), "each round counted once"


KILLED_IN_ROUNDS = """
import os, signal, time, zlib
import numpy as np
import multiverso as mv
mv.init(sync=True)
me, life = mv.worker_id(), mv.incarnation()
first = np.full(1000, 7.0 if life else 0.1)
table = mv.ArrayTableHandler(1000, init_value=first)
trained = mv.ArrayTableHandler(1000, updater="momentum")
counts = mv.ArrayTableHandler(2)  # rounds of worker 0, and of the one that came again
while True:
    table.add(np.random.default_rng(me).standard_normal(1000))
    trained.add(np.ones(1000))
    table.get(), trained.get()
    counts.add(np.array([me == 0, life == 1]))
    seen = counts.get()
    if seen[1] == 20:
        break
    if me == 2 and life == 0 and seen[0] == 50:
        os.kill(os.getppid(), signal.SIGKILL)  # the host's launcher, which has its node
        time.sleep(100)
    time.sleep(0.005)
mv.barrier()
bits = [zlib.crc32(t.snapshot().tobytes()) for t in (table, trained, counts)]
print(f"life {life}: {seen[0]:g} {seen[1]:g} {counts.version} {bits}", flush=True)
mv.shutdown()
"""


def test_a_killed_host_of_a_rehearsal_is_started_again(tmp_path: Path) -> None:
    done = run_killed(tmp_path, 2, KILLED)
    assert sorted(done.stdout.splitlines()) == ["[0] life 0: [108.0]", "[1] life 1: [108.0]"]
    assert "host-1" in done.stderr
    log = (tmp_path / "logs" / "worker-1.log").read_text().splitlines()
    assert log == ["it dies", "life 1: [108.0]"], "what the first process wrote is still there"
    assert "it is started again (1 of at most 1 replacements)" in done.stderr


KILLED = """
import os, signal, sys, time
import numpy as np
import multiverso as mv
mv.init()
me, life = mv.worker_id(), mv.incarnation()
table = mv.ArrayTableHandler(1000, init_value=np.full(1000, 50.0 if life else 5.0))
told = mv.Counter("lives")
mv.barrier()
for _ in range(3 if life else 50):
    table.add(np.ones(1000))
mv.barrier()
told.fetch_add()
if me == 1 and life == 0:
    print("it dies", file=sys.stderr, flush=True)
    while not open("logs/worker-1.log").read().endswith("\\n"):  # which comes by itself
        time.sleep(0.01)
    os.kill(os.getppid(), signal.SIGKILL)  # the host's launcher, which has its node
    time.sleep(100)
end = time.monotonic() + 90
while told.value < 3:
    assert time.monotonic() < end
    time.sleep(0.01)
mv.barrier()
print(f"life {life}: {np.unique(table.get()).tolist()}", flush=True)
mv.barrier()
mv.shutdown()
"""
