"""What newcomers try first, and programs of the C++ interface ask for."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from core_support import outcome, together, wait_for

import multiverso as mv
from multiverso.errors import (
    DtypeMismatchError,
    LockStateError,
    NotInThisJobError,
    ShapeMismatchError,
    StartupError,
    WaitTimeoutError,
)
from multiverso.layout import words as at
from multiverso.runtime import Node, Session
from multiverso.runtime.collective.reducer import Reducer, all_reduce


@pytest.fixture
def ended() -> Iterator[None]:
    """Whatever a test does, no session is left open."""
    yield
    mv.shutdown()


def test_init_returns_the_session_and_can_stand_in_a_with(ended: None) -> None:
    with mv.init() as session:
        assert session is mv.current()
        assert (mv.rank(), mv.size()) == (mv.worker_id(), mv.workers_num()) == (0, 1)
    with pytest.raises(mv.errors.ClosedError):
        mv.rank()
    mv.init()


def test_a_notebooks_cell_can_run_again(ended: None) -> None:
    session = mv.init(staleness=2)
    with pytest.raises(StartupError, match=r"shutdown\(\) first, or init\(exist_ok=True\)"):
        mv.init(staleness=2)
    assert mv.init(staleness=2, exist_ok=True) is session
    with pytest.raises(StartupError, match=r"other options: sync, staleness \(sync=False, staleness=2 then\)"):
        mv.init(sync=True, exist_ok=True)


def test_a_start_names_who_has_not_come() -> None:
    with Node(3) as node:
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(lambda: outcome(lambda: Session(node.address, 2, start_timeout_seconds=0.3)))
            errors = [outcome(lambda: Session(node.address, 0, start_timeout_seconds=0.3)), other.result(30)]
        said = r"worker 1 has not come: it is still importing, its init\(\) is compiling kernels, or it was never"
        assert all(type(error) is WaitTimeoutError for error in errors)
        assert any(re.search(said, str(error)) for error in errors)


def test_init_in_a_workers_child_says_whose_child_it_is(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(
        "import subprocess, sys\nimport multiverso as mv\nmv.init()\n"
        "if sys.argv[1:] != ['child']:\n    subprocess.run([sys.executable, __file__, 'child'])\nmv.shutdown()\n"
    )
    command = [sys.executable, "-m", "multiverso", "run", "-n", "1", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert re.search(r"process \d+ is a child of worker 0 \(process \d+\)", done.stderr)
    assert "use multiverso in the worker alone" in done.stderr


def test_numpy_gets_a_copy_of_a_table(alone: Session) -> None:
    table = mv.MatrixTableHandler(2, 3, range(6), session=alone)
    assert np.asarray(table).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert np.array(table, dtype="float64").dtype == np.float64
    np.asarray(table)[:] = 7
    assert float(np.sum(table)) == 15


def test_numpys_copy_of_a_synchronous_table_ends_no_round() -> None:
    def work(session: Session) -> Any:
        table = mv.ArrayTableHandler(2, 1, session=session)
        if session.worker_id == 0:
            assert np.asarray(table).tolist() == [1, 1]
        table.add(1)
        return table.get().tolist()

    assert together(work, 2, sync=True) == [[3, 3]] * 2


def test_one_number_is_added_to_all(alone: Session) -> None:
    table = mv.MatrixTableHandler(2, 3, session=alone)
    table.add(2)
    table.add_async(np.float32(0.5)).wait()
    assert np.unique(table.get()).tolist() == [2.5]
    with pytest.raises(ShapeMismatchError):
        table.add([1, 2])
    table.add(1, row_ids=[1])
    table.add_async(np.float32(0.5), [1, 1]).wait()
    assert table.get().tolist() == [[2.5] * 3, [4.5] * 3]
    keyed = mv.KeyedTable(2, session=alone)
    keyed.add(3, keys=[7, -3])
    keyed.add(np.float32(0.5), keys=7)
    assert keyed.get([7, -3, 5]).tolist() == [[3.5] * 2, [3] * 2, [0] * 2]


def test_unaligned_row_ids_are_row_ids(alone: Session) -> None:
    table = mv.MatrixTableHandler(4, 2, session=alone)
    memory = np.zeros(8 * 3 + 1, np.uint8)
    ids = memory[1:].view(np.int64)
    ids[:] = (0, 3, 3)
    assert not ids.flags.aligned
    table.add(np.ones((3, 2), "f4"), row_ids=ids)
    assert table.get(ids)[:, 0].tolist() == [1, 2, 2]
    keyed = mv.KeyedTable(2, session=alone)
    keyed.add(np.ones((3, 2), "f4"), ids)
    assert keyed.get(ids)[:, 0].tolist() == [1, 2, 2]
    assert keyed.contains(ids).all()
    assert keyed.remove(ids).tolist() == [True, True, False]


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("sync", [False, True])
def test_all_workers_get_the_same_reduction(workers: int, sync: bool) -> None:
    def work(session: Session) -> Any:
        me = session.worker_id + 1
        out = np.empty(3)
        all_reduce(session, np.array([me, 2.0 * me, 0.5]), "sum", out)
        return [out.tolist(), int(all_reduce(session, np.array(me), "max"))]

    total = sum(range(1, workers + 1))
    assert together(work, workers, sync=sync) == [[[total, 2 * total, workers / 2], workers]] * workers


def test_all_reduce_takes_what_tables_take(ended: None) -> None:
    mv.init()
    assert mv.all_reduce([1, 2]).tolist() == [1, 2]
    mine = np.ones(2, "f4")
    assert mv.all_reduce(mine, "average", out=mine) is mine
    for wrong, error in ((["a"], DtypeMismatchError), ([1j], DtypeMismatchError)):
        with pytest.raises(error):
            mv.all_reduce(wrong)
    with pytest.raises(ValueError, match="operation is one of"):
        mv.all_reduce([1], "xor")
    with pytest.raises(ShapeMismatchError, match=r"writable NumPy array of \(2,\) int64; got \(3,\) int64"):
        mv.all_reduce([1, 2], out=np.zeros(3, int))
    with pytest.raises(ShapeMismatchError, match="got list"):
        mv.all_reduce([1, 2], out=[0, 0])


def test_the_average_of_large_integers_is_one_of_them() -> None:
    """Their sum did not fit."""
    large = np.array([2**31 - 1, -(2**31)], "i4")
    for result in together(lambda session: all_reduce(session, large, "average")):
        assert (result.dtype, result.tolist()) == (np.dtype("i4"), large.tolist())


def test_a_session_has_one_reducer_of_a_number_of_workers(ended: None) -> None:
    """Two would write the same memory, each without the other's progress."""
    session = mv.init()
    mv.all_reduce([1])
    with pytest.raises(ValueError, match="has a Reducer of 1 workers already"):
        Reducer(session, 1)


