"""Synchronous rounds: each element is ``((t + d0) + d1) + ...``, the same bits in every worker and run."""

from __future__ import annotations

import functools
import json
import os
import random
import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest
from core_support import bits, in_threads, together

import multiverso as mv
from multiverso.layout import words as at
from multiverso.runtime import Node, Session
from multiverso.updaters import Updater

CHUNK = at.CHUNK_BYTES // 4
SIZES = [1, 17, 5000, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5]


@functools.lru_cache(64)
def _delta(worker: int, number: int, size: int) -> Any:
    random = np.random.default_rng([worker, number])
    return (random.standard_normal(size) * 10.0 ** random.integers(-6, 7, size)).astype("f4")


def delta(worker: int, number: int, size: int) -> Any:
    """Numbers of very different size, so that another order of the sums gives other bits; made once, and copied."""
    return _delta(worker, number, size).copy()


def pause(random: random.Random) -> None:
    if random.random() < 0.3:
        time.sleep(random.random() * 0.003)


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("size", SIZES)
def test_adds_and_reads(workers: int, size: int) -> None:
    rounds = 3 if size > CHUNK else 6

    def work(session: Session) -> Any:
        me, delays = session.worker_id, random.Random(session.worker_id)
        table = mv.ArrayTableHandler(size, delta(9, 0, size), session=session)
        seen = []
        for number in range(rounds):
            pause(delays)
            for part in range(me % 3):  # worker 0 adds nothing, worker 1 once, worker 2 twice, ...
                table.add(delta(me, 10 * number + part, size))
            pause(delays)
            seen.append(bits(table.get()))
        return seen, table.version

    expected, values = [], delta(9, 0, size)
    for number in range(rounds):
        for me in range(workers):
            if me % 3:
                whole = delta(me, 10 * number, size)
                if me % 3 == 2:
                    whole = whole + delta(me, 10 * number + 1, size)
                values = values + whole
        expected.append(bits(values))
    assert together(work, workers, sync=True) == [(expected, rounds)] * workers


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("size", [3, CHUNK + 1, 3 * CHUNK + 5])
def test_exchanges(workers: int, size: int) -> None:
    rounds = 4

    def work(session: Session) -> Any:
        me = session.worker_id
        table = mv.ArrayTableHandler(size, delta(9, 0, size), session=session)
        local = table.snapshot()
        last = local.copy()
        seen = []
        for number in range(rounds):
            if number == 2:
                table.add(delta(me, 100, size))  # an add before it, in the same round
            local += delta(me, number, size)
            table.exchange(local, last)
            assert bits(local) == bits(last)
            seen.append(bits(local))
        return seen, bits(table.snapshot())

    values, expected = delta(9, 0, size), []
    for number in range(rounds):
        pushed = [(values + delta(me, number, size)) - values for me in range(workers)]
        if number == 2:
            pushed = [delta(me, 100, size) + ((values + delta(me, number, size)) - values) for me in range(workers)]
        for push in pushed:
            values = values + push
        expected.append(bits(values))
    assert together(work, workers, sync=True) == [(expected, expected[-1])] * workers


def test_reads_and_exchanges_in_one_round() -> None:
    size = 2 * CHUNK + 7

    def work(session: Session) -> Any:
        table = mv.ArrayTableHandler(size, session=session)
        if session.worker_id == 1:
            local, last = delta(1, 0, size), np.zeros(size, "f4")
            table.exchange(local, last)
            return bits(local)
        if session.worker_id == 2:
            table.add(delta(2, 0, size))
        return bits(table.get())

    expected = bits(delta(1, 0, size) + delta(2, 0, size))
    assert together(work, 3, sync=True) == [expected] * 3


def _momentum() -> Updater:
    def apply(values, delta, state, stride, hyper, count):  # type: ignore[no-untyped-def]
        for i in range(count):
            state[i] = hyper[0] * state[i]
            state[i] += delta[i]
            values[i] -= state[i]

    return Updater("test-momentum", apply, states=1, hyper=(0.5,))


@pytest.mark.parametrize("size", [5, CHUNK + 3])
def test_an_updater_gets_the_sum_of_a_round_once(size: int) -> None:
    updater = _momentum()

    def work(session: Session) -> Any:
        table = mv.ArrayTableHandler(size, updater=updater, session=session)
        seen = []
        for number in range(5):
            if number != 3:  # nobody adds anything in this round: then no step is made
                table.add(delta(session.worker_id, number, size))
            seen.append(bits(table.get()))
        return seen

    values, speed, expected = np.zeros(size, "f4"), np.zeros(size, "f4"), []
    for number in range(5):
        if number != 3:
            speed = np.float32(0.5) * speed  # halving is exact, so fusing it changes nothing
            speed = speed + ((delta(0, number, size) + delta(1, number, size)) + delta(2, number, size))
            values = values - speed
        expected.append(bits(values))
    assert together(work, 3, sync=True) == [expected] * 3


