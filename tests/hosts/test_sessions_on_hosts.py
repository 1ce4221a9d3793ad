"""Sessions of a job on several hosts: who may take part, what is refused, what everybody knows."""

from __future__ import annotations

import re
import threading
from typing import Any

import numpy as np
import pytest
from core_support import in_threads, outcome, wait_for
from interrupted_tasks import all_of_it, repeated
from rehearsing import rehearsal

import multiverso as mv
from multiverso.cli.top import Job, render
from multiverso.deadline import Deadline
from multiverso.errors import NotInThisJobError, StartupError, WaitTimeoutError
from multiverso.hosts.control.coordinator import Coordinator
from multiverso.hosts.fabric import Fabric
from multiverso.hosts.options import ExchangeOptions
from multiverso.hosts.roster import Roster
from multiverso.hosts.transport.credentials import new_credentials
from multiverso.hosts.transport.handshake import CONTROL, Hello, connect
from multiverso.runtime import Node, Session
from multiverso.runtime.collective.agreement import all_gather
from multiverso.runtime.several_hosts.other_hosts import OtherHosts
from multiverso.tables import ArrayTableHandler
from multiverso.tables.log import log_of
from multiverso.watching.jobs import find_jobs


def test_another_wire_on_another_host_is_refused() -> None:
    with rehearsal(1, 1) as job:

        def begin(worker_id: int) -> Any:
            exchange = ExchangeOptions.of(("native", "int8")[worker_id])
            return outcome(lambda: job.session(worker_id, exchange=exchange, start_timeout_seconds=20).shutdown())

        results = in_threads([lambda: begin(0), lambda: begin(1)])
    assert any(isinstance(r, StartupError) and "wire='int8'" in str(r) for r in results)


def test_no_worker_begins_before_its_arguments_are_agreed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Coordinator, "_check_options", lambda self, host, report: [])  # it has not said so yet
    with rehearsal(1, 1) as job:

        def begin(worker_id: int) -> Any:
            return outcome(lambda: job.session(worker_id, start_timeout_seconds=0.5).shutdown())

        results = in_threads([lambda: begin(0), lambda: begin(1)])
    assert [type(result) for result in results] == [WaitTimeoutError] * 2


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
    assert ExchangeOptions.from_message(
        ExchangeOptions.of("int8", "7 adds", "diloco").as_message()
    ) == ExchangeOptions.of("int8", "7 adds", "diloco")


def test_what_works_on_one_host_only_is_refused_in_a_sentence() -> None:
    def work(session: Session) -> list[str]:
        table = ArrayTableHandler(4, np.arange(4.0), session=session)
        calls: list[Any] = [
            lambda: session.shared_memory("mine", 64),
            lambda: ArrayTableHandler(5, dtype="int32", initial="mean", session=session),
        ]
        errors = [outcome(call) for call in calls]
        assert all(type(error) is NotInThisJobError for error in errors), errors
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
            Node(2, other_hosts=OtherHosts(roster, Fabric(1, 2, mine)))
        wait_for(lambda: set(threading.enumerate()) <= before)


def test_a_worker_of_another_host_is_turned_away() -> None:
    with rehearsal(1, 1) as job, pytest.raises(StartupError, match="belongs to host-1, not to host-0"):
        Session(job.nodes[0].address, 1)


def test_other_arguments_of_init_on_another_host_are_refused() -> None:
    with rehearsal(1, 1) as job:

        def begin(worker_id: int) -> Any:
            on_lost = ("stop", "continue")[worker_id]
            return outcome(lambda: job.session(worker_id, on_lost=on_lost, start_timeout_seconds=20).shutdown())

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


def test_a_rehearsal_is_one_job_for_who_looks_at_it() -> None:
    with rehearsal(1, 1, 1) as job:

        def work(session: Session) -> None:
            session.barrier()
            ours = {node.address for node in job.nodes}

            def found() -> list[tuple[str, int]]:
                seen = [status for status in find_jobs() if status["address"] in ours]
                return [(status["address"], len(status["workers"])) for status in seen]

            wait_for(lambda: found() == [(job.nodes[0].address, 3)])  # one that is too busy to answer is left out
            session.barrier()

        job.run(work)


