"""More workers than one host may have: 64 are what a word has bits for, on each host."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from core_support import let_die, outcome, wait_for
from rehearsing import rehearsal

import multiverso as mv
from multiverso.errors import StartupError, WorkerLostError
from multiverso.hosts.roster import Roster
from multiverso.layout import words as at
from multiverso.runtime import Session
from multiverso.runtime.collective.reducer import all_reduce
from multiverso.tables.batches import deal
from multiverso.testing.faults import hold_stripe

HOSTS = (24, 21, 21)
WORKERS = sum(HOSTS)
SUM = WORKERS * (WORKERS + 1) // 2  # of 1 + each worker's number
OPTIONS: dict[str, Any] = {"timeout_seconds": 120, "start_timeout_seconds": 120}


def test_workers_beyond_the_64th_add_and_reduce_and_share_rows_by_key() -> None:
    keys = np.arange(20) * 7919

    def work(session: Session) -> Any:
        array = mv.ArrayTableHandler(10, dtype="int64", session=session)
        rows = mv.KeyedTable(2, dtype="int64", session=session)
        array.add(np.full(10, 1 + session.worker_id))
        rows.add(np.full((keys.size, 2), 1 + session.worker_id), keys)
        session.barrier()
        found = {*array.get().tolist(), *rows.get(keys).reshape(-1).tolist()}
        found.add(int(all_reduce(session, np.full(3, 1 + session.worker_id))[0]))
        batches = [batch.tolist() for batch in deal(session, 200, 1)]
        session.barrier()
        return found, batches

    with rehearsal(*HOSTS) as job:
        found = job.run(work, **OPTIONS)
    assert [one for one, _ in found] == [{SUM}] * WORKERS
    assert sorted(batch[0] for _, batches in found for batch in batches) == list(range(200))


@pytest.mark.parametrize("mode", [{"sync": True}, {"staleness": 1}, {"sync": True, "quorum": 1.0}])
def test_workers_beyond_the_64th_are_waited_for(mode: dict[str, Any]) -> None:
    """A host's rounds have bits for its own workers only, and its clocks a line for each of all."""

    def work(session: Session) -> list[Any]:
        sums = mv.ArrayTableHandler(10, dtype="int64", session=session)
        means = mv.ArrayTableHandler(5, updater="momentum", session=session)
        for _ in range(2):
            sums.add(np.full(10, 1 + session.worker_id))
            means.add(np.full(5, 0.5, np.float32))
            sums.get()
            means.get()
        session.barrier()
        found = [set(sums.get().tolist()), set(means.get().tolist())]
        session.barrier()
        return found

    with rehearsal(*HOSTS) as job:
        found = job.run(work, **OPTIONS, **mode)
    assert [sums for sums, _ in found] == [{2 * SUM}] * WORKERS
    assert all(means == found[0][1] for _, means in found)


def test_a_host_with_all_64_workers_has_rounds() -> None:
    """Bits of all of them are -1 as a number, which once meant that one is not ready."""

    def work(session: Session) -> set[int]:
        sums = mv.ArrayTableHandler(3, dtype="int64", session=session)
        sums.add(np.full(3, 1 + session.worker_id))
        return set(sums.get().tolist())

    with rehearsal(64, 1) as job:
        assert job.run(work, sync=True, **OPTIONS) == [{65 * 66 // 2}] * 65


def test_a_lost_worker_beyond_the_64th_ends_an_all_reduce_though_others_have_not_come() -> None:
    last, passed = WORKERS - 1, threading.Barrier(WORKERS)

    def work(session: Session) -> None:
        session.barrier()
        passed.wait(60)  # one that is slow to leave it would hear there that another has died since
        if session.worker_id == 3:
            wait_for(lambda: sum(error is not None for error in errors) == WORKERS - 2, 60)
        elif session.worker_id == last:
            let_die(session)
        else:
            errors[session.worker_id] = outcome(lambda: all_reduce(session, np.ones(3)))

    errors: list[Any] = [None] * WORKERS
    with rehearsal(*HOSTS) as job:
        job.run(work, **OPTIONS)
    assert all(isinstance(error, WorkerLostError) for i, error in enumerate(errors) if i not in (3, last))


def test_a_stripe_of_a_dead_worker_is_taken_over_where_numbers_are_no_indexes() -> None:
    """Workers 2 and 3 are the first two of the second host's memory."""

    def work(session: Session) -> Any:
        table = mv.ArrayTableHandler(10, dtype="int64", session=session)
        session.barrier()
        if session.worker_id == 3:
            hold_stripe(table)
            let_die(session)
        elif session.worker_id == 2:
            wait_for(lambda: 3 not in session.live_workers(), 60)
            table.add(np.full(10, 7))
            return table.get().tolist()
        return None

    options = {**OPTIONS, "on_lost": "continue", "timeout_seconds": 20}
    with rehearsal(2, 2, on_lost="continue") as job:
        assert job.run(work, **options)[2] == [7] * 10


def test_one_beyond_the_64th_that_others_wait_for_is_named() -> None:
    last = WORKERS - 1

    def work(session: Session) -> list[list[int]]:
        table, awaited = mv.ArrayTableHandler(10, session=session), [[last]] * last
        if session.worker_id == last:
            with suppress(AssertionError):  # what there was instead is shown below
                wait_for(lambda: awaited_in(session) == awaited, 60)
            awaited = awaited_in(session)
        table.get()
        return awaited

    with rehearsal(*HOSTS) as job:
        assert job.run(work, sync=True, **OPTIONS)[last] == [[last]] * last


def awaited_in(session: Session) -> list[list[int]]:
    """For whom each worker waits that waits for a round."""
    graph = session.wait_graph()
    waits = [worker.wait for worker in graph.workers.values()]
    return [graph.missing(wait) for wait in waits if wait is not None and wait.kind == at.FOR_ROUND]


def test_a_host_has_at_most_64_workers() -> None:
    with pytest.raises(StartupError, match=r"each host of a job has 1 to 64 workers, .* 4096 at most; got 65, 1"):
        Roster(0, ("a", "b"), (65, 1), ("127.0.0.1", 1))