def test_matrices_by_rows() -> None:
    rows, columns = 50, 7

    def work(session: Session) -> Any:
        me = session.worker_id
        table = mv.MatrixTableHandler(rows, columns, session=session)
        seen = []
        for number in range(4):
            random = np.random.default_rng([me, number])
            ids = random.integers(0, rows, 20)
            table.add(delta(me, number, 20 * columns).reshape(20, columns), row_ids=ids)
            if me == 1:
                seen.append(bits(table.get()[[3, 4, 5]]))
            else:
                seen.append(bits(table.get([3, 4, 5])))
        return seen

    values, expected = np.zeros((rows, columns), "f4"), []
    for number in range(4):
        for me in range(3):
            slot = np.zeros((rows, columns), "f4")
            ids = np.random.default_rng([me, number]).integers(0, rows, 20)
            for i, row in enumerate(ids):
                slot[row] += delta(me, number, 20 * columns).reshape(20, columns)[i]
            values = values + slot
        expected.append(bits(values[[3, 4, 5]]))
    assert together(work, 3, sync=True) == [expected] * 3


def test_the_barrier_neither_ticks_nor_commits_and_a_view_shows_the_last_round() -> None:
    def work(session: Session) -> Any:
        table = mv.ArrayTableHandler(2, session=session)
        table.add([1, 1])
        session.barrier()
        before = (table.version, table.view().tolist(), table.snapshot().tolist())
        session.barrier()
        first = table.get().tolist()
        return before, first, table.version, table.view().tolist()

    expected = ((0, [0.0, 0.0], [0.0, 0.0]), [2.0, 2.0], 1, [2.0, 2.0])
    assert together(work, 2, sync=True) == [expected] * 2


@pytest.mark.parametrize("size", [3, CHUNK + 3])
def test_a_worker_that_leaves_early_is_not_waited_for_and_its_staged_adds_count(size: int) -> None:
    def work(session: Session) -> Any:
        me = session.worker_id
        table = mv.ArrayTableHandler(size, session=session)
        seen = []
        for number in range(6):
            table.add(delta(me, number, size))
            if me == 2 and number == 3:
                return seen  # the session is shut down with an add that nobody has read
            seen.append(bits(table.get()))
        return seen

    values, expected = np.zeros(size, "f4"), []
    for number in range(6):
        for me in (0, 1, 2) if number < 4 else (0, 1):
            values = values + delta(me, number, size)
        expected.append(bits(values))
    results = together(work, 3, sync=True)
    assert results == [expected, expected, expected[:3]]


def test_a_latecomer_of_an_elastic_job_joins_the_next_round() -> None:
    with Node(None) as node:
        ready, go = threading.Event(), threading.Event()

        def early() -> Any:
            with Session(node.address, 0, sync=True, timeout_seconds=30) as session:
                table = mv.ArrayTableHandler(CHUNK + 1, session=session, name="t")
                for _ in range(3):
                    table.add(np.ones(CHUNK + 1))
                    table.get()
                ready.set()
                assert go.wait(30)
                return [self_and_rest(table) for _ in range(4)]

        def late() -> Any:
            assert ready.wait(30)
            with Session(node.address, 1, sync=True, timeout_seconds=30) as session:
                table = mv.ArrayTableHandler(CHUNK + 1, session=session, name="t")
                first = table.snapshot()[[0, -1]].tolist()
                go.set()
                return [first, *(self_and_rest(table) for _ in range(4))]

        def self_and_rest(table: Any) -> Any:
            table.add(np.ones(CHUNK + 1))
            return table.get()[[0, -1]].tolist()

        one, two = in_threads([early, late])
    assert one == [[5, 5], [7, 7], [9, 9], [11, 11]]
    assert two == [[3, 3], *one]