def test_every_node_knows_what_the_workers_of_all_hosts_have_done() -> None:
    with rehearsal(1, 1) as job:

        def work(session: Session) -> None:
            table = ArrayTableHandler(4, session=session, name="weights")
            for _ in range(session.worker_id + 3):
                table.add(np.ones(4))
            log_of(session).write({"loss": 0.25}, session.worker_id)
            for node in job.nodes:
                wait_for(lambda node=node: _adds(node.status()) == {0: 3, 1: 4})
                wait_for(lambda node=node: _steps(node.status()) == [0, 1])
                assert min(worker["resident_bytes"] for worker in node.status()["workers"]) > 1_000_000
            session.barrier()
            for node, other in zip(job.nodes, ("host-1", "host-0"), strict=True):
                (link,) = node.status()["links"]
                assert (link["host"], link["state"]) == (other, "connected")
                assert min(link["bytes_sent"], link["bytes_received"]) > 16
                assert 0 < link["round_trip_seconds"] < 60
                assert 0 <= link["busy_seconds"] < 60
                assert re.search(rf"{other} +connected .* ms +0 times", render([Job().see(node.status())]))
            session.barrier()

        job.run(work)


def _steps(status: dict[str, Any]) -> list[Any]:
    return [(worker["logged"] or {}).get("step") for worker in status["workers"]]


def _adds(status: dict[str, Any]) -> dict[int, int]:
    hosts = {worker["id"]: worker["host"] for worker in status["workers"]}
    assert hosts == {0: "host-0", 1: "host-1"}
    return {worker: line["adds"] for worker, line in status["tables"][0]["workers"].items()}


def test_workers_tell_each_other_across_hosts() -> None:
    def work(session: Session) -> Any:
        return [all_gather(session, f"{session.worker_id} says {i}") for i in range(3)]

    with rehearsal(2, 1) as job:
        results = job.run(work)
    assert results == [[{w: f"{w} says {i}" for w in range(3)} for i in range(3)]] * 3


def test_a_table_that_comes_to_be_while_its_node_ends_does_not_keep_that() -> None:
    """What follows the clocks of a job's first table began after what ends it had looked."""
    with rehearsal(1, 1) as job:
        other_hosts: Any = job.nodes[1].hosts
        end = other_hosts.fabric.close

        def end_late() -> None:
            end()
            other_hosts.tables.clocks.follow(7)

        other_hosts.fabric.close = end_late
        in_threads([job.nodes[1].close])


def test_a_second_init_is_refused_at_once_in_all_workers_and_harms_nobody() -> None:
    """Where the others of its host had left meanwhile, the host's node failed."""
    with rehearsal(2, 1) as job:
        refused = threading.Event()

        def work(worker: int) -> Any:
            with job.session(worker) as session:
                session.barrier()
                if worker:
                    assert refused.wait(30)
                    session.live_workers()
            error = outcome(lambda: job.session(worker))
            refused.set()
            return str(error)

        errors = in_threads([lambda i=i: work(i) for i in range(3)])  # type: ignore[misc]
    assert all("a job on several hosts cannot begin a second time" in error for error in errors), errors


def test_one_that_begins_again_what_all_do_together_is_named_to_the_others_and_all_repeat_it() -> None:
    places = ["action", "before the barrier", "after the barrier", "before it tells", "after it tells"]
    with rehearsal(1, 1) as job:
        for_others, for_it = job.run(lambda session: [repeated(session, where) for where in places])
    for (error, result), (_, own) in zip(for_others, for_it, strict=True):
        assert error.startswith("worker 1 began again")
        assert result == own == all_of_it(2)


def test_how_old_other_hosts_adds_are_is_known_while_they_are_held_back() -> None:
    def work(session: Session) -> None:
        table = ArrayTableHandler(4, session=session, name="weights", every="1000000 adds")
        session.barrier()
        before = [_behind(node) for node in job.nodes]
        session.barrier()
        if session.worker_id == 0:
            table.add(np.ones(4))
        for node, least in zip(job.nodes, before, strict=True):
            wait_for(lambda node=node, least=least: _behind(node) > least + 0.01)
        shown = Job().see(job.nodes[0].status())
        assert re.search(r"host-1 +connected .* ms +\d+ ms +0 times", render([shown]))
        session.barrier()

    with rehearsal(1, 1) as job:
        job.run(work)


def _behind(node: Node) -> float:
    (link,) = node.status()["links"]
    return float(link["behind_seconds"])