def test_threads_of_a_worker_take_turns_in_all_reduce() -> None:
    """Two equal calls at once were taken for one that is repeated: the second one's numbers were lost."""

    def work(session: Session) -> list[float]:
        def of(value: float) -> float:
            return float(all_reduce(session, np.array([value]))[0])

        if session.worker_id == 1:
            wait_for(lambda: (wait := session.control.worker(0).wait) and wait.kind == at.FOR_REDUCTION)
            return [of(10), of(20)]
        with ThreadPoolExecutor(2) as pool:
            return sorted(pool.map(of, (1, 2)))

    mine, others = together(work)
    assert sorted(others) == mine
    assert mine in ([11, 22], [12, 21])


def test_all_reduce_in_a_handler_that_interrupts_it_is_refused() -> None:
    def work(session: Session) -> Any:
        if session.worker_id == 1:
            return all_reduce(session, np.ones(2)).tolist()
        with session.reducing:  # what a handler finds that has interrupted this thread's call
            refused = outcome(lambda: all_reduce(session, np.ones(2)))
        return refused, all_reduce(session, np.ones(2)).tolist()

    (refused, mine), others = together(work)
    assert isinstance(refused, LockStateError)
    assert mine == others == [2, 2]


def test_all_reduce_needs_a_number_of_workers() -> None:
    with Node(None) as node, Session(node.address) as session, pytest.raises(NotInThisJobError, match="come and go"):
        all_reduce(session, np.ones(1))