def test_latecomers_and_leavers_at_any_moment_agree() -> None:
    """Workers come and go while others go through rounds: everybody who has a round has the same bits."""
    size, seen, lock = 2 * CHUNK + 1, {}, threading.Lock()

    with Node(None) as node:

        def work(start: int) -> int:
            done = 0
            delays = random.Random(start)
            for _ in range(4):
                pause(delays)
                with Session(node.address, sync=True, timeout_seconds=30) as session:
                    table = mv.ArrayTableHandler(size, session=session, name="t")
                    for _ in range(delays.randrange(6)):
                        pause(delays)
                        if delays.random() < 0.5:
                            table.add(np.ones(size))
                            done += 1
                            values = table.get()
                        else:
                            local = np.ones(size, "f4")
                            table.exchange(local, np.zeros(size, "f4"))
                            done += 1
                            values = local
                        with lock:
                            assert seen.setdefault(table.version, bits(values)) == bits(values)
                    if delays.random() < 0.5:
                        table.add(np.ones(size))  # left behind for the others' next round
                        done += 1
            return done

        pushed = sum(in_threads([lambda i=i: work(i) for i in range(4)]))
        with Session(node.address, sync=True, timeout_seconds=30) as session:
            table = mv.ArrayTableHandler(size, session=session, name="t")
            values = table.get()
    assert (values == pushed).all()
    assert len(seen) > 10


TRAINING = """
import json, os, random, sys, time
import numpy as np
import multiverso as mv
from multiverso.kernels import dense, rows, waits
from multiverso.kernels.rounds import calls as rounds
from multiverso.runtime import Session

def train(address, worker_id, delays):
    inputs = np.random.default_rng(0).standard_normal((400, 20)).astype("f4")
    answers = (inputs @ np.arange(20, dtype="f4") > 0).astype("f4")
    with Session(address, worker_id, sync=True, start_timeout_seconds=60, timeout_seconds=60) as s:
        weights = mv.ArrayTableHandler(20, np.full(20, 0.1), session=s)
        scale = mv.MatrixTableHandler(20, 3, session=s, updater="sgd")
        w = weights.get()
        for step in range(60):
            if delays.random() < 0.3:
                time.sleep(delays.random() * 0.004)
            x, y = inputs[worker_id::4][step::60], answers[worker_id::4][step::60]
            gradient = x.T @ (1 / (1 + np.exp(-(x @ w))) - y)
            weights.add(-0.1 * gradient)
            rows = [step % 20, (step + 1) % 20]
            scale.add(np.outer(gradient, [1, 0.1, 0.01])[rows], rows)
            if delays.random() < 0.3:
                time.sleep(delays.random() * 0.004)
            w = weights.get()
            m = scale.get()
        return w.tobytes().hex(), m.tobytes().hex()

for kernel in (dense.add, rows.add_rows, rounds.read):
    kernel.compiled("float32")
waits.barrier.compiled()
results = []
for run, address in enumerate(sys.argv[1:]):
    pipes = [os.pipe() for _ in range(4)]
    for i, (_, end) in enumerate(pipes):
        if os.fork() == 0:
            os.write(end, json.dumps(train(address, i, random.Random(10 * run + i))).encode())
            os._exit(0)
    for _ in pipes:
        assert os.wait()[1] == 0
    results.append([json.loads(os.read(begin, 65536)) for begin, _ in pipes])
print(json.dumps(results))
"""


def test_a_training_run_has_the_same_bits_whatever_the_timing() -> None:
    """Four processes, twice, with different random delays."""
    with Node(4) as one, Node(4) as two:
        done = subprocess.run(
            [sys.executable, "-c", TRAINING, one.address, two.address],
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout.splitlines()[-1])
    assert len(results) == 2
    assert len({tuple(said) for run in results for said in run}) == 1


@pytest.mark.parametrize("options", [{"sync": True}, {"sync": True, "quorum": 3}, {"staleness": 0}], ids=str)
def test_the_first_round_of_a_table_with_a_name_has_all_workers(options: dict[str, Any]) -> None:
    """A worker that opened it late was in fewer rounds, without a word."""

    def work(session: Session) -> Any:
        time.sleep(0.2 * session.worker_id)
        table = mv.ArrayTableHandler(2, [session.worker_id + 5.0] * 2, name="weights", session=session)
        members = sorted(session.wait_graph().tables[table.number].members)
        table.add([1, 1])
        mine = table.get().tolist()
        return members, mine if session.consistency.in_rounds else None

    assert together(work, 3, **options) == [([0, 1, 2], [8.0, 8.0] if "sync" in options else None)] * 3


def test_the_first_round_of_a_keyed_table_with_a_name_has_all_workers() -> None:
    def work(session: Session) -> Any:
        time.sleep(0.2 * session.worker_id)
        table = mv.KeyedTable(2, name="weights", session=session)
        table.add([[1, 1]], [7])
        return table.get([7]).tolist()

    assert together(work, 3, sync=True) == [[[3.0, 3.0]]] * 3
